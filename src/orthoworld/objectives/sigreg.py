"""SIGReg: how far the projections of an embedding on random directions are from the standard normal law.

For a unit direction `a` and the embeddings `h_1 ... h_n` the statistic is the Epps-Pulley distance

    S(a) = sum_j w_j |mean_i exp(i t_j a.h_i) - exp(-t_j^2 / 2)|^2,

with `knots` equally spaced `t_j` on `[0, t_max]`, trapezoid weights doubled for the mirrored half, times the window
`exp(-t_j^2 / 2)`; SIGReg is its mean over random directions (Balestriero and LeCun, arXiv:2511.08544).
"""

import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import at_least_float32, real, views, whole, without_autocast
from orthoworld.errors import ArgumentError
from orthoworld.objectives.empirical_cf import empirical_cf
from orthoworld.objectives.processes import gathered_rows, global_mean, of_first_process, processes
from orthoworld.objectives.slice_free import slice_free
from orthoworld.streams import Generators


@functools.lru_cache(maxsize=None, typed=True)
def knot_grid(
    knots: int, t_max: float
) -> tuple[Float[Tensor, " knots"], Float[Tensor, " knots"], Float[Tensor, " knots"]]:
    """Return the points `t_j`, `phi(t_j) = exp(-t_j^2 / 2)` and the weights `w_j`, all in float64."""
    whole("knots", knots, least=2)
    t = torch.linspace(0, real("t_max", t_max, 0, math.inf), knots, dtype=torch.float64)
    target = torch.exp(-t.square() / 2)
    weights = 2 * t[1] * target
    weights[[0, -1]] /= 2
    return t, target, weights


def random_directions(
    dim: int, slices: int, *, generator: Generators, like: Tensor
) -> Float[Tensor, "*runs dim slices"]:
    """Return unit directions, uniform on the sphere and the same in all processes.

    They are drawn on the generator's device and moved to that of `like`.
    """
    whole("slices", slices)
    if isinstance(generator, torch.Generator):
        normal = torch.randn(dim, slices, generator=generator, device=generator.device)
    else:
        normal = torch.stack([torch.randn(dim, slices, generator=g, device=g.device) for g in generator])
    normal = of_first_process(normal.to(like))
    return normal / normal.square().sum(dim=-2, keepdim=True).sqrt()


def sigreg(
    h: Tensor,
    *,
    generator: Generators | None = None,
    slices: int | None = 256,
    knots: int = 17,
    t_max: float = 3.0,
    scaled: bool = False,
    pooled: bool = False,
    debiased: bool = False,
) -> Float[Tensor, "*runs"]:
    """Return SIGReg of `h`; smaller means closer to `N(0, I)`.

    Args:
        h: embeddings `(batch, dim)` or `(views, batch, dim)` of any floating-point type. Computed in at least float32,
            autocast or not. Device follows `h`. With several generators, `(runs, views, batch, dim)`.
        generator: source of the directions; fresh ones at each call. A sequence holds one for each run. Not needed for
            `slices=None`.
        slices: number of directions; None takes the mean over all of them in closed form, with no noise of their own
            and in time that grows with the square of the batch (`slice_free`).
        knots: number of points `t_j`, >= 2.
        t_max: the largest `t_j`, > 0.
        scaled: multiply by the number `n` of samples of one statistic (the form of the public codes). The default is
            per sample, which does not change with the batch size.
        pooled: one statistic over all views together instead of the mean of one for each view.
        debiased: subtract the sampling term `(1 - |mean exp(i t a.h)|^2) / (n - 1)`, which a smaller embedding makes
            smaller. The mean is then exactly the distance of the embedding's law, 0 for `N(0, I)`, at any `n`; the
            value of a batch may be negative. Not for pooled views, which are not independent.

    Returns:
        Scalar, one for each run. Null level (mean over samples of `N(0, I)`) with the default knots: `1.0525 / n`, or
        `1.0525` scaled; see `sigreg_null_level` for other knots and for pooled views, which are correlated. Constant
        embeddings at 0 give `0.40205` (scaled: times `n`) and a gradient of exactly 0: SIGReg alone does not leave a
        collapse.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has another number of dimensions.
        ArgumentError: `slices`, `knots` or `t_max` lies outside its range, `debiased` meets `pooled` or `n = 1`, or
            there are slices to draw and no generator.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> round(sigreg(torch.tensor([[1.0], [-1.0]]), generator=g, scaled=True).item(), 6)
        0.205659
    """
    h = views(h, runs=isinstance(generator, Sequence))
    grid = knot_grid(knots, t_max)
    if pooled:
        h = h.flatten(-3, -2).unsqueeze(-3)
    if debiased:
        _independent(pooled)
        if h.shape[-2] * processes() < 2:
            raise ArgumentError(f"debiased=True with {h.shape[-2]} sample: expected two or more")
    if slices is None:
        statistic, n = _over_all_directions(h, grid, debiased)
    elif generator is None:
        raise ArgumentError("generator=None: expected a torch.Generator, from which to draw directions")
    else:
        statistic, n = _over_slices(h, grid, generator, slices, debiased)
    return statistic * n if scaled else statistic


