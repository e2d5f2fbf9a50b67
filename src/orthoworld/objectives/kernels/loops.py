"""The inner loops on a CPU, compiled by numba: whole blocks in the first-level cache, one vector lane a row.

Powers of `exp(ix)` follow by complex multiplication and the gradient by Horner's rule in the complex plane. Both have
`|exp(ix)| = 1` as their only multiplier, so rounding grows at most linearly with the order at every angle; Chebyshev's
recurrence and Clenshaw's, which need as many operations, lose digits near 0 and pi.

Plain Python for numba to compile: no annotations, and no function of the package is called.
"""

import numba
import numpy as np

BLOCK = 256
"""Rows worked on at a time."""

F = np.float32
TWO_OVER_PI = 2 / np.pi
HALF_PI = np.pi / 2
QUARTER_PI = F(np.pi / 4)
S3, S5, S7, S9 = F(-1 / 6), F(1 / 120), F(-1 / 5040), F(1 / 362880)
C2, C4, C6, C8, C10 = F(-1 / 2), F(1 / 24), F(-1 / 720), F(1 / 40320), F(-1 / 3628800)
"""Taylor's coefficients; up to pi/4 the first term left out is below float32's rounding."""

# Sums may be reordered and contracted, which vectors need; NaN and infinity keep their meaning.
OPTIONS = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


def compiled(function):
    """Compile `function`, once for all processes where there is a folder to keep it in."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:
        return numba.njit(**OPTIONS)(function)


@numba.njit(inline="always", **OPTIONS)
def _near_zero(r):
    """Return cosine and sine of an angle in [-pi/4, pi/4], by Taylor's series."""
    r2 = r * r
    s = r + r * r2 * (S3 + r2 * (S5 + r2 * (S7 + r2 * S9)))
    c = F(1) + r2 * (C2 + r2 * (C4 + r2 * (C6 + r2 * (C8 + r2 * C10))))
    return c, s


@numba.njit(inline="always", **OPTIONS)
def _sine_and_cosine(x, cos, sin, size):
    wide = 0
    for i in range(size):
        wide += abs(x[i]) > QUARTER_PI
    if wide == 0:  # nearly every block of an embedding of unit scale
        for i in range(size):
            cos[i], sin[i] = _near_zero(x[i])
        return
    for i in range(size):
        # In float64 the reduction to [-pi/4, pi/4] is exact enough for every angle a float32 can tell from others.
        angle = np.float64(x[i])
        turns = np.rint(angle * TWO_OVER_PI)
        quadrant = turns - 4.0 * np.floor(turns * 0.25)
        c, s = _near_zero(F(angle - turns * HALF_PI))
        odd = quadrant == 1.0 or quadrant == 3.0
        sine = c if odd else s
        cosine = s if odd else c
        sin[i] = -sine if quadrant >= 2.0 else sine
        cos[i] = -cosine if quadrant == 1.0 or quadrant == 2.0 else cosine


@numba.njit(inline="always", **OPTIONS)
def _add_sums(x, cos_sums, sin_sums, cos1, sin1, cos, sin, size):
    """Add the sums over a block of `cos kx` and `sin kx`, `k >= 1`, to those of its slice."""
    knots = len(cos_sums)
    _sine_and_cosine(x, cos1, sin1, size)
    for i in range(size):
        cos[i], sin[i] = cos1[i], sin1[i]
    k = 1
    while k + 4 <= knots:  # four at a time: less traffic for the same arithmetic
        a0, a1, a2, a3 = F(0), F(0), F(0), F(0)
        b0, b1, b2, b3 = F(0), F(0), F(0), F(0)
        for i in range(size):
            p, q = cos1[i], sin1[i]
            c, s = cos[i], sin[i]
            a0 += c
            b0 += s
            c, s = c * p - s * q, c * q + s * p
            a1 += c
            b1 += s
            c, s = c * p - s * q, c * q + s * p
            a2 += c
            b2 += s
            c, s = c * p - s * q, c * q + s * p
            a3 += c
            b3 += s
            cos[i], sin[i] = c * p - s * q, c * q + s * p
        cos_sums[k] += a0
        cos_sums[k + 1] += a1
        cos_sums[k + 2] += a2
        cos_sums[k + 3] += a3
        sin_sums[k] += b0
        sin_sums[k + 1] += b1
        sin_sums[k + 2] += b2
        sin_sums[k + 3] += b3
        k += 4
    while k < knots:
        a0, b0 = F(0), F(0)
        for i in range(size):
            c, s = cos[i], sin[i]
            a0 += c
            b0 += s
            cos[i], sin[i] = c * cos1[i] - s * sin1[i], c * sin1[i] + s * cos1[i]
        cos_sums[k] += a0
        sin_sums[k] += b0
        k += 1


