"""SIGReg over all directions at once: the limit of infinitely many slices, a kernel of distances and norms.

For a unit direction `a` uniform on the sphere of `R^N`, `E exp(i a.x)` depends on `|x|` alone. It is

    A_N(s) = 0F1(; N/2; -s^2 / 4) = Gamma(N/2) (2/s)^(N/2 - 1) J_(N/2 - 1)(s)   at   s = |x|,

so the mean of SIGReg's statistic over all directions is

    (1/n^2) sum_(i,k) K(|h_i - h_k|) - (2/n) sum_i P(|h_i|) + sum_j w_j phi_j^2,
    K(d) = sum_j w_j A_N(t_j d)   and   P(d) = sum_j w_j phi_j A_N(t_j d).

The same limit is taken by KerJEPA (Zimmermann et al., arXiv:2512.19605). `A_N'(s) = -(s/N) A_(N+2)(s)`: the gradient
needs `K'(d) / d`, which is as smooth at `d = 0` as `K`, so that equal rows are no special case.

Everything is computed in float64, because a statistic of order `1/n` is left over when sums near 1 are subtracted.
"""

import functools
import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from scipy.special import roots_gegenbauer
from torch import Tensor

BLOCK_ELEMENTS = 2**16
"""Pairs held at a time on a CPU, 512 KiB for each of about ten arrays, which a cache still holds."""

ACCELERATOR_BLOCK_ELEMENTS = 2**22
"""The same on other devices, which want more to do at once."""

TABLE_REACH = 1024.0
"""Distances up to here are looked up; the few embeddings that lie farther apart are paid for pair by pair."""

TABLE_ERROR = 1e-10
"""The most by which a table may miss the kernel or its slope, for each unit of the sum of the weights."""

EXPANSION_TERMS = 10
EXPANDED_DIMS = 32
"""Up to this dimension `A_N` is expanded beyond `_edge`; in higher ones it is below 3e-11 there."""


