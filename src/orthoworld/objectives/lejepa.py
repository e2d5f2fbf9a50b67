"""Alignment with a Gaussian or whitening constraint: as weighted sums (soft), and as constraints (hard).

The soft forms shrink the embedding, because a smaller one is better aligned; `LeJEPA.predicted_scale` says by how much.
The hard forms do not. Whitened alignment alone has all of Theorem 1's optima, and local minima besides: it can settle
on the second harmonic of one latent in the place of another latent, which is uncorrelated with the first, has unit
variance, and decays faster but not so fast that descent would leave it. A harmonic is not Gaussian, so the shape term
of `WhitenedLeJEPA` forbids it.
"""

import math

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from orthoworld.checks import real, whole
from orthoworld.objectives.alignment import alignment, in_norm_units
from orthoworld.objectives.infonce import infonce
from orthoworld.objectives.objective import Losses, Objective, two_or_more_views
from orthoworld.objectives.sigreg import SIGReg, knot_grid
from orthoworld.objectives.whitening import whiten, whitening
from orthoworld.streams import Generators


class LeJEPA(Objective):
    """`lam SIGReg + (1 - lam) alignment`, as published.

    Alignment enters in the centroid form and SIGReg scaled by the number of samples, as in the public codes, so `lam`
    is not comparable across batch sizes and dimensions: in norm units the ratio of the weights is
    `lam n : (1 - lam) / (4 dim)` for two views and `n` samples of one statistic.

    Args:
        lam: weight of SIGReg, in [0, 1].
        pooled: one statistic over all views, as in the published synthetic experiments, instead of the mean of one for
            each view, as in the LeJEPA library.
        slices, knots, t_max: see `sigreg`.

    Raises:
        ArgumentError: an argument lies outside its range.

    Example:
        >>> h = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
        >>> losses = LeJEPA(lam=0.05)(h, generator=torch.Generator().manual_seed(1))
        >>> bool(torch.isfinite(losses.total))
        True
    """

    coefficients = ("lam",)

    def __init__(
        self, lam: float, *, pooled: bool = False, slices: int | None = 256, knots: int = 17, t_max: float = 3.0
    ) -> None:
        super().__init__()
        self.lam = real("lam", lam, 0, 1, closed="both")
        self.sigreg = SIGReg(slices, knots=knots, t_max=t_max, scaled=True, pooled=pooled)

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        centroid = alignment(h, form="centroid")
        regulariser = self.sigreg(h, generator=generator)
        return Losses(
            total=self.lam * regulariser + (1 - self.lam) * centroid,
            alignment=in_norm_units(centroid, h),
            regulariser=regulariser,
        )

    def predicted_scale(self, r: float, batch: int) -> float:
        """Return the scale `s` at which `h = s Q z` minimises the expected loss of two views; 0 means collapse.

        Formula: alignment is `s^2 (1 - r) / 2`. SIGReg of `N(0, s^2 I)` is, with `f_j = exp(-s^2 t_j^2 / 2)`,
        `sum_j w_j [(f_j - phi_j)^2 + (1 - f_j^2) / n]`, and pooling adds the covariance of the views,
        `(exp(-s^2 t_j^2 (1 - r)) - f_j^2) / n`. The orthogonality error that follows is `|s^2 - 1|`.

        Args:
            r: pair correlation, in (-1, 1).
            batch: samples in a view.

        Raises:
            ArgumentError: an argument lies outside its range.

        Example:
            >>> soft = LeJEPA(lam=1e-3, pooled=True)
            >>> round(1 - soft.predicted_scale(r=0.95**2, batch=256) ** 2, 3)
            0.277
        """
        real("r", r, -1, 1)
        t, target, weights = (values.numpy() for values in knot_grid(self.sigreg.knots, self.sigreg.t_max))
        t_squared = t**2
        pooled = self.sigreg.pooled
        n = whole("batch", batch) * (2 if pooled else 1)

        def loss(s_squared: float) -> float:
            f = np.exp(-s_squared * t_squared / 2)
            noise = 1 - f**2
            if pooled:
                noise = noise + np.exp(-s_squared * t_squared * (1 - r)) - f**2
            statistic = float(weights @ ((f - target) ** 2 + noise / n))
            return self.lam * n * statistic + (1 - self.lam) * s_squared * (1 - r) / 2

        # The loss may have one minimum inside and one at 0: find the best cell of a grid, then refine in it.
        grid = np.linspace(0, 2, 401)
        best = int(np.argmin([loss(value) for value in grid]))
        if best == 0:
            return 0.0
        cell = (grid[best - 1], grid[min(best + 1, 400)])
        return float(np.sqrt(minimize_scalar(loss, bounds=cell, method="bounded", options={"xatol": 1e-9}).x))


class Whitening(Objective):
    """`lam ||Cov - I||_F^2 / dim^2 + (1 - lam) alignment` in the centroid form: what the paper calls VICReg.

    Args:
        lam: weight of the whitening term, in [0, 1].

    Raises:
        ArgumentError: `lam` lies outside [0, 1].
    """

    coefficients = ("lam",)

    def __init__(self, lam: float) -> None:
        super().__init__()
        self.lam = real("lam", lam, 0, 1, closed="both")

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        centroid = alignment(h, form="centroid")
        regulariser = whitening(h)
        return Losses(
            total=self.lam * regulariser + (1 - self.lam) * centroid,
            alignment=in_norm_units(centroid, h),
            regulariser=regulariser,
        )


