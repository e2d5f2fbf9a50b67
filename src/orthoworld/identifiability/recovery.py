"""How far an embedding is from an orthogonal map of known latents."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from orthoworld.errors import ArgumentError
from orthoworld.identifiability.moments import (
    GroupedMoments,
    Moments,
    estimates_and_intervals,
    finite_rows,
    halves,
    inverse,
    trace,
    whitening_map,
)

Z, H, ANGLES = 0, 1, 2
"""Blocks of the moments."""

CONSTANT = 1e-20
"""A column with less than this part of its mean square as variance is constant."""


@dataclass(frozen=True)
class Recovery:
    """The measures of `recovery`; NaN where one does not exist, with the reason in `reasons`.

    Attributes:
        n: rows used. dropped: rows left out for not being finite. n_fit, n_score: rows of the regression's halves.
        r2_hz, r2_zh: held-out R2 of the latents from the embedding, and back: uniform average over dimensions.
        r2_hz_per_dim, r2_zh_per_dim: the same for each dimension. r2_hz_pooled: variance-weighted.
        orth_err: `||A^T A - I||_F / sqrt(n)`, with `A` the least-squares slope of `h` on `z` and `n` latents.
        procrustes: `min_Q E ||h - Qz||^2` over orthogonal `Q`, both centred; the shorter vector is padded with zeros.
        mcc: mean absolute correlation of the best matching of latents with embedding dimensions.
        canonical_correlations: of `z` and `h`, descending.
        effective_rank: participation ratio `(sum l)^2 / sum l^2` of the eigenvalues of `Cov(h)`.
        r2_hz_angles: R2 of `(cos, sin)` of the latents declared periodic, uniform average; NaN when there are none.
        periodic: the latents declared periodic.
        dead_columns: columns of `h` that are constant.
        ci: 95 % bootstrap intervals by name.
        reasons: why a value is NaN, by name.
    """

    n: int
    dropped: int
    n_fit: int
    n_score: int
    r2_hz: float
    r2_zh: float
    r2_hz_per_dim: list[float]
    r2_zh_per_dim: list[float]
    r2_hz_pooled: float
    orth_err: float
    procrustes: float
    mcc: float
    canonical_correlations: list[float]
    effective_rank: float
    r2_hz_angles: float
    periodic: list[int]
    dead_columns: list[int]
    ci: dict[str, tuple[float, float]] = field(repr=False)
    reasons: dict[str, str]

    def __str__(self) -> str:
        names = ["r2_hz", "r2_zh", "r2_hz_pooled", "orth_err", "procrustes", "mcc", "effective_rank"]
        lines = [f"recovery from {self.n} rows (fitted on {self.n_fit}, scored on {self.n_score})"]
        lines += [line_of(name, getattr(self, name), self.ci, self.reasons) for name in names]
        if self.periodic:
            lines.append(f"latents {self.periodic} are periodic: R2 of their (cos, sin) is {self.r2_hz_angles:.4f}")
        if self.dropped:
            lines.append(f"{self.dropped} rows were not finite and are left out")
        if self.dead_columns:
            lines.append(f"columns {self.dead_columns} of h are constant")
        return "\n".join(lines)


def line_of(name: str, value: float, ci: dict[str, tuple[float, float]], reasons: dict[str, str]) -> str:
    """Return one line of a printed result: name, value, interval, and the reason of a NaN."""
    interval = f"  [{ci[name][0]:.5g}, {ci[name][1]:.5g}]" if name in ci else ""
    reason = f"  ({reasons[name]})" if name in reasons else ""
    return f"  {name:<26}{value:>12.6g}{interval}{reason}"


def recovery(
    z: Tensor | np.ndarray,
    h: Tensor | np.ndarray,
    *,
    periodic: Sequence[int] = (),
    drop: bool = False,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Recovery:
    """Measure how well an embedding recovers known latents, and how orthogonally.

    R2 is held out: the regression with intercept is fitted on the first half of the rows and scored on the second.
    Everything is computed in float64 on the CPU from means and covariances, so rank-deficient input is right
    everywhere.

    Args:
        z: latents `(n, dim)`.
        h: embeddings `(n, out_dim)` of the same states.
        periodic: latents that are angles in radians; their cosine and sine are regressed too.
        drop: leave out rows that are not finite, and say how many, instead of refusing them.
        resamples: bootstrap draws over pairs (in up to 256 groups) for the intervals; 0 for none.
        generator: source of the draws; without one, a generator of seed 0.

    Returns:
        The measures, intervals, and reasons for what could not be measured.

    Raises:
        TypeError: an array is not real.
        ShapeError: an array has more than two dimensions, or the numbers of rows differ.
        ArgumentError: an array has non-finite rows and `drop` is off, or `periodic` names no latent.

    Example:
        >>> z = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> rotation = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> result = recovery(z, z @ rotation + 3)
        >>> round(result.r2_hz, 6), round(result.orth_err, 5), round(result.procrustes, 5)
        (1.0, 0.0, 0.0)
    """
    (z, h), dropped = finite_rows({"z": z, "h": h}, drop=drop)
    columns = list(periodic)
    if any(not 0 <= column < z.shape[1] for column in columns):
        raise ArgumentError(f"periodic={columns}: expected columns of z, 0 to {z.shape[1] - 1}")
    angles = torch.cat([z[:, columns].cos(), z[:, columns].sin()], dim=1)
    grouped = GroupedMoments(z, h, *([angles] if columns else []))
    values, ci = estimates_and_intervals(
        grouped, lambda weights: _statistics(grouped, weights, bool(columns)), resamples=resamples, generator=generator
    )
    fit, score = halves(len(grouped))
    n_fit, n_score = int(fit @ grouped.counts), int(score @ grouped.counts)
    reasons = _reasons(z, h, n_fit, angles)
    numbers = {name: value.tolist() for name, value in values.items()}
    for name in reasons:
        numbers[name] = torch.full_like(values[name], torch.nan).tolist()
        ci.pop(name, None)
    return Recovery(
        n=len(z),
        dropped=dropped,
        n_fit=n_fit,
        n_score=n_score,
        **numbers,  # type: ignore[arg-type]
        periodic=columns,
        dead_columns=_constant(h).nonzero().flatten().tolist(),
        ci=ci,
        reasons=reasons,
    )


def _statistics(
    grouped: GroupedMoments, weights: Float[Tensor, "replicates groups"], angles: bool
) -> dict[str, Tensor]:
    """Return every measure for each replicate."""
    fit_mask, score_mask = halves(len(grouped))
    # A single group cannot be split; the reasons then say so, and these numbers are not shown.
    fit = grouped.moments(weights * fit_mask)
    score = grouped.moments(weights * (score_mask if score_mask.any() else fit_mask))
    everything = grouped.moments(weights)
    hz, hz_pooled = _held_out_r2(fit, score, H, Z)
    zh, _ = _held_out_r2(fit, score, Z, H)
    nan = torch.full_like(hz_pooled, torch.nan)
    slope = inverse(everything.covs(Z, Z)) @ everything.covs(Z, H)  # n x m: A^T in the column convention
    identity = torch.eye(slope.shape[-2], dtype=slope.dtype)
    cross = everything.covs(Z, H)
    h_cov = everything.covs(H, H)
    return {
        "r2_hz": hz.mean(dim=-1),
        "r2_zh": zh.mean(dim=-1),
        "r2_hz_per_dim": hz,
        "r2_zh_per_dim": zh,
        "r2_hz_pooled": hz_pooled,
        "orth_err": torch.linalg.matrix_norm(slope @ slope.mT - identity) / len(identity) ** 0.5,
        "procrustes": procrustes_error(everything.covs(Z, Z), h_cov, cross),
        "mcc": _matched_correlation(everything),
        "canonical_correlations": torch.linalg.svdvals(
            whitening_map(everything.covs(Z, Z)) @ cross @ whitening_map(h_cov).mT
        ),
        "effective_rank": trace(h_cov).square() / h_cov.square().sum(dim=(-2, -1)),
        "r2_hz_angles": _held_out_r2(fit, score, H, ANGLES)[0].mean(dim=-1) if angles else nan,
    }


def procrustes_error(
    zz: Float[Tensor, "*rep n n"], hh: Float[Tensor, "*rep m m"], zh: Float[Tensor, "*rep n m"]
) -> Float[Tensor, "*rep"]:
    """Return `min_Q E ||h - Qz||^2` over orthogonal `Q` from the covariances."""
    return (trace(zz) + trace(hh) - 2 * torch.linalg.svdvals(zh).sum(dim=-1)).clamp(min=0)


def _held_out_r2(
    fit: Moments, score: Moments, source: int, target: int
) -> tuple[Float[Tensor, "replicates dim"], Float[Tensor, " replicates"]]:
    """Return R2 for each target column and the pooled one, from regression of `target` on `source`."""
    slope = inverse(fit.covs(source, source)) @ fit.covs(source, target)
    shift = score.means(target) - fit.means(target)
    moved = (score.means(source) - fit.means(source))[..., None, :] @ slope
    bias = shift - moved.squeeze(-2)
    explained = 2 * (slope * score.covs(source, target)).sum(dim=-2)
    fitted = (slope * (score.covs(source, source) @ slope)).sum(dim=-2)
    total = score.covs(target, target).diagonal(dim1=-2, dim2=-1)
    residual = (total - explained + fitted).clamp(min=0) + bias.square()
    return 1 - residual / total, 1 - residual.sum(dim=-1) / total.sum(dim=-1)


def _matched_correlation(moments: Moments) -> Float[Tensor, " replicates"]:
    """Return the mean absolute correlation under the best one-to-one matching; constant columns correlate at 0."""
    stds = [moments.covs(block, block).diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt() for block in (Z, H)]
    scale = stds[0][..., :, None] * stds[1][..., None, :]
    correlation = torch.where(scale > 0, moments.covs(Z, H) / scale, 0.0).abs()
    matched = [matrix[linear_sum_assignment(matrix, maximize=True)].mean() for matrix in correlation.numpy()]
    return torch.tensor(matched, dtype=torch.float64)


def _constant(columns: Float[Tensor, "n dim"]) -> torch.Tensor:
    """Return which columns do not vary beyond rounding."""
    spread = (columns - columns.mean(dim=0)).square().mean(dim=0)
    return spread <= CONSTANT * columns.square().mean(dim=0)


def _reasons(
    z: Float[Tensor, "n dim"], h: Float[Tensor, "n out"], n_fit: int, angles: Float[Tensor, "n twice"]
) -> dict[str, str]:
    """Say which measures do not exist for this input, and why."""
    reasons: dict[str, str] = {}
    regressions = (
        (("r2_hz", "r2_hz_per_dim", "r2_hz_pooled"), h, z, "z"),
        (("r2_zh", "r2_zh_per_dim"), z, h, "h"),
        (("r2_hz_angles",), h, angles, "the angles"),
    )
    for names, source, target, target_name in regressions:
        constant = int((_constant(target) | _constant(target[n_fit:])).sum()) if len(z) > n_fit else 0
        if n_fit <= source.shape[1] + 1 or len(z) - n_fit < 2:
            why = f"{n_fit} rows to fit {source.shape[1] + 1} coefficients on: expected more rows"
        elif constant:
            why = f"{constant} columns of {target_name} are constant, or are so in the half that is scored"
        elif target.shape[1] == 0:
            why = "no latent was declared periodic"
        else:
            continue
        reasons.update(dict.fromkeys(names, why))
    most = max(z.shape[1], h.shape[1])
    if len(z) <= most + 1:
        why = f"{len(z)} rows for {most} dimensions: expected more than {most + 1} rows"
        moment_names = ("orth_err", "procrustes", "mcc", "canonical_correlations", "effective_rank")
        return reasons | dict.fromkeys(moment_names, why)
    constant_z, constant_h = int(_constant(z).sum()), int(_constant(h).sum())
    if constant_z:
        why = f"{constant_z} columns of z are constant"
        reasons |= dict.fromkeys(("orth_err", "canonical_correlations"), why)
    if constant_h == h.shape[1]:
        why = "every column of h is constant"
        reasons |= dict.fromkeys(("effective_rank", "mcc", "canonical_correlations"), why)
    return reasons