def sphere_cf(dim: int, s: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return `A_N(s)`, the characteristic function of the uniform law on the unit sphere of `R^dim`, for `s >= 0`.

    By Gauss-Gegenbauer quadrature of the law of one coordinate where `s` is moderate and by Hankel's expansion of the
    Bessel function beyond (DLMF 10.17.3): within 1e-13 of the function up to 32 dimensions, within 3e-11 above.

    Example:
        >>> s = torch.tensor([0.0, 1.0, 100.0], dtype=torch.float64)
        >>> torch.allclose(sphere_cf(3, s), torch.sinc(s / torch.pi), rtol=0, atol=1e-13)
        True
    """
    if dim == 1:
        return s.cos()
    result = torch.zeros_like(s)
    near = s <= _edge(dim)
    result[near] = _by_quadrature(dim, s[near])
    if dim <= EXPANDED_DIMS:
        result[~near] = _by_expansion(dim, s[~near])
    return result


def _edge(dim: int) -> float:
    # Seven standard deviations 1 / sqrt(N) of a coordinate for high dimensions, and room for the expansion in low ones.
    return 64 + 7 * math.sqrt(dim)


@functools.lru_cache(maxsize=64)
def _nodes(dim: int) -> list[tuple[float, float]]:
    """Return the positive half of the nodes for `(1 - u^2)^((dim - 3) / 2)`, and weights that sum to 1."""
    # Half a node for each unit of s, and 40 more: Gauss's rule then misses cos(su) by less than rounding.
    half = int(_edge(dim) / 4 + 20)
    nodes, weights = roots_gegenbauer(2 * half, (dim - 2) / 2)
    positive, share = nodes[half:], weights[half:] / weights[half:].sum()
    return list(zip(positive.tolist(), share.tolist(), strict=True))


def _by_quadrature(dim: int, s: Tensor) -> Tensor:
    total = torch.zeros_like(s)
    for node, weight in _nodes(dim):
        total.add_(torch.cos(s * node), alpha=weight)
    return total


def _by_expansion(dim: int, s: Tensor) -> Tensor:
    order = dim / 2 - 1
    coefficients = [1.0]
    for k in range(1, EXPANSION_TERMS):
        coefficients.append(coefficients[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    # The k-th term stands with cos(angle + k pi / 2) / s^k: even ones with the cosine, odd ones with minus the sine.
    angle, alternating = s - (order / 2 + 1 / 4) * math.pi, -s.pow(-2)
    cosine, sine = (_horner(coefficients[first::2], alternating) for first in (0, 1))
    wave = cosine * angle.cos() - sine / s * angle.sin()
    return math.gamma(dim / 2) / math.sqrt(math.pi) * (2 / s) ** (order + 1 / 2) * wave


def _horner(coefficients: list[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(x).add_(coefficient)
    return total


class RadialKernel:
    """`K(d) = sum_j w_j A_N(t_j d)` and its slope `K'(d) / d`, tabulated on an even grid.

    In between they are cubic Hermite interpolants. The fourth derivative of a cosine mixture is largest at 0, which
    gives the step: `step^4 / 384` times it is `TABLE_ERROR`. Beyond `TABLE_REACH` the function itself is evaluated,
    at some microseconds a pair, so that an exploding embedding costs time but no memory, and stays exact.

    Args:
        dim: `N`.
        t, weights: `t_j` and `w_j`.
        reach: the largest distance that will be asked for.
        device: where the distances are.
    """

    def __init__(
        self, dim: int, t: tuple[float, ...], weights: tuple[float, ...], reach: float, device: torch.device
    ) -> None:
        self.dim = dim
        self.t = t
        self.weights = weights
        self.beyond = reach > TABLE_REACH
        self.step = min(1.0, *((384 * TABLE_ERROR / self._fourth(order)) ** 0.25 for order in (0, 1)))
        cells = math.ceil(min(reach, TABLE_REACH) / self.step) + 1  # one more, as distances are rounded
        grid = self.step * torch.arange(cells + 1, dtype=torch.float64)
        self.tables = [self._table(grid, order).to(device) for order in (0, 1)]

    def __call__(self, d: Float64[Tensor, "*shape"], order: int = 0) -> Float64[Tensor, "*shape"]:
        """Return the kernel (`order` 0) or its slope (1) at finite distances `d >= 0`."""
        position = (d.clamp(max=TABLE_REACH) if self.beyond else d) / self.step
        cell = position.int()
        x = position - cell
        c0, c1, c2, c3 = (part.index_select(0, cell.flatten()).view_as(d) for part in self.tables[order])
        result = torch.addcmul(c0, x, torch.addcmul(c1, x, torch.addcmul(c2, x, c3)))
        if self.beyond:
            far = d > TABLE_REACH
            result[far] = self.exact(d[far], order)
        return result

    def exact(self, d: Float64[Tensor, "*shape"], order: int) -> Float64[Tensor, "*shape"]:
        """Return `((1/d) d/dd)^order K` at `d`, as `((1/s) d/ds) A_N = -(1/N) A_(N+2)`."""
        total = torch.zeros_like(d)
        for t, weight in zip(self.t, self._weights(order), strict=True):
            total.add_(sphere_cf(self.dim + 2 * order, t * d), alpha=weight)
        return total

    def _weights(self, order: int) -> list[float]:
        factor = math.prod(-1 / (self.dim + 2 * k) for k in range(order))
        return [factor * weight * t ** (2 * order) for t, weight in zip(self.t, self.weights, strict=True)]

    def _fourth(self, order: int) -> float:
        """Return the largest fourth derivative relative to the sum of the weights: `t^4` times the mean of `u^4`."""
        dim = self.dim + 2 * order
        moments = sum(abs(weight) * t**4 for t, weight in zip(self.t, self._weights(order), strict=True))
        # Weights that underflow, as those of knots far out do, bend nothing.
        return max(3 / (dim * (dim + 2)) * moments / sum(self.weights), 384 * TABLE_ERROR)

    def _table(self, grid: Tensor, order: int) -> Float64[Tensor, "4 cells"]:
        """Return the coefficients of each cell's cubic in the fraction of the cell."""
        value = self.exact(grid, order)
        slope = self.step * grid * self.exact(grid, order + 1)
        rise, begin, end = value.diff(), slope[:-1], slope[1:]
        return torch.stack([value[:-1], begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise])


@functools.lru_cache(maxsize=32)
def radial_kernel(
    dim: int, t: tuple[float, ...], weights: tuple[float, ...], reach: float, device: torch.device
) -> RadialKernel:
    """Return the kernel with these settings, kept for the next batch."""
    return RadialKernel(dim, t, weights, reach, device)


def slice_free(
    h: Float[Tensor, "views rows dim"],
    t: Float64[Tensor, " knots"],
    target: Float64[Tensor, " knots"],
    weights: Float64[Tensor, " knots"],
    *,
    debiased: bool = False,
) -> Float[Tensor, ""]:
    """Return the mean over views, and over all unit directions `a`, of SIGReg's statistic per sample.

    Formula: that of the module; debiased, the mean over pairs leaves out those of a row with itself. Time grows with
    the square of the rows, memory with the rows. One number is read back from the device of `h`, which needs float64.

    Args:
        h: embeddings of any floating-point type; rows that are not finite give NaN.
        t, target, weights: `t_j`, `phi_j` and `w_j`, as `knot_grid` returns them.
        debiased: see `sigreg`; two rows or more.

    Returns:
        Scalar of at least float32. Differentiable once, with respect to `h`.

    Example:
        >>> t, one = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        >>> slice_free(torch.zeros(1, 4, 2), t, 0.5 * one, one)
        tensor(0.2500)
    """
    return _SliceFree.apply(h, t, target, weights, debiased)  # type: ignore[no-untyped-call]


class _SliceFree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, t: Tensor, target: Tensor, weights: Tensor, debiased: bool) -> Tensor:
        # The gradient shares its distances with the value, so both are made here.
        value, gradient = _statistic(h.double(), t, target, weights, debiased, ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient.to(h.dtype))
        return value.to(torch.promote_types(h.dtype, torch.float32))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (grad * gradient).to(gradient.dtype), None, None, None, None


