"""The kernel on a CPU: the compiled loops, with slices shared out among threads."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.objectives.kernels import loops
from orthoworld.objectives.kernels.pool import share

ELEMENTS_PER_THREAD = 2**15
"""A hundred microseconds of work, about; less is not worth a second thread."""


def means(x: Float[Tensor, "slices rows"], knots: int) -> Float[Tensor, "2 slices knots"]:
    """Return the means over rows of `cos kx` and of `sin kx`, for float32 `x`; sums are float64."""
    slices, rows = x.shape
    sums = torch.zeros(2, slices, knots, dtype=torch.float64)
    array, (cosine, sine) = x.contiguous().numpy(), sums.numpy()
    _share(x, lambda start, stop: loops.sums(array, cosine, sine, start, stop))
    sums[0, :, 0] = rows
    return (sums / rows).float()


def polynomial(
    x: Float[Tensor, "slices rows"], sine: Float[Tensor, "slices knots"], cosine: Float[Tensor, "slices knots"]
) -> Float[Tensor, "slices rows"]:
    """Return `sum_k (cosine_k cos kx - sine_k sin kx)`, for float32; the coefficients of `k = 0` are 0."""
    result = torch.empty(x.shape)
    angles, a, b, out = (tensor.contiguous().numpy() for tensor in (x, sine, cosine, result))
    _share(x, lambda start, stop: loops.polynomial(angles, a, b, out, start, stop))
    return result


def _share(x: Tensor, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` for parts of the slices, in as many threads as torch uses, or fewer for little work.

    A slice is worked on by one thread, so the number of threads does not change a bit of the result.
    """
    slices = x.shape[0]
    parts = max(1, min(torch.get_num_threads(), slices, x.numel() // ELEMENTS_PER_THREAD))
    share(lambda part: work(part * slices // parts, (part + 1) * slices // parts), parts)
