"""The kernel on a CPU: the compiled loops, with slices shared out among threads."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.objectives.kernels import loops
from orthoworld.objectives.kernels.pool import share

ELEMENTS_PER_THREAD = 2**15
"""A hundred microseconds of work, about; less is not worth a second thread."""

THIN = 4
"""Up to so many dimensions the loops project by themselves: matrix products with such factors are slow."""


def means(x: Float[Tensor, "slices rows"], knots: int) -> Float[Tensor, "2 slices knots"]:
    """Return the means over rows of `cos kx` and of `sin kx`, for float32 `x`; sums are float64."""
    slices, rows = x.shape
    sums = torch.zeros(2, slices, knots, dtype=torch.float64)
    array, (cosine, sine) = x.contiguous().numpy(), sums.numpy()
    _share(x.numel(), len(x), lambda start, stop: loops.sums(array, cosine, sine, start, stop))
    sums[0, :, 0] = rows
    return (sums / rows).float()


def polynomial(
    x: Float[Tensor, "slices rows"], sine: Float[Tensor, "slices knots"], cosine: Float[Tensor, "slices knots"]
) -> Float[Tensor, "slices rows"]:
    """Return `sum_k (cosine_k cos kx - sine_k sin kx)`, for float32; the coefficients of `k = 0` are 0."""
    result = torch.empty(x.shape)
    angles, a, b, out = (tensor.contiguous().numpy() for tensor in (x, sine, cosine, result))
    _share(x.numel(), len(x), lambda start, stop: loops.polynomial(angles, a, b, out, start, stop))
    return result


def thin_means(
    h: Float[Tensor, "runs views rows dim"], directions: Float[Tensor, "runs dim slices"], knots: int
) -> Float[Tensor, "2 runs slices views knots"]:
    """Return the means over rows of `cos k a.h` and `sin k a.h`, for float32 and few dimensions; sums are float64."""
    runs, views, rows, _ = h.shape
    slices = directions.shape[2]
    sums = torch.zeros(2, runs, slices, views, knots, dtype=torch.float64)
    points, axes = _thin_arrays(h, directions)
    cosine, sine = sums.numpy()
    work = h[..., 0].numel() * slices
    _share(work, runs * slices, lambda start, stop: loops.thin_sums(points, axes, cosine, sine, start, stop))
    sums[0, ..., 0] = rows
    return (sums / rows).float()


def thin_gradient(
    h: Float[Tensor, "runs views rows dim"],
    directions: Float[Tensor, "runs dim slices"],
    sine: Float[Tensor, "runs slices views knots"],
    cosine: Float[Tensor, "runs slices views knots"],
) -> Float[Tensor, "runs views rows dim"]:
    """Return `sum_a a sum_k (cosine_k cos k a.h - sine_k sin k a.h)`; the coefficients of `k = 0` are 0."""
    runs, views, rows, dim = h.shape
    result = torch.zeros(runs, views, dim, rows)
    points, axes = _thin_arrays(h, directions)
    a, b, out = (tensor.contiguous().numpy() for tensor in (sine, cosine, result))
    blocks = runs * views * -(-rows // loops.BLOCK)
    work = h[..., 0].numel() * directions.shape[2]
    _share(work, blocks, lambda start, stop: loops.thin_gradient(points, axes, a, b, out, start, stop))
    return result.mT.contiguous()


def _thin_arrays(h: Tensor, directions: Tensor) -> list[np.ndarray]:
    return [tensor.mT.contiguous().numpy() for tensor in (h, directions)]


def _share(elements: int, pieces: int, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` for parts of the pieces, in as many threads as torch uses, or fewer for little work.

    A piece is worked on by one thread, so the number of threads does not change a bit of the result.
    """
    parts = max(1, min(torch.get_num_threads(), pieces, elements // ELEMENTS_PER_THREAD))
    share(lambda part: work(part * pieces // parts, (part + 1) * pieces // parts), parts)
