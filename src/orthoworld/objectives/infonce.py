"""InfoNCE: tell the partner of a view from the other states of the batch."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import at_least_float32, real, views, without_autocast
from orthoworld.errors import ShapeError


def infonce(h: Tensor, *, sigma: float = 1.0) -> Float[Tensor, ""]:
    """Return the symmetric cross-entropy of finding each partner by the similarity `-||u - v||^2 / (2 sigma^2)`.

    Distances come from one matrix product; nothing of size batch x batch x dim is built.

    Args:
        h: embeddings `(2, batch, dim)`.
        sigma: width of the kernel, > 0. See `matched_sigma`: the published value 1 favours an inflated embedding.

    Returns:
        Scalar in nats, the mean over both directions. `log(batch)` for a constant embedding; independent views give
        more.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has not three dimensions, or not two views.
        ArgumentError: `sigma` is not a finite number > 0.

    Example:
        >>> round(infonce(torch.zeros(2, 8, 3)).item(), 4)  # log 8
        2.0794
    """
    if h.ndim != 3 or h.shape[0] != 2:
        raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected (2, batch, dim)")
    scale = real("sigma", sigma, 0, math.inf)
    h = at_least_float32(views(h)) / scale
    with without_autocast(h.device):
        u, v = h - h.mean(dim=(0, 1))  # distances do not change, and smaller norms cancel with less rounding
        logits = u @ v.T - u.square().sum(dim=1)[:, None] / 2 - v.square().sum(dim=1) / 2
        target = torch.arange(h.shape[1], device=h.device)
        forward = torch.nn.functional.cross_entropy(logits, target)
        return (forward + torch.nn.functional.cross_entropy(logits.T, target)) / 2


def matched_sigma(r: float) -> float:
    """Return the kernel width for which the orthogonal map minimises InfoNCE in a Gaussian world.

    Formula, for large batches: with `h = s Q z` and `a = s^2 / sigma^2` the loss of each dimension is, up to constants,
    `a (1 - r) - log(1 + a) / 2 - a / (2 (1 + a))`, least at `1 / (1 + a) + 1 / (1 + a)^2 = 2 (1 - r)`. So `s = 1` needs
    `1 / sigma^2 = 2 / (sqrt(9 - 8 r) - 1) - 1`. Matching the cross term of the transition density alone would give
    `sigma^2 = (1 - r^2) / r`, which is near it for `r` near 1.

    Args:
        r: pair correlation, in (0, 1).

    Raises:
        ArgumentError: `r` lies outside (0, 1).

    Example:
        >>> round(matched_sigma(0.9025) ** 2, 4)
        0.2006
    """
    return 1 / math.sqrt(2 / (math.sqrt(9 - 8 * real("r", r, 0, 1)) - 1) - 1)