class InfoNCE(Objective):
    """Symmetric InfoNCE with a Gaussian kernel.

    Args:
        sigma: width of the kernel, > 0; `matched_sigma(r)` makes the orthogonal map optimal.

    Raises:
        ArgumentError: `sigma` is not a finite number > 0.
    """

    coefficients = ("sigma",)

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        self.sigma = real("sigma", sigma, 0, math.inf)

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        return Losses(total=infonce(h, sigma=self.sigma), alignment=alignment(h), regulariser=None)


class WhitenedAlignment(Objective):
    """Alignment of the exactly whitened embedding, divided by `2 dim`: one minus the mean pair correlation.

    Formula: with `C` the covariance of all views together and `D` the mean of `(h - h')(h - h')^T`, the whitened
    alignment is `tr(C^-1 D)`. Theorem 1: in a Gaussian world it is at least `1 - rho` (in these units), with equality
    iff the whitened embedding is `Qz`. Local minima at harmonics exist; see the module.

    Raises:
        ShapeError: at the call, when the pooled batch has not more samples than dimensions.
    """

    coefficients = ()
    whitens = True

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        aligned = alignment(whiten(two_or_more_views(h)))
        return Losses(total=aligned / (2 * h.shape[-1]), alignment=aligned, regulariser=None)


class WhitenedLeJEPA(Objective):
    """Whitened alignment plus SIGReg on the whitened embedding: the second moments exactly, the shape by SIGReg.

    `total = alignment / (2 dim) + shape SIGReg`, both on the whitened embedding, SIGReg per sample and for each view.

    Args:
        shape: weight of SIGReg, >= 0. Neither term depends on the batch size, and the scale of the embedding is fixed
            by the whitening, so one value serves many worlds. A weight of 1 or more has local minima of its own: a
            latent folded onto its absolute value and made normal again is Gaussian, and stays.
        slices: number of directions of SIGReg; None for all of them.

    Raises:
        ArgumentError: `shape` is not a finite number >= 0.
        ShapeError: at the call, when the pooled batch has not more samples than dimensions.

    Example:
        >>> h = 5 * torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
        >>> losses = WhitenedLeJEPA()(h, generator=torch.Generator().manual_seed(1))
        >>> scaled = WhitenedLeJEPA()(100 * h, generator=torch.Generator().manual_seed(1))
        >>> bool(torch.isclose(losses.total, scaled.total, rtol=1e-3))
        True
    """

    coefficients = ("shape",)
    whitens = True

    def __init__(self, shape: float = 0.1, *, slices: int | None = 64) -> None:
        super().__init__()
        self.shape = real("shape", shape, 0, math.inf, closed="low")
        self.sigreg = SIGReg(slices)

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        white = whiten(two_or_more_views(h))
        aligned = alignment(white)
        regulariser = self.sigreg(white, generator=generator)
        return Losses(
            total=aligned / (2 * h.shape[-1]) + self.shape * regulariser,
            alignment=aligned,
            regulariser=regulariser,
        )


class ConstrainedLeJEPA(Objective):
    """Alignment subject to `SIGReg <= tolerance`, by an augmented Lagrangian with bounded dual steps.

    SIGReg is debiased here: the plain one is smaller for a smaller embedding, so that its null level is no threshold.
    It is 0 at its minimum and so is its gradient; no finite multiplier holds it there, and the constraint has to leave
    a little room. An embedding of scale `s` has a SIGReg of about `0.12 (s^2 - 1)^2`, so the tolerance allows an
    orthogonality error of about `sqrt(tolerance / 0.12)`: .03 at the default. A smaller tolerance needs larger batches:
    the running mean of the violation has a standard deviation of about 1e-4 at a batch of 512.

    Each step minimises `alignment / (2 dim) + weight SIGReg` with `weight = max(0, multiplier + penalty violation)`
    and then moves the multiplier by at most `rate`: up while the constraint is violated, down while it is not. The step
    is bounded because the violation spans orders of magnitude in a run. The violation is a running mean over about 50
    steps, since that of a single batch is mostly noise.

    Args:
        tolerance: room left to the per-sample SIGReg above its null level, > 0.
        penalty: weight of the quadratic term, > 0.
        rate: largest step of the multiplier, > 0. In a world with pair correlation `r` it has to grow to about
            `(1 - r) / (0.24 e)` for an orthogonality error `e`.
        slices: number of directions of SIGReg; None for all of them.

    Raises:
        ArgumentError: an argument lies outside its range.
    """

    coefficients = ("tolerance", "penalty", "rate")

    multiplier: Tensor
    violation: Tensor

    def __init__(
        self, tolerance: float = 1e-4, *, penalty: float = 100.0, rate: float = 0.02, slices: int | None = 256
    ) -> None:
        super().__init__()
        self.tolerance = real("tolerance", tolerance, 0, math.inf)
        self.penalty = real("penalty", penalty, 0, math.inf)
        self.rate = real("rate", rate, 0, math.inf)
        self.sigreg = SIGReg(slices, debiased=True)
        self.register_buffer("multiplier", torch.tensor(1.0))
        self.register_buffer("violation", torch.tensor(0.0))

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        aligned = alignment(h)
        regulariser = self.sigreg(h, generator=generator)
        weight = torch.clamp(self.multiplier + self.penalty * self.violation, min=0)
        return Losses(
            total=aligned / (2 * h.shape[-1]) + weight * regulariser,
            alignment=aligned,
            regulariser=regulariser,
        )

    @torch.no_grad()
    def after_step(self, losses: Losses) -> None:
        assert losses.regulariser is not None  # forward gives one
        self.violation.lerp_((losses.regulariser - self.tolerance).to(self.violation), 0.02)
        step = torch.clamp(self.violation / self.tolerance, -1, 1)
        self.multiplier.add_(self.rate * step).clamp_(min=0)
