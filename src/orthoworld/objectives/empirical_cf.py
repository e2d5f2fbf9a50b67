"""The empirical characteristic function of projections at equally spaced knots, from one sine and cosine each.

`cos(kx)` and `sin(kx)` for `k = 0, 1, ...` follow from `cos x` and `sin x` by Chebyshev's recurrence, and the gradient
is a trigonometric polynomial, evaluated by Clenshaw's. Both run in Reinsch's form (differences instead of values; see
Oliver, "On the recurrence of trigonometric sums", and Stoer and Bulirsch, Introduction to Numerical Analysis, 2.3.2),
whose rounding error does not grow for small angles: the plain form loses a digit per factor of three in `k` there,
which is where a collapsing embedding ends. Nothing of size samples x slices x knots is built.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_ELEMENTS = 2**20
"""Elements worked on at a time, which bounds the memory; smaller blocks cost more in calls than the cache saves."""


def empirical_cf(
    x: Float[Tensor, "views rows slices"], knots: int
) -> tuple[Float[Tensor, "views knots slices"], Float[Tensor, "views knots slices"]]:
    """Return the means over rows of `cos(k x)` and `sin(k x)` for `k = 0, ..., knots - 1`; differentiable once.

    Example:
        >>> cos, sin = empirical_cf(torch.tensor([[[0.0], [torch.pi]]]), 3)
        >>> cos.flatten().tolist()
        [1.0, 0.0, 1.0]
    """
    return _EmpiricalCF.apply(x, knots)  # type: ignore[no-untyped-call]


def _blocks(x: Tensor) -> list[slice]:
    """Cut the slices into blocks of about `BLOCK_ELEMENTS` elements."""
    views, rows, slices = x.shape
    width = max(1, BLOCK_ELEMENTS // (views * rows))
    return [slice(start, start + width) for start in range(0, slices, width)]


class _EmpiricalCF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, knots: int) -> tuple[Tensor, Tensor]:
        views, _, slices = x.shape
        means = x.new_zeros(2, views, knots, slices)
        means[0, :, 0] = 1
        for block in _blocks(x):
            _accumulate(x[..., block], means[..., block])
        ctx.save_for_backward(x)
        return means[0], means[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        knots = grads[0].shape[1]
        # d cos(kx) = -k sin(kx) dx and d sin(kx) = k cos(kx) dx, and each mean divides by the number of rows.
        order = torch.arange(knots, dtype=x.dtype, device=x.device)[:, None] / x.shape[1]
        coefficients = torch.stack([grad * order for grad in grads])
        grad_x = torch.empty_like(x)
        for block in _blocks(x):
            grad_x[..., block] = _polynomial(x[..., block], coefficients[..., block])
        return grad_x, None


def _start(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cos x` and `sin x` stacked, and `-4 sin^2(x/2) = 2 cos x - 2`, the multiplier of Reinsch's recurrence."""
    half = (x / 2).sin()
    return torch.stack([x.cos(), x.sin()]), half.square().mul_(-4)


def _accumulate(x: Float[Tensor, "views rows slices"], means: Float[Tensor, "2 views knots slices"]) -> None:
    """Write the means over rows of `cos(kx)` and `sin(kx)` for `k >= 1` into `means`."""
    current, multiplier = _start(x)
    difference = torch.stack([multiplier / 2, current[1]])
    for k in range(1, means.shape[2]):
        if k > 1:
            difference.addcmul_(multiplier, current)
            current += difference
        torch.mean(current, dim=2, out=means[:, :, k])


def _polynomial(x: Float[Tensor, "views rows slices"], coefficients: Float[Tensor, "2 views knots slices"]) -> Tensor:
    """Return `sum_k (-a_k sin kx + b_k cos kx)` for the coefficients `(a, b)`."""
    first, multiplier = _start(x)
    knots = coefficients.shape[2]
    total = coefficients[:, :, knots - 1, None].expand_as(first).clone()
    difference = total.clone()
    for k in range(knots - 2, 0, -1):
        difference.addcmul_(multiplier, total).add_(coefficients[:, :, k, None])
        total += difference
    # sum_k a_k sin kx = total_a sin x, and sum_k b_k cos kx = total_b (cos x - 1) + difference_b; b_0 = 0 as k = 0 has
    # no derivative.
    return (total[1] * multiplier).div_(2).add_(difference[1]).sub_(total[0] * first[1])