def _statistic(
    h: Float64[Tensor, "views rows dim"],
    t: Tensor,
    target: Tensor,
    weights: Tensor,
    debiased: bool,
    differentiate: bool,
) -> tuple[Float64[Tensor, ""], Float64[Tensor, "views rows dim"]]:
    """Return the statistic and its gradient, which is 0 where none is asked for."""
    views, n, dim = h.shape
    centred = h - h.mean(dim=1, keepdim=True)  # keeps the digits of distances far from the origin
    norms = h.norm(dim=-1)
    reach, spread = torch.stack([norms.max(), 2 * centred.norm(dim=-1).max()]).tolist()
    if not math.isfinite(reach + spread):
        return h.new_full((), math.nan), torch.full_like(h, math.nan)
    knots = tuple(t.tolist())
    kernel = radial_kernel(dim, knots, tuple(weights.tolist()), _rounded(spread), h.device)
    point_kernel = radial_kernel(dim, knots, tuple((weights * target).tolist()), _rounded(reach), h.device)

    pairs, pair_gradient = _pair_sum(centred, kernel, differentiate)
    constant = float(weights @ target.square())
    weight = 1 / n**2
    if debiased:
        # Leaves out the pairs of a row with itself, K(0) = sum_j w_j each, from the sum and from the count.
        weight = 1 / (n * (n - 1))
        constant -= float(weights.sum()) / (n - 1)
    value = weight * pairs / views - 2 * point_kernel(norms).mean() + constant
    if not differentiate:
        return value, torch.zeros_like(h)
    slopes = point_kernel(norms, 1)[..., None]
    return value, (weight * pair_gradient - 2 / n * slopes * h) / views


def _rounded(distance: float) -> float:
    """Return the reach of a table: a power of two, so that batches share it; one number for all that go beyond."""
    return 2.0 ** math.ceil(math.log2(max(distance, 1.0))) if distance <= TABLE_REACH else math.inf


def _pair_sum(
    h: Float64[Tensor, "views rows dim"], kernel: RadialKernel, differentiate: bool
) -> tuple[Float64[Tensor, ""], Float64[Tensor, "views rows dim"]]:
    """Return `sum_(i,k) K(|h_i - h_k|)` over all views, and its gradient `2 sum_k (K'(d)/d) (h_i - h_k)`.

    A block of rows meets only the rows from its own first one on: a pair stands for its mirror image too.
    """
    views, n, _ = h.shape
    most = BLOCK_ELEMENTS if h.device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS
    block = max(1, most // (views * n))
    # Products are fast, and within 1e-9 as far as the table reaches; beyond, only differences keep close rows close.
    mode = "donot_use_mm_for_euclid_dist" if kernel.beyond else "use_mm_for_euclid_dist"
    total, mass, pull = h.new_zeros(()), h.new_zeros(views, n), torch.zeros_like(h)
    for start in range(0, n, block):
        rows, width = slice(start, start + block), min(block, n - start)
        own, others = h[:, rows], h[:, start:]
        d = torch.cdist(own, others, compute_mode=mode)
        values = kernel(d)
        total += 2 * values.sum() - values[..., :width].sum()
        if differentiate:
            slopes = kernel(d, 1)
            mirrored = slopes[..., width:]
            mass[:, rows] += slopes.sum(dim=2)
            pull[:, rows] += slopes @ others
            mass[:, start + width :] += mirrored.sum(dim=1)
            pull[:, start + width :] += mirrored.mT @ own
    return total, 2 * (mass[..., None] * h - pull)
