"""The measures as the paper's code takes them, to stand beside its tables; `recovery` corrects them.

R2 is fitted and scored on the same points and weighted by the variance of each dimension. From `n` points and `d`
regressors its excess over the truth is about `d / n` of what is left unexplained: at 1,024 dimensions and 10,000 points
that makes an R2 of .737 out of one of .70.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.identifiability.moments import as_rows, inverse

GRID_LIMIT = 3.0
GRID_POINTS = 100


def in_sample_r2(source: Tensor, target: Tensor) -> float:
    """Return the pooled R2 of the regression with intercept of `target (n, m)` on `source (n, d)`, on the same rows.

    NaN when the target does not vary.

    Example:
        >>> z = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        >>> round(in_sample_r2(z, z + 1), 6)
        1.0
    """
    source, target = (_centred(name, rows) for name, rows in (("source", source), ("target", target)))
    slope = inverse(source.T @ source) @ (source.T @ target)
    residual = (target - source @ slope).square().sum()
    return float(1 - residual / target.square().sum())


def orthogonality_error(z: Tensor, h: Tensor) -> float:
    """Return `||A^T A - I||_F / sqrt(n)`, with `A` the slope of the regression with intercept of `h` on `z`."""
    z, h = _centred("z", z), _centred("h", h)
    slope = inverse(z.T @ z) @ (z.T @ h)
    identity = torch.eye(z.shape[1], dtype=z.dtype)
    return float(torch.linalg.matrix_norm(slope @ slope.T - identity) / z.shape[1] ** 0.5)


def grid() -> Float[Tensor, "n 2"]:
    """Return the grid of 100 x 100 points on `[-3, 3]^2` on which the published sweep over sources is scored.

    It is the same for every source, so it lies partly outside the support of one close to the uniform law.
    """
    axis = torch.linspace(-GRID_LIMIT, GRID_LIMIT, GRID_POINTS)
    return torch.cartesian_prod(axis, axis)


def _centred(name: str, rows: Tensor) -> Float[Tensor, "n dim"]:
    rows = as_rows(name, rows)
    return rows - rows.mean(dim=0)
