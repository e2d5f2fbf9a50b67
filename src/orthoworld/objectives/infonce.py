"""InfoNCE: tell the partner of a view from the other states of the batch."""

import math

from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import at_least_float32, real, without_autocast
from orthoworld.errors import ShapeError
from orthoworld.objectives.objective import two_or_more_views
from orthoworld.objectives.processes import gathered_rows, global_mean


def infonce(h: Tensor, *, sigma: float | Float[Tensor, " runs"] = 1.0) -> Float[Tensor, "*runs"]:
    """Return the symmetric cross-entropy of finding each partner by the similarity `-||u - v||^2 / (2 sigma^2)`.

    Distances come from one matrix product; nothing of size batch x batch x dim is built.

    Args:
        h: embeddings `(2, batch, dim)`; of several runs, `(runs, 2, batch, dim)`.
        sigma: width of the kernel, > 0; for several runs, maybe one for each. See `matched_sigma`: the published value
            1 favours an inflated embedding.

    Returns:
        Scalar in nats, one for each run, the mean over both directions. `log(batch)` for a constant embedding;
        independent views give more.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has neither three nor four dimensions, or not two views.
        ArgumentError: `sigma` is not a finite number > 0.

    Example:
        >>> import torch
        >>> round(infonce(torch.zeros(2, 8, 3)).item(), 4)  # log 8
        2.0794
    """
    if h.ndim not in (3, 4) or h.shape[-3] != 2:
        raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected (2, batch, dim)")
    scale = sigma[:, None, None, None] if isinstance(sigma, Tensor) else real("sigma", sigma, 0, math.inf)
    h = at_least_float32(two_or_more_views(h)) / scale
    with without_autocast(h.device):
        every, start = gathered_rows(h)
        centre = every.mean(dim=(-3, -2), keepdim=True)  # distances do not change, and smaller norms lose fewer digits
        (u, v), (all_u, all_v) = (h - centre).unbind(-3), (every - centre).unbind(-3)
        loss, _ = global_mean((_entropy(u, all_v, start) + _entropy(v, all_u, start)) / 2, h.shape[-2])
    return loss


def _entropy(
    u: Float[Tensor, "*runs batch dim"], candidates: Float[Tensor, "*runs rows dim"], start: int
) -> Float[Tensor, "*runs"]:
    """Return the mean cross-entropy of finding the partner of row `i` of `u`, row `start + i` of the candidates.

    The norm of `u` is the same for all candidates, and is left out.
    """
    logits = u @ candidates.mT - candidates.square().sum(dim=-1).unsqueeze(-2) / 2
    partner = logits.diagonal(offset=start, dim1=-2, dim2=-1)
    return (logits.logsumexp(dim=-1) - partner).mean(dim=-1)


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
