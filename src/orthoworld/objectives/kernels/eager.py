"""The kernel in torch operations: every device, every floating-point type, nothing to compile.

Chebyshev's recurrence and Clenshaw's run in Reinsch's form (differences instead of values; see Oliver, "On the
recurrence of trigonometric sums", and Stoer and Bulirsch, Introduction to Numerical Analysis, 2.3.2), whose rounding
error does not grow for small angles: the plain form loses a digit per factor of three in `k` there, which is where a
collapsing embedding ends.
"""

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_ELEMENTS = 2**20
"""Elements worked on at a time, which bounds the memory; smaller blocks cost more in calls than the cache saves."""


def means(x: Float[Tensor, "slices rows"], knots: int) -> Float[Tensor, "2 slices knots"]:
    """Return the means over rows of `cos kx` and of `sin kx`."""
    slices, _ = x.shape
    result = x.new_zeros(2, slices, knots)
    result[0, :, 0] = 1
    for block in _blocks(x):
        _accumulate(x[block], result[:, block])
    return result


def polynomial(
    x: Float[Tensor, "slices rows"], sine: Float[Tensor, "slices knots"], cosine: Float[Tensor, "slices knots"]
) -> Float[Tensor, "slices rows"]:
    """Return `sum_k (cosine_k cos kx - sine_k sin kx)`; the coefficients of `k = 0` are 0."""
    result = torch.empty_like(x)
    for block in _blocks(x):
        result[block] = _clenshaw(x[block], torch.stack([sine[block], cosine[block]]))
    return result


def _blocks(x: Tensor) -> list[slice]:
    """Cut the slices into blocks of about `BLOCK_ELEMENTS` elements."""
    slices, rows = x.shape
    width = max(1, BLOCK_ELEMENTS // rows)
    return [slice(start, start + width) for start in range(0, slices, width)]


def _start(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cos x` and `sin x` stacked, and `-4 sin^2(x/2) = 2 cos x - 2`, the multiplier of Reinsch's recurrence."""
    half = (x / 2).sin()
    return torch.stack([x.cos(), x.sin()]), half.square().mul_(-4)


def _accumulate(x: Float[Tensor, "slices rows"], result: Float[Tensor, "2 slices knots"]) -> None:
    """Write the means over rows of `cos(kx)` and `sin(kx)` for `k >= 1` into `result`."""
    current, multiplier = _start(x)
    difference = torch.stack([multiplier / 2, current[1]])
    for k in range(1, result.shape[2]):
        if k > 1:
            difference.addcmul_(multiplier, current)
            current += difference
        result[:, :, k] = current.mean(dim=2)


def _clenshaw(x: Float[Tensor, "slices rows"], coefficients: Float[Tensor, "2 slices knots"]) -> Tensor:
    """Return `sum_k (-a_k sin kx + b_k cos kx)` for the coefficients `(a, b)` of `k >= 1`."""
    first, multiplier = _start(x)
    knots = coefficients.shape[2]
    total = coefficients[:, :, knots - 1, None].expand_as(first).clone()
    difference = total.clone()
    for k in range(knots - 2, 0, -1):
        difference.addcmul_(multiplier, total).add_(coefficients[:, :, k, None])
        total += difference
    # sum_k a_k sin kx = total_a sin x, and sum_k b_k cos kx = total_b (cos x - 1) + difference_b.
    return (total[1] * multiplier).div_(2).add_(difference[1]).sub_(total[0] * first[1])