Grid = tuple[Tensor, Tensor, Tensor]
Statistic = tuple[Float[Tensor, "*runs"], int | Tensor]
"""SIGReg per sample, and the samples of all processes."""


def _over_all_directions(h: Float[Tensor, "*runs views batch dim"], grid: Grid, debiased: bool) -> Statistic:
    every, _ = gathered_rows(h)
    if every.ndim == 3:
        return slice_free(every, *grid, debiased=debiased), every.shape[-2]
    return torch.stack([slice_free(own, *grid, debiased=debiased) for own in every]), every.shape[-2]


def _over_slices(
    h: Float[Tensor, "*runs views batch dim"], grid: Grid, generator: Generators, slices: int, debiased: bool
) -> Statistic:
    t, target, weights = grid
    with without_autocast(h.device):
        h = at_least_float32(h)
        directions = random_directions(h.shape[-1], slices, generator=generator, like=h)
        # In units of the knot spacing the knots are 0, 1, 2, ...
        cf, n = global_mean(empirical_cf(h, directions * float(t[1]), len(t)), h.shape[-2])
        gaussian = torch.stack([target, torch.zeros_like(target)]).to(h)  # its imaginary part is 0
        error = (cf - gaussian.view(2, *[1] * (cf.ndim - 2), len(t))).square()
        if debiased:
            error = error - (0.5 - cf.square()) / (n - 1)
        return (error @ weights.to(h)).sum(dim=0).mean(dim=(-2, -1)), n


def sigreg_null_level(
    n: int, *, knots: int = 17, t_max: float = 3.0, views: int = 1, r: float = 0.0, scaled: bool = False
) -> float:
    """Return the mean of SIGReg over standard normal embeddings.

    Formula: `(1/n) sum_j w_j [1 - phi_j^2 + (views - 1)(exp(-t_j^2 (1 - r)) - phi_j^2)]`, since the real part of the
    characteristic function of a difference of two views is `exp(-t^2 (1 - r))`.

    Args:
        n: samples of one statistic, all pooled views included.
        views: views pooled into one statistic; 1 unless `pooled=True`.
        r: correlation between pooled views, in [-1, 1].
        scaled: the level of the scaled form.

    Raises:
        ArgumentError: an argument lies outside its range.

    Example:
        >>> round(sigreg_null_level(512, scaled=True), 4)
        1.0525
        >>> round(sigreg_null_level(512, views=2, r=0.9025, scaled=True), 3)
        1.896
    """
    whole("n", n), whole("views", views), real("r", r, -1, 1, closed="both")
    t, target, weights = knot_grid(knots, t_max)
    variance = 1 - target**2
    covariance = torch.exp(-t.square() * (1 - r)) - target**2
    level = float((weights * (variance + (views - 1) * covariance)).sum())
    return level if scaled else level / n


def _independent(pooled: bool) -> None:
    if pooled:
        raise ArgumentError("debiased=True with pooled=True: expected independent samples, which pooled views are not")


class SIGReg(nn.Module):
    """`sigreg` with its settings fixed: `SIGReg(slices=256)(h, generator=g)`.

    Args, returns and errors: as `sigreg`; settings are checked when the module is built.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> SIGReg(slices=64)(torch.zeros(4, 3), generator=g)
        tensor(0.4020)
    """

    def __init__(
        self,
        slices: int | None = 256,
        *,
        knots: int = 17,
        t_max: float = 3.0,
        scaled: bool = False,
        pooled: bool = False,
        debiased: bool = False,
    ) -> None:
        super().__init__()
        self.slices = None if slices is None else whole("slices", slices)
        knot_grid(knots, t_max)  # checks both
        if debiased:
            _independent(pooled)
        self.knots = knots
        self.t_max = t_max
        self.scaled = scaled
        self.pooled = pooled
        self.debiased = debiased

    def forward(self, h: Tensor, *, generator: Generators | None = None) -> Float[Tensor, "*runs"]:
        return sigreg(
            h,
            generator=generator,
            slices=self.slices,
            knots=self.knots,
            t_max=self.t_max,
            scaled=self.scaled,
            pooled=self.pooled,
            debiased=self.debiased,
        )

    def null_level(self, batch: int, *, views: int = 1, r: float = 0.0) -> float:
        """Return the mean over standard normal embeddings of `views` views of `batch` samples, correlated at `r`."""
        if self.debiased:
            return 0.0
        pooled_views = views if self.pooled else 1
        return sigreg_null_level(
            batch * pooled_views,
            knots=self.knots,
            t_max=self.t_max,
            views=pooled_views,
            r=r,
            scaled=self.scaled,
        )

    def extra_repr(self) -> str:
        names = ("slices", "knots", "t_max", "scaled", "pooled", "debiased")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