@numba.njit(inline="always", **OPTIONS)
def _evaluate(x, sine, cosine, cos1, sin1, real, imaginary, size):
    """Write `sum_k (cosine_k + i sine_k) exp(ikx)` of a block."""
    knots = len(sine)
    _sine_and_cosine(x, cos1, sin1, size)
    top, top_sine = cosine[knots - 1], sine[knots - 1]
    for i in range(size):
        real[i], imaginary[i] = top, top_sine
    k = knots - 2
    while k >= 3:
        a0, a1, a2, a3 = cosine[k], cosine[k - 1], cosine[k - 2], cosine[k - 3]
        b0, b1, b2, b3 = sine[k], sine[k - 1], sine[k - 2], sine[k - 3]
        for i in range(size):
            p, q = cos1[i], sin1[i]
            u, v = real[i], imaginary[i]
            u, v = u * p - v * q + a0, u * q + v * p + b0
            u, v = u * p - v * q + a1, u * q + v * p + b1
            u, v = u * p - v * q + a2, u * q + v * p + b2
            real[i], imaginary[i] = u * p - v * q + a3, u * q + v * p + b3
        k -= 4
    while k >= 0:
        a0, b0 = cosine[k], sine[k]
        for i in range(size):
            u, v = real[i], imaginary[i]
            real[i] = u * cos1[i] - v * sin1[i] + a0
            imaginary[i] = u * sin1[i] + v * cos1[i] + b0
        k -= 1


@numba.njit(inline="always", **OPTIONS)
def _project(h, direction, first, x, size):
    """Write the projections of a block of rows of `h (dim, rows)`."""
    for d in range(len(direction)):
        a, points = direction[d], h[d, first : first + size]
        if d == 0:
            for i in range(size):
                x[i] = a * points[i]
        else:
            for i in range(size):
                x[i] += a * points[i]


@compiled
def sums(x, cos_sums, sin_sums, start, stop):
    """Add the sums over rows of `cos kx`, `sin kx`, `k >= 1`, of slices `start` to `stop`.

    `x (slices, rows)` is float32, the sums `(slices, knots)` are float64.
    """
    rows = x.shape[1]
    cos1, sin1, cos, sin = np.empty((4, BLOCK), F)
    for m in range(start, stop):
        for first in range(0, rows, BLOCK):
            size = min(BLOCK, rows - first)
            _add_sums(x[m, first : first + size], cos_sums[m], sin_sums[m], cos1, sin1, cos, sin, size)


@compiled
def polynomial(x, sine, cosine, out, start, stop):
    """Write `sum_k (cosine_k cos kx - sine_k sin kx)` for slices `start` to `stop`.

    It is the real part of `sum_k (cosine_k + i sine_k) exp(ikx)`. All arrays are float32, `x` and `out` of shape
    `(slices, rows)` and the coefficients `(slices, knots)`.
    """
    rows = x.shape[1]
    cos1, sin1, real, imaginary = np.empty((4, BLOCK), F)
    for m in range(start, stop):
        for first in range(0, rows, BLOCK):
            size = min(BLOCK, rows - first)
            _evaluate(x[m, first : first + size], sine[m], cosine[m], cos1, sin1, real, imaginary, size)
            for i in range(size):
                out[m, first + i] = real[i]


@compiled
def thin_sums(h, directions, cos_sums, sin_sums, start, stop):
    """Add the sums of `sums` for projections that are made block by block, of the pairs of run and slice given.

    `h (runs, views, dim, rows)` and `directions (runs, slices, dim)` are float32, the sums `(runs, slices, views,
    knots)` are float64; pair `run * slices + slice` is from `start` to `stop`.
    """
    views, rows, slices = h.shape[1], h.shape[3], directions.shape[1]
    x, cos1, sin1, cos, sin = np.empty((5, BLOCK), F)
    for pair in range(start, stop):
        run, m = pair // slices, pair % slices
        for view in range(views):
            for first in range(0, rows, BLOCK):
                size = min(BLOCK, rows - first)
                _project(h[run, view], directions[run, m], first, x, size)
                _add_sums(x, cos_sums[run, m, view], sin_sums[run, m, view], cos1, sin1, cos, sin, size)


@compiled
def thin_gradient(h, directions, sine, cosine, out, start, stop):
    """Add to `out`, of the shape of `h`, the gradient that `polynomial` gives each projection, for the blocks given.

    Shapes as in `thin_sums`, the coefficients `(runs, slices, views, knots)`; block `(run * views + view) * blocks +
    number` is from `start` to `stop`. A block's slices are added one after the other, whoever works on it.
    """
    views, dim, rows = h.shape[1:]
    slices = directions.shape[1]
    blocks = (rows + BLOCK - 1) // BLOCK
    x, cos1, sin1, real, imaginary = np.empty((5, BLOCK), F)
    for block in range(start, stop):
        run, view, first = block // blocks // views, block // blocks % views, block % blocks * BLOCK
        size = min(BLOCK, rows - first)
        for m in range(slices):
            _project(h[run, view], directions[run, m], first, x, size)
            _evaluate(x, sine[run, m, view], cosine[run, m, view], cos1, sin1, real, imaginary, size)
            for d in range(dim):
                a, gradient = directions[run, m, d], out[run, view, d, first : first + size]
                for i in range(size):
                    gradient[i] += a * real[i]
