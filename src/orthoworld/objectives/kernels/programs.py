"""The programs of the kernel on a GPU, compiled by Triton: one pass over the projections, one lane a row.

Powers of `exp(ix)` and Horner's rule as in `loops`, for the same reason. `tl.sin` and `tl.cos` are those of CUDA's
libdevice, which reduce every float32 to [-pi/4, pi/4] before its polynomial: exact to 2 units in the last place at any
angle. The fast approximations are not, and no option here allows them.

Plain Python for Triton to compile: no annotations but `constexpr`, loops over knots unrolled, and no function of the
package is called. Offsets are int64, as projections may be more than 2^31.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slices", "splits", "tiles"])
def sums(x, out, slices, rows, splits, tiles, knots: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr):
    """Write the sums of `cos kx` and `sin kx` over a part of the rows, for `width` slices.

    `x (slices, rows)`, `out (splits, 2, slices, knots)`; a program takes `tiles` tiles of `lanes` rows one after the
    other. Every lane keeps sums of its own, which are added up once, at the end.
    """
    split = (tl.program_id(0) % splits).to(tl.int64)
    m = (tl.program_id(0) // splits).to(tl.int64) * width + tl.arange(0, width)
    first = split * (tiles * lanes)
    cos_sums = (tl.zeros((width, lanes), tl.float32),) * (knots - 1)
    sin_sums = cos_sums
    for tile in range(tiles):
        row = first + tile * lanes + tl.arange(0, lanes)
        here = (m < slices)[:, None] & (row < rows)[None, :]
        angle = tl.load(x + m[:, None] * rows + row[None, :], mask=here, other=0.0)
        cos1, sin1 = tl.cos(angle), tl.sin(angle)
        # Lanes beyond the end start from 0 instead of exp(0i) = 1, and so do all their powers.
        cos, sin = tl.where(here, cos1, 0.0), sin1
        cos_next, sin_next = (), ()
        for k in tl.static_range(knots - 1):
            cos_next = cos_next + (cos_sums[k] + cos,)  # noqa: RUF005 (Triton knows no unpacking here)
            sin_next = sin_next + (sin_sums[k] + sin,)  # noqa: RUF005
            cos, sin = cos * cos1 - sin * sin1, cos * sin1 + sin * cos1
        cos_sums, sin_sums = cos_next, sin_next
    exists = m < slices
    cosines = out + (split * 2 * slices + m) * knots
    sines = cosines + slices.to(tl.int64) * knots
    zero = tl.zeros((width,), tl.float32)
    tl.store(cosines, zero + tl.minimum(rows - first, tiles * lanes), mask=exists)  # the rows there were
    tl.store(sines, zero, mask=exists)
    for k in tl.static_range(knots - 1):
        tl.store(cosines + k + 1, tl.sum(cos_sums[k], axis=1), mask=exists)
        tl.store(sines + k + 1, tl.sum(sin_sums[k], axis=1), mask=exists)


@triton.jit(do_not_specialize=["slices"])
def polynomial(x, sine, cosine, out, slices, rows, knots: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr):
    """Write `sum_k (cosine_k cos kx - sine_k sin kx)`, `k >= 1`, for a tile of `width` slices and `lanes` rows.

    It is the real part of `sum_k (cosine_k + i sine_k) exp(ikx)`. `x` and `out` are `(slices, rows)`, the coefficients
    `(slices, knots)`.
    """
    splits = tl.cdiv(rows, lanes)
    m = (tl.program_id(0) // splits).to(tl.int64) * width + tl.arange(0, width)
    row = (tl.program_id(0) % splits).to(tl.int64) * lanes + tl.arange(0, lanes)
    exists = (m < slices)[:, None]
    here = exists & (row < rows)[None, :]
    place = m[:, None] * rows + row[None, :]
    angle = tl.load(x + place, mask=here, other=0.0)
    cos1, sin1 = tl.cos(angle), tl.sin(angle)
    a, b = sine + m[:, None] * knots, cosine + m[:, None] * knots
    imaginary = tl.load(a + knots - 1, mask=exists, other=0.0) + tl.zeros_like(angle)
    real = tl.load(b + knots - 1, mask=exists, other=0.0) + tl.zeros_like(angle)
    for step in tl.static_range(2, knots):
        a_k = tl.load(a + knots - step, mask=exists, other=0.0)
        b_k = tl.load(b + knots - step, mask=exists, other=0.0)
        # The coefficient first: two products that are added in one rounding each.
        real, imaginary = b_k + real * cos1 - imaginary * sin1, a_k + real * sin1 + imaginary * cos1
    tl.store(out + place, real * cos1 - imaginary * sin1, mask=here)
