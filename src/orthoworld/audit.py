"""The audit: has this encoder learned the state? A verdict in words, from rules that are written down here.

The rules, in order; the first that applies decides. Thresholds are the constants below.

1. *not enough data*: fewer than `ROWS_PER_DIMENSION` rows for each dimension.
2. *collapsed*: some direction of the embedding has less than `COLLAPSE_RATIO` of the widest one's standard deviation.
3. With latents: *identifies the state*, when the intervals put R2 above `R2_IDENTIFIED` and the orthogonality error
   below `ORTH_IDENTIFIED`; *identifies the state up to a linear map*, when only R2 is; *partial*, when R2 is for some
   latents; else *does not identify the state linearly*.
4. With `rho`: *assumptions violated*, when pairs correlate at more than `rho`, which no function of Gaussian latents
   can; *identifies the state*, when the upper end of Theorem 3's bound is below `ERROR_IDENTIFIED` for each dimension;
   *nonlinear*, when the energy beyond degree one, at least `delta / (2 rho)`, is above it beyond sampling noise; *does
   not identify the state*, when a condition of rule 5 fails; *undecided*, when some energy is beyond degree one and the
   data cannot say how much; else *not enough data*.
5. With neither: *does not identify the state* when a necessary condition fails, which are covariance `I` and a normal
   law in each canonical direction; else *undecided*: two views alone cannot tell a linear map from a nonlinear one that
   keeps the normal law, since the pair correlation they show is at most `rho` and equal to it only for a linear map.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import real, whole
from orthoworld.errors import ShapeError
from orthoworld.identifiability.bound import Bound, bound
from orthoworld.identifiability.moments import finite_rows
from orthoworld.identifiability.oracle import linear_oracle
from orthoworld.identifiability.recovery import Recovery, recovery

ROWS_PER_DIMENSION = 20
COLLAPSE_RATIO = 1e-3
R2_IDENTIFIED = 0.99
ORTH_IDENTIFIED = 0.05
ERROR_IDENTIFIED = 0.05
WHITENING_TOLERANCE = 0.1
"""Debiased `||Cov(h) - I||_F / sqrt(dim)` up to which the covariance counts as the identity."""

CUMULANT_TOLERANCE = 0.2
"""Skewness and excess kurtosis up to which a law counts as normal."""

NORMAL_QUANTILE = 3.0
"""Standard errors by which a cumulant must exceed its tolerance, before multiplicity."""


@dataclass(frozen=True)
class Audit:
    """The verdict on an encoder.

    Attributes:
        verdict: in words; see the module for the rules.
        reasons: what decided it, and what else was noticed.
        n: pairs used. dim: size of the embedding. rho: the pair correlation of the latents, where it was given.
        pair_correlations: of the embedding's canonical directions, descending.
        effective_rank: participation ratio of the covariance's eigenvalues.
        skewness, excess_kurtosis: the largest in absolute value over the canonical directions.
        bound: Theorem 3, where `rho` was given.
        recovery: the comparison with the latents, where they were given.
    """

    verdict: str
    reasons: list[str]
    n: int
    dim: int
    rho: float | None
    pair_correlations: list[float]
    effective_rank: float
    skewness: float
    excess_kurtosis: float
    bound: Bound | None = field(repr=False)
    recovery: Recovery | None = field(repr=False)

    def __str__(self) -> str:
        correlations = ", ".join(f"{value:.4f}" for value in self.pair_correlations)
        lines = [f"verdict: {self.verdict}", *(f"  {reason}" for reason in self.reasons)]
        lines += [
            f"from {self.n} pairs of {self.dim} dimensions",
            f"  pair correlations        {correlations}",
            f"  effective rank           {self.effective_rank:.4g}",
            f"  skewness, exc. kurtosis  {self.skewness:.3g}, {self.excess_kurtosis:.3g}",
        ]
        return "\n".join(lines)


def audit(
    h: Tensor | np.ndarray,
    h_next: Tensor | np.ndarray,
    *,
    z: Tensor | np.ndarray | None = None,
    rho: float | None = None,
    drop: bool = False,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Audit:
    """Say whether an encoder has learned the state of its world, as far as the data can tell.

    Args:
        h: embeddings `(n, dim)` of one view or state of each pair.
        h_next: embeddings `(n, dim)` of the other.
        z: latents `(n, latents)` of the first, if they are known.
        rho: correlation of the two latent states of a pair, if it is known. Never an estimate from the same embeddings:
            measured against that, every encoder is linear.
        drop: leave out pairs that are not finite, and say how many, instead of refusing them.
        resamples: bootstrap draws for the intervals, at least 20.
        generator: source of the draws; without one, a generator of seed 0.

    Raises:
        TypeError: an array is not real.
        ShapeError: the arrays differ in shape.
        ArgumentError: an array has non-finite rows and `drop` is off, `rho` lies outside (0, 1), or `resamples` is too
            small.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> z = torch.randn(20_000, 2, generator=g)
        >>> z_next = 0.6 * z + 0.8 * torch.randn(20_000, 2, generator=g)
        >>> audit(z, z_next, rho=0.6).verdict
        'identifies the state'
        >>> audit(z, z_next).verdict
        'undecided'
    """
    if rho is not None:
        rho = real("rho", rho, 0, 1)
    whole("resamples", resamples, least=20)
    (first, second, *latents), dropped = finite_rows(
        {"h": h, "h_next": h_next} | ({} if z is None else {"z": z}), drop=drop
    )
    if first.shape != second.shape:
        raise ShapeError(f"h has shape {tuple(first.shape)} and h_next {tuple(second.shape)}: expected the same")
    n, dim = first.shape
    variances = torch.linalg.eigvalsh(torch.cov(first.T).reshape(dim, dim)) if n > 1 else torch.zeros(dim)
    enough = n >= ROWS_PER_DIMENSION * dim
    collapsed = bool(variances[0] <= COLLAPSE_RATIO**2 * variances[-1]) or float(variances[-1]) == 0
    correlations: list[float] = []
    skewness = excess = math.nan
    if enough and not collapsed:
        oracle = linear_oracle(first, second, dim)
        correlations = oracle.correlations.tolist()
        skewness, excess = _largest_cumulants(oracle.transform(first))
    limit = bound(first, second, rho=rho if rho is not None else 0.5, resamples=resamples, generator=generator)
    found = recovery(latents[0], first, resamples=resamples, generator=generator) if latents else None
    if not enough:
        verdict, reasons = (
            "not enough data",
            [f"{n} rows for {dim} dimensions: about {ROWS_PER_DIMENSION * dim} needed"],
        )
    elif collapsed:
        stds = variances.clamp(min=0).sqrt()
        verdict, reasons = (
            "collapsed",
            [f"standard deviation {stds[0]:.2g} in one direction, {stds[-1]:.2g} in another"],
        )
    elif found is not None:
        verdict, reasons = _with_latents(found)
    elif rho is not None:
        failed = _failed_conditions(limit, dim, n, skewness, excess)
        verdict, reasons = _with_rho(limit, dim, max(correlations), failed)
    elif failed := _failed_conditions(limit, dim, n, skewness, excess):
        verdict, reasons = "does not identify the state", failed
    else:
        verdict = "undecided"
        reasons = ["covariance and law are those of Qz; pass rho, or the latents, to decide"]
    if dropped:
        reasons = [*reasons, f"{dropped} pairs were not finite and are left out"]
    return Audit(
        verdict=verdict,
        reasons=reasons,
        n=n,
        dim=dim,
        rho=rho,
        pair_correlations=correlations,
        effective_rank=float(variances.sum() ** 2 / variances.square().sum()) if not collapsed else math.nan,
        skewness=skewness,
        excess_kurtosis=excess,
        bound=limit if rho is not None else None,
        recovery=found,
    )


def _largest_cumulants(h: Float[Tensor, "n dim"]) -> tuple[float, float]:
    """Return the skewness and excess kurtosis of largest absolute value over the columns."""
    standard = (h - h.mean(dim=0)) / h.std(dim=0)
    skewness = standard.pow(3).mean(dim=0)
    excess = standard.pow(4).mean(dim=0) - 3
    return float(skewness[skewness.abs().argmax()]), float(excess[excess.abs().argmax()])


def _with_latents(found: Recovery) -> tuple[str, list[str]]:
    if "r2_hz" in found.reasons or "orth_err" in found.reasons:
        return "not enough data", [found.reasons.get("r2_hz", found.reasons.get("orth_err", ""))]
    r2_low = found.ci.get("r2_hz", (found.r2_hz, found.r2_hz))[0]
    orth_high = found.ci.get("orth_err", (found.orth_err, found.orth_err))[1]
    told = [
        f"held-out R2 of the latents {found.r2_hz:.4f} (at least {r2_low:.4f}), orthogonality error "
        f"{found.orth_err:.4f} (at most {orth_high:.4f})"
    ]
    if r2_low >= R2_IDENTIFIED:
        linear = "identifies the state" if orth_high <= ORTH_IDENTIFIED else "identifies the state up to a linear map"
        return linear, told
    good = [index for index, value in enumerate(found.r2_hz_per_dim) if value >= R2_IDENTIFIED]
    if good:
        return "partial", [*told, f"latents {good} are recovered, the others are not"]
    return "does not identify the state linearly", told


def _with_rho(limit: Bound, dim: int, correlation: float, failed: list[str]) -> tuple[str, list[str]]:
    rho, n = limit.rho, limit.n
    # The largest of several canonical correlations errs upwards; its standard error is about (1 - rho^2) / sqrt n.
    if correlation > rho + (NORMAL_QUANTILE + math.sqrt(dim)) * (1 - rho**2) / math.sqrt(n):
        told = f"pairs correlate at {correlation:.3f}, above rho = {rho:g}: no function of Gaussian latents does"
        return "assumptions violated", [told]
    allowed = ERROR_IDENTIFIED * dim
    high = limit.ci["bound"][1]
    told = f"E||h - Qz||^2 is at most {high:.4g}, if the world is Gaussian with rho = {rho:g}; allowed: {allowed:g}"
    if high <= allowed:
        return "identifies the state", [told]
    # L - 2 (1 - rho) tr Cov = 2 sum (rho - rho^d) c_d^2 <= 2 rho (energy beyond degree one): a bound from below.
    low = limit.ci["delta"][0] / (2 * rho)
    noise = math.sqrt(8 * (1 - rho) * (1 - rho**2) * dim / n) / (2 * rho)
    if low > allowed and limit.delta / (2 * rho) > allowed + NORMAL_QUANTILE * noise:
        energy = f"at least {low:.4g} of E||h||^2 is not linear in the state: nonlinear, or noise in the encoder"
        return "nonlinear", [told, energy]
    if failed:
        return "does not identify the state", [told, *failed]
    if limit.delta / (2 * rho) > NORMAL_QUANTILE * noise:
        most = limit.ci["nonlinear_energy"][1]
        return "undecided", [told, f"between {max(low, 0):.4g} and {most:.4g} of E||h||^2 is not linear in the state"]
    return "not enough data", [told]


def _off_white(limit: Bound, dim: int) -> bool:
    """Whether the covariance is further from the identity than the tolerance and sampling allow."""
    return limit.epsilon_debiased > WHITENING_TOLERANCE * math.sqrt(dim) + 2 * limit.epsilon_floor


def _failed_conditions(limit: Bound, dim: int, n: int, skewness: float, excess: float) -> list[str]:
    """Return the necessary conditions of `h = Qz` that the embedding fails, in words."""
    failed = []
    if _off_white(limit, dim):
        failed.append(_whitening_reason(limit))
    # Standard errors of skewness and kurtosis under the normal law; the quantile grows with the number of directions.
    quantile = NORMAL_QUANTILE + math.sqrt(2 * math.log(dim))
    if abs(skewness) > CUMULANT_TOLERANCE + quantile * math.sqrt(6 / n):
        failed.append(f"a canonical direction has skewness {skewness:.3g}: a normal law has 0")
    if abs(excess) > CUMULANT_TOLERANCE + quantile * math.sqrt(24 / n):
        failed.append(f"a canonical direction has excess kurtosis {excess:.3g}: a normal law has 0")
    return failed


def _whitening_reason(limit: Bound) -> str:
    return f"||Cov(h) - I||_F is {limit.epsilon_debiased:.3g} beyond sampling: Qz has covariance I"
