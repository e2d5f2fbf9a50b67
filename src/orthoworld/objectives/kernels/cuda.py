"""The kernel on a GPU: Triton's programs, as many as fill it, and sums that come out the same at every call.

The rows of a slice are shared out among programs whose partial sums are added up in float64 afterwards: no sum waits
for another, and none depends on which program ends first.
"""

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from orthoworld.objectives.kernels import programs

SUMS_TILE = 64
"""Projections a program of `means` works on at a time, two a thread: it keeps two sums for each of them and knot."""

SUMS_TILES = (8, 32)
"""The fewest and the most tiles of a program: few spend their time on adding up lanes, many on waiting for the last."""

SUMS_PROGRAMS = 2**12
"""Programs that fill a large GPU, about."""

GRADIENT_TILE = 1024
"""Projections a program of `polynomial` works on, eight a thread."""

# A product and a sum in one rounding, as Triton has it by default up to version 3.9.
OPTIONS = {"enable_fp_fusion": True}


def means(x: Float[Tensor, "slices rows"], knots: int) -> Float[Tensor, "2 slices knots"]:
    """Return the means over rows of `cos kx` and of `sin kx`, for float32 `x`; partial sums are added in float64.

    Compiled once for each number of knots, whose sums stay in registers up to about 32.
    """
    slices, rows = x.shape
    width, lanes = _tile(rows, SUMS_TILE)
    groups = triton.cdiv(slices, width)
    tiles = _tiles(triton.cdiv(rows, lanes), groups)
    splits = triton.cdiv(rows, lanes * tiles)
    partial = x.new_empty(splits, 2, slices, knots)
    with torch.cuda.device_of(x):
        programs.sums[(groups * splits,)](
            x.contiguous(), partial, slices, rows, splits, tiles, knots, width, lanes, num_warps=1, **OPTIONS
        )
    return (partial.sum(dim=0, dtype=torch.float64) / rows).float()


def polynomial(
    x: Float[Tensor, "slices rows"], sine: Float[Tensor, "slices knots"], cosine: Float[Tensor, "slices knots"]
) -> Float[Tensor, "slices rows"]:
    """Return `sum_k (cosine_k cos kx - sine_k sin kx)`, for float32; the coefficients of `k = 0` are 0."""
    slices, rows = x.shape
    width, lanes = _tile(rows, GRADIENT_TILE)
    count = triton.cdiv(slices, width) * triton.cdiv(rows, lanes)
    angles, a, b = (tensor.contiguous() for tensor in (x, sine, cosine))
    result = torch.empty_like(angles)
    with torch.cuda.device_of(x):
        programs.polynomial[(count,)](
            angles, a, b, result, slices, rows, sine.shape[1], width, lanes, num_warps=4, **OPTIONS
        )
    return result


def _tile(rows: int, elements: int) -> tuple[int, int]:
    """Return the slices and the rows of a tile: one slice, or several where rows are few."""
    lanes = min(elements, triton.next_power_of_2(rows))
    return elements // lanes, lanes


def _tiles(tiles: int, groups: int) -> int:
    """Return how many of a slice's tiles a program takes, so that programs are many and none is too short."""
    fewest, most = SUMS_TILES
    return min(tiles, most, max(fewest, triton.cdiv(tiles * groups, SUMS_PROGRAMS)))
