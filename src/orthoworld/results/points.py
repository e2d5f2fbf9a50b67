"""Points of a finished run to draw: latents, observations, and the recovered latents turned onto the true ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.results.store import StoredRun
from orthoworld.streams import stream
from orthoworld.training.run import encode


@dataclass(frozen=True)
class Points:
    """Latents `z`, observations `x`, and embeddings `h` centred and turned by the best orthogonal map, unscaled."""

    z: Float[Tensor, "n 2"]
    x: Float[Tensor, "n 2"]
    h: Float[Tensor, "n 2"]


def sample_points(run: StoredRun, n: int = 10_000) -> Points:
    """Draw fresh states of a run's world of two latents and encode them."""
    pairs = run.world().sample_pairs(n, generator=stream(run.spec.seed, "figure"))
    return Points(pairs.z, pairs.x, turned_onto(pairs.z, encode(run.representation(), pairs.x)))


def turned_onto(z: Float[Tensor, "n dim"], h: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Return centred `h` turned by the orthogonal map that brings it closest to centred `z` (orthogonal Procrustes).

    Rows that are not finite have no part in the map, and come back not finite.
    """
    good = torch.isfinite(h).all(dim=1)
    if not good.any():
        return torch.full_like(h, torch.nan)
    centred = h - h[good].mean(dim=0)
    u, _, v = torch.linalg.svd(centred[good].T @ (z[good] - z[good].mean(dim=0)), full_matrices=False)
    return centred @ (u @ v)
