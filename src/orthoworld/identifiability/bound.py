"""Theorem 3: what the alignment gap and the covariance say about the distance from an orthogonal map.

In a Gaussian world with correlation `rho`, for centred `h` with `L = E||h' - h||^2 <= 2 (1 - rho) tr Cov(h) + delta`
and `||Cov(h) - I||_F <= epsilon`, there is an orthogonal `Q` with `E||h - Qz||^2 <= D + (epsilon + D)^2`. Here
`D = delta / (2 rho (1 - rho))` bounds the energy of `h` beyond degree one (Klindt, LeCun and Balestriero,
arXiv:2605.26379).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import real
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.moments import (
    GroupedMoments,
    Moments,
    estimates_and_intervals,
    finite_rows,
    inverse,
    trace,
)
from orthoworld.identifiability.recovery import line_of, procrustes_error

H, H_NEXT, SQUARED_NORM, Z, Z_NEXT = 0, 1, 2, 3, 4
"""Blocks of the moments."""

OF_LATENTS = (
    "true_error",
    "linear_error",
    "nonlinear_energy_true",
    "gram_error",
    "smallest_singular_value",
    "procrustes",
)
"""Measures that need the latents."""


@dataclass(frozen=True)
class Bound:
    """The measures of `bound`; NaN where one does not exist, with the reason in `reasons`.

    Attributes:
        n: pairs used; `dropped`: pairs left out for not being finite; rho: the correlation it was computed for.
        alignment: `E ||h' - h||^2`, both centred. trace_cov: `tr Cov(h)`.
        delta: the alignment gap `L - 2 (1 - rho) tr Cov(h)` as estimated; negative values are sampling noise.
        delta_clipped: `max(delta, 0)`, which the bound uses.
        epsilon: `||Cov(h) - I||_F`. epsilon_floor: what it is for a perfect encoder and `n` samples.
        epsilon_squared_debiased: unbiased estimate of `||Cov(h) - I||_F^2`, possibly negative.
        epsilon_debiased: its root, of the positive part.
        nonlinear_energy: `D`. bound: `D + (epsilon + D)^2`. bound_debiased: the same with the debiased epsilon.
        bound_sharp: `D + ((epsilon + D) / (1 + sigma))^2` with the debiased epsilon and `sigma^2 = max(0, 1 - epsilon -
            D)`, which the smallest squared singular value of the linear part of `h` is at least.
        bound_controlled: the bound with latents of both states as control variates, see `bound`; NaN without them.
        true_error: `min_Q E||h - Qz||^2` from known latents, the sum of `linear_error = ||A - Q||_F^2` and
            `nonlinear_energy_true`, the energy of `h` that no linear map of `z` explains. NaN without latents.
        gram_error, smallest_singular_value: `||A A^T - I||_F` and the least singular value of `A`, see `proof_steps`.
        procrustes: `min_Q E||h - Qz||^2` over the sample itself, which takes neither the covariance of the latents as
            the identity nor the theorem's decomposition of the error.
        ci: 95 % bootstrap intervals by name.
        reasons: why a value is NaN, by name.
    """

    n: int
    dropped: int
    rho: float
    alignment: float
    trace_cov: float
    delta: float
    delta_clipped: float
    epsilon: float
    epsilon_floor: float
    epsilon_squared_debiased: float
    epsilon_debiased: float
    nonlinear_energy: float
    bound: float
    bound_debiased: float
    bound_sharp: float
    bound_controlled: float
    true_error: float
    linear_error: float
    nonlinear_energy_true: float
    gram_error: float
    smallest_singular_value: float
    procrustes: float
    ci: dict[str, tuple[float, float]] = field(repr=False)
    reasons: dict[str, str]

    def __str__(self) -> str:
        names = ["delta", "epsilon", "epsilon_debiased", "epsilon_floor", "nonlinear_energy", "bound", "bound_debiased"]
        names.append("bound_sharp")
        if "bound_controlled" not in self.reasons:
            names.append("bound_controlled")
        if "true_error" not in self.reasons:
            names += ["true_error", "linear_error", "nonlinear_energy_true"]
        lines = [f"bound from {self.n} pairs at rho = {self.rho:g}"]
        return "\n".join(lines + [line_of(name, getattr(self, name), self.ci, self.reasons) for name in names])

    def proof_steps(self) -> dict[str, tuple[float, float]]:
        """Return both sides of each inequality of the proof, `left <= right`, and of the equality that ends it.

        `spectral_gap`: the energy beyond degree one is at most `D`. `gram`: `||A A^T - I||_F <= epsilon + W`, with the
        debiased epsilon. `polar`: `||A - Q||_F <= ||A A^T - I||_F / (1 + sigma_min(A))`. `pythagoras`: the error over
        the sample equals `||A - Q||_F^2 + W`, up to the sampling error of the latents' covariance. NaN without latents.
        """
        energy = self.nonlinear_energy_true
        return {
            "spectral_gap": (energy, self.nonlinear_energy),
            "gram": (self.gram_error, self.epsilon_debiased + energy),
            "polar": (math.sqrt(self.linear_error), self.gram_error / (1 + self.smallest_singular_value)),
            "pythagoras": (self.procrustes, self.true_error),
        }


def bound(
    h: Tensor | np.ndarray,
    h_next: Tensor | np.ndarray,
    *,
    rho: float,
    z: Tensor | np.ndarray | None = None,
    z_next: Tensor | np.ndarray | None = None,
    drop: bool = False,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Bound:
    """Evaluate Theorem 3 on the embeddings of pairs, and the exact error beside it when the latents are known.

    Embeddings are centred first; the theorem speaks of centred `h`. `rho` has to come from elsewhere: estimated from
    the same embeddings as `tr Cov(h, h') / tr Cov(h)` it makes the gap zero by construction.

    Near a perfect encoder the truth hides in the sampling noise of `epsilon` and `delta`; for `h = z` the latter has
    the standard deviation `sqrt(8 (1 - rho)(1 - rho^2) dim / n)`. Where both latent states are known it can be taken
    out: with `A` the slope of `h` on `z`, the moments of `Az` are known exactly in a Gaussian world, so
    `bound_controlled` uses `Cov(h) - A (Cov(z) - I) A^T` in the place of `Cov(h)`, and likewise for the
    cross-covariance with `rho I`. What is left is the noise of the nonlinear part.

    Args:
        h, h_next: embeddings `(n, dim)` of both states of each pair.
        rho: correlation of the two latent states of a pair, the same for all latents.
        z: latents `(n, dim)` of the first state, of unit covariance, for the exact error.
        z_next: latents `(n, dim)` of the second state, given with `z`, for the controlled bound.
        drop: leave out pairs that are not finite, and say how many, instead of refusing them.
        resamples: bootstrap draws over pairs (in up to 256 groups) for the intervals; 0 for none.
        generator: source of the draws; without one, a generator of seed 0.

    Returns:
        The measures. With `rho` outside (0, 1) the bound is undefined: NaN, with the reason.

    Raises:
        TypeError: an array is not real.
        ShapeError: the arrays differ in rows, or `h` and `h_next` in dimension.
        ArgumentError: `rho` lies outside [-1, 1], `z_next` comes without `z`, or an array has non-finite rows and
            `drop` is off.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> z = torch.randn(4000, 2, generator=g)
        >>> z_next = 0.9 * z + (1 - 0.9**2) ** 0.5 * torch.randn(4000, 2, generator=g)
        >>> result = bound(z, z_next, rho=0.9, z=z)
        >>> result.bound < 0.05, round(result.true_error, 6)
        (True, 0.0)
    """
    rho = real("rho", rho, -1, 1, closed="both")
    if z is None and z_next is not None:
        raise ArgumentError("z_next is given without z: expected both")
    latents = {"z": z, "z_next": z_next}
    given = {"h": h, "h_next": h_next} | {name: array for name, array in latents.items() if array is not None}
    rows, dropped = finite_rows(given, drop=drop)
    if rows[0].shape != rows[1].shape:
        raise ShapeError(f"h has shape {tuple(rows[0].shape)} and h_next {tuple(rows[1].shape)}: expected the same")
    if z_next is not None and rows[2].shape != rows[3].shape:
        raise ShapeError(f"z has shape {tuple(rows[2].shape)} and z_next {tuple(rows[3].shape)}: expected the same")
    centre = rows[0].mean(dim=0)
    grouped = GroupedMoments(*_blocks(rows, centre))
    return _bound(grouped, centre, [row.shape[1] for row in rows], rho, dropped, resamples, generator)


def bound_of_batches(
    batches: Iterable[Sequence[Tensor]],
    *,
    rho: float,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Bound:
    """Evaluate Theorem 3 as `bound` does, on pairs of which one batch is held at a time.

    Args:
        batches: batches `(h, h_next)`, `(h, h_next, z)` or `(h, h_next, z, z_next)`, all of finite rows, each of shape
            `(n_i, dim)`. Each is a group of the bootstrap, so intervals need 20 batches or more. The sums over a batch
            have as many entries as the square of all its columns together.
        rho, resamples, generator: as in `bound`.

    Raises:
        ArgumentError: there is no batch, or one has rows that are not finite.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> z = torch.randn(30, 200, 2, generator=g)
        >>> z_next = 0.9 * z + (1 - 0.9**2) ** 0.5 * torch.randn(30, 200, 2, generator=g)
        >>> result = bound_of_batches(zip(z, z_next), rho=0.9)
        >>> result.n, result.bound < 0.05
        (6000, True)
    """
    rho = real("rho", rho, -1, 1, closed="both")
    centre: Tensor | None = None
    dims: list[int] = []

    def parts() -> Iterator[list[Tensor]]:
        nonlocal centre, dims
        for batch in batches:
            rows, _ = finite_rows(dict(zip(("h", "h_next", "z", "z_next"), batch, strict=False)))
            centre = rows[0].mean(dim=0) if centre is None else centre
            dims = [row.shape[1] for row in rows]
            yield _blocks(rows, centre)

    stream = parts()
    first = next(stream, None)
    if first is None or centre is None:
        raise ArgumentError("batches=[]: expected one batch or more")
    grouped = GroupedMoments.of_parts(itertools.chain([first], stream))
    return _bound(grouped, centre, dims, rho, 0, resamples, generator)


def _blocks(rows: Sequence[Float[Tensor, "n _"]], centre: Float[Tensor, " dim"]) -> list[Float[Tensor, "n _"]]:
    """Return the arrays whose moments are taken: `rows` with the squared distance of `h` from `centre` after `h'`."""
    return [*rows[:2], (rows[0] - centre).square().sum(dim=1, keepdim=True), *rows[2:]]


def _bound(
    grouped: GroupedMoments,
    centre: Float[Tensor, " dim"],
    dims: Sequence[int],
    rho: float,
    dropped: int,
    resamples: int,
    generator: torch.Generator | None,
) -> Bound:
    """Return the measures from the moments of `_blocks`; `dims` are the sizes of `h`, `h'` and the latents given."""
    values, ci = estimates_and_intervals(
        grouped,
        lambda weights: _statistics(grouped.moments(weights), centre, rho, latents=len(dims) - 2),
        resamples=resamples,
        generator=generator,
    )
    n, dim = int(grouped.counts.sum()), dims[0]
    reasons = _reasons(n, rho, dim, dims[2:])
    numbers = {name: math.nan if name in reasons else float(value) for name, value in values.items()}
    return Bound(
        n=n,
        dropped=dropped,
        rho=rho,
        **numbers,
        epsilon_floor=math.sqrt(dim * (dim + 1) / n),
        ci={name: interval for name, interval in ci.items() if name not in reasons},
        reasons=reasons,
    )


def _statistics(moments: Moments, centre: Float[Tensor, " dim"], rho: float, *, latents: int) -> dict[str, Tensor]:
    """Return every measure for each replicate; `latents` counts the latent states that are known."""
    cov = moments.covs(H, H)
    next_cov, lagged = moments.covs(H_NEXT, H_NEXT), moments.covs(H, H_NEXT)
    delta = _gap(cov, next_cov, lagged, rho)
    epsilon_squared = _off_identity(cov)
    debiased = _unbiased_off_identity(cov, _fourth_moment(moments, centre), moments.n)
    epsilon, epsilon_debiased = epsilon_squared.sqrt(), debiased.clamp(min=0).sqrt()
    energy = _energy(delta, rho)
    exact = dict.fromkeys((*OF_LATENTS, "bound_controlled"), torch.full_like(delta, torch.nan))
    if latents:
        slope = inverse(moments.covs(Z, Z)) @ moments.covs(Z, H)
        exact |= _exact_error(slope, moments.covs(Z, H), cov)
        exact["procrustes"] = procrustes_error(moments.covs(Z, Z), cov, moments.covs(Z, H))
    if latents == 2:
        known = [
            (cov, moments.covs(Z, Z), 1.0),
            (next_cov, moments.covs(Z_NEXT, Z_NEXT), 1.0),
            (lagged, moments.covs(Z, Z_NEXT), rho),
        ]
        cov, next_cov, lagged = (own - slope.mT @ _minus_identity(of_z, level) @ slope for own, of_z, level in known)
        controlled = _energy(_gap(cov, next_cov, lagged, rho), rho)
        exact["bound_controlled"] = controlled + (_off_identity(cov).sqrt() + controlled).square()
    trace_cov = trace(moments.covs(H, H))
    return {
        "alignment": trace_cov + trace(moments.covs(H_NEXT, H_NEXT)) - 2 * trace(moments.covs(H, H_NEXT)),
        "trace_cov": trace_cov,
        "delta": delta,
        "delta_clipped": delta.clamp(min=0),
        "epsilon": epsilon,
        "epsilon_squared_debiased": debiased,
        "epsilon_debiased": epsilon_debiased,
        "nonlinear_energy": energy,
        "bound": energy + (epsilon + energy).square(),
        "bound_debiased": energy + (epsilon_debiased + energy).square(),
        "bound_sharp": energy + _sharpened(epsilon_debiased + energy).square(),
        **exact,
    }


def _minus_identity(matrix: Float[Tensor, "*rep d d"], factor: float = 1.0) -> Float[Tensor, "*rep d d"]:
    return matrix - factor * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def _off_identity(cov: Float[Tensor, "*rep d d"]) -> Float[Tensor, "*rep"]:
    """Return `||C - I||_F^2`."""
    return _minus_identity(cov).square().sum(dim=(-2, -1))


def _fourth_moment(moments: Moments, centre: Float[Tensor, " dim"]) -> Float[Tensor, "*rep"]:
    """Return the mean of `|h - mean|^4` from moments of the squared distance from another `centre`.

    With `d = mean - centre`, `|h - mean|^2` is `|h - centre|^2 - 2 (h - centre) d + |d|^2`.
    """
    offset = (moments.means(H) - centre)[..., None]
    across = moments.covs(SQUARED_NORM, H) @ offset
    variance = moments.covs(SQUARED_NORM, SQUARED_NORM) - 4 * across + 4 * offset.mT @ moments.covs(H, H) @ offset
    mean = moments.means(SQUARED_NORM) - offset.square().sum(dim=-2)
    return variance[..., 0, 0] + mean[..., 0].square()


def _unbiased_off_identity(
    cov: Float[Tensor, "*rep d d"], fourth: Float[Tensor, "*rep"], n: Float[Tensor, "*rep"]
) -> Float[Tensor, "*rep"]:
    """Return the unbiased estimate of `||C - I||_F^2 = tr C^2 - 2 tr C + d` from `n` rows of any law.

    Formula: with the unbiased covariance `S` and `F = sum |h - mean|^4 / (n - 1)`, `tr C^2` is estimated by
    `(n - 1) [(n - 1)(n - 2) tr S^2 + (tr S)^2 - n F] / [n (n - 2)(n - 3)]` (Himeno and Yamada 2014, Journal of
    Multivariate Analysis 130). `cov` and `fourth` divide by `n`. NaN for three rows or fewer.
    """
    unbiased = cov * (n / (n - 1))[..., None, None]
    total = trace(unbiased)
    squares = (n - 1) * (n - 2) * unbiased.square().sum(dim=(-2, -1)) + total.square() - n * fourth * n / (n - 1)
    estimate = (n - 1) * squares / (n * (n - 2) * (n - 3)) - 2 * total + cov.shape[-1]
    return torch.where(n > 3, estimate, torch.nan)


def _gap(
    cov: Float[Tensor, "*rep d d"], next_cov: Float[Tensor, "*rep d d"], lagged: Float[Tensor, "*rep d d"], rho: float
) -> Float[Tensor, "*rep"]:
    """Return `delta = E||h' - h||^2 - 2 (1 - rho) tr Cov(h)`."""
    return trace(cov) + trace(next_cov) - 2 * trace(lagged) - 2 * (1 - rho) * trace(cov)


def _energy(delta: Float[Tensor, "*rep"], rho: float) -> Float[Tensor, "*rep"]:
    """Return `D = max(delta, 0) / (2 rho (1 - rho))`, NaN where the theorem does not speak."""
    gap = 2 * rho * (1 - rho)
    return delta.clamp(min=0) / gap if gap > 0 else torch.full_like(delta, torch.nan)


def _sharpened(gram: Float[Tensor, "*rep"]) -> Float[Tensor, "*rep"]:
    """Return a bound on `||A - Q||_F` from one on `||A A^T - I||_F`.

    `|sigma - 1| = |sigma^2 - 1| / (1 + sigma)` for each singular value, and none has a square below `1 - gram`.
    """
    return gram / (1 + (1 - gram).clamp(min=0).sqrt())


def _exact_error(
    slope: Float[Tensor, "*rep n m"], zh: Float[Tensor, "*rep n m"], hh: Float[Tensor, "*rep m m"]
) -> dict[str, Tensor]:
    """Return `||A - Q||_F^2 + W`, the parts of `min_Q E||h - Qz||^2` for latents of unit covariance.

    `A` is the slope of `h` on `z` and `W` the variance it leaves. The best `Q` is the polar factor of `A`, so the first
    part is `sum (sigma_i - 1)^2` over the singular values, with those of the padding (`m != n`) counted as 0.
    """
    sigma = torch.linalg.svdvals(slope)
    missing = slope.shape[-2] - sigma.shape[-1]  # latents more than embedding dimensions: Q cannot reach them
    linear = (sigma - 1).square().sum(dim=-1) + missing
    energy = (trace(hh) - (slope * zh).sum(dim=(-2, -1))).clamp(min=0)
    return {
        "true_error": linear + energy,
        "linear_error": linear,
        "nonlinear_energy_true": energy,
        "gram_error": _off_identity(slope.mT @ slope).sqrt(),
        "smallest_singular_value": sigma[..., -1],
    }


def _reasons(n: int, rho: float, dim: int, latents: Sequence[int]) -> dict[str, str]:
    """Say which measures do not exist for this input, and why; `latents` has the size of each known latent state."""
    reasons = {}
    if n <= 3:
        names = ("epsilon_squared_debiased", "epsilon_debiased", "bound_debiased", "bound_sharp")
        reasons.update(dict.fromkeys(names, f"{n} pairs: expected more than 3"))
    if not latents:
        reasons.update(dict.fromkeys(OF_LATENTS, "no latents were given"))
    if len(latents) < 2:
        reasons["bound_controlled"] = "the latents of both states were not given"
    of_theorem = ("nonlinear_energy", "bound", "bound_debiased", "bound_sharp", "bound_controlled")
    if not 0 < rho < 1:
        reasons.update(dict.fromkeys(of_theorem, f"rho = {rho:g}: the theorem needs 0 < rho < 1"))
    elif latents and latents[0] != dim:
        reasons.update(dict.fromkeys(of_theorem, f"{dim} embedding dimensions for {latents[0]} latents: need as many"))
    return reasons
