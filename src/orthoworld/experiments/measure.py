"""What is measured about a trained run, as plain numbers, lists and strings."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from orthoworld.experiments.config import RunSpec
from orthoworld.identifiability.bound import Bound, bound, bound_of_batches
from orthoworld.identifiability.moments import group_count
from orthoworld.identifiability.oracle import linear_oracle
from orthoworld.identifiability.published import grid, in_sample_r2, orthogonality_error
from orthoworld.identifiability.recovery import recovery
from orthoworld.identifiability.spectrum import hermite_spectrum, mode_name
from orthoworld.objectives.lejepa import LeJEPA
from orthoworld.objectives.objective import Objective
from orthoworld.streams import stream
from orthoworld.training.run import Run
from orthoworld.training.session import HeldOut
from orthoworld.worlds.langevin import Langevin
from orthoworld.worlds.world import Pairs, World

RECOVERY_KEYS = (
    "r2_hz",
    "r2_zh",
    "r2_hz_per_dim",
    "r2_hz_pooled",
    "orth_err",
    "procrustes",
    "mcc",
    "canonical_correlations",
    "effective_rank",
)
BOUND_KEYS = (
    "alignment",
    "delta",
    "delta_clipped",
    "epsilon",
    "epsilon_squared_debiased",
    "epsilon_debiased",
    "epsilon_floor",
    "nonlinear_energy",
    "bound",
    "bound_debiased",
    "bound_sharp",
    "bound_controlled",
    "true_error",
    "linear_error",
    "nonlinear_energy_true",
)
OF_THEOREM = ("nonlinear_energy", "bound", "bound_debiased", "bound_sharp", "bound_controlled")
"""What means something in a Gaussian world only."""

RESAMPLED_DIM = 64
"""Up to so many dimensions intervals have the usual number of bootstrap draws, then fewer: a draw takes dim^3 time."""

RESAMPLES, FEWEST_RESAMPLES = 200, 20

SPECTRUM_DIM = 3
"""Worlds of more latents have too many Hermite products to fit each."""

SPECTRUM_DEGREE = 8

CURVE_DEGREE = 4

SUCCESS = 0.99
"""A restart whose held-out R2 reaches this has found the latents, and is in no local minimum."""


def curve_metrics(held_out: HeldOut) -> dict[str, float]:
    """Return the columns of a learning curve: recovery both ways, orthogonality, bound, exact error, spectrum."""
    world, z = held_out.world, held_out.pairs.z
    found = recovery(z, held_out.h, resamples=0)
    row = {"r2_hz": found.r2_hz, "r2_zh": found.r2_zh, "orth_err": found.orth_err}
    r = held_out.pairs.r
    if isinstance(r, float):
        limit = bound(held_out.h, held_out.h_next, rho=r, z=z, z_next=held_out.pairs.z_next, resamples=0)
        row |= {key: getattr(limit, key) for key in ("bound", "bound_controlled", "true_error")}
        if not world.source.is_gaussian:
            row |= {"bound": math.nan, "bound_controlled": math.nan}
    if _has_spectrum(world):
        spectrum = hermite_spectrum(z, held_out.h, degree=CURVE_DEGREE, resamples=0)
        row |= {f"energy_{degree}": share for degree, share in enumerate(spectrum.degrees, start=1)}
        row["energy_rest"] = spectrum.rest
    return row


def _has_spectrum(world: World) -> bool:
    return world.source.is_gaussian and world.dim <= SPECTRUM_DIM


def measure(spec: RunSpec, objective: Objective, run: Run) -> dict[str, Any]:
    """Return everything there is to say about a trained run, from held-out pairs.

    A value that does not exist is NaN, with its reason under `reasons`.
    """
    world = run.world
    metrics: dict[str, Any] = {
        "status": run.status,
        "status_reason": run.reason,
        "steps": run.steps,
        "pair_correlation": world.r if isinstance(world.r, float) else list(world.r),
        "stationary": world.stationarity.holds,
        "mixing_hash": world.mixing.fingerprint(),
        "loss": run.held_out_loss,
        "regulariser": run.curve[-1]["regulariser"] if run.curve else math.nan,
        "wall_s": run.wall_s,
        "peak_rss_mb": run.peak_rss_mb,
    }
    reasons: dict[str, str] = {}
    pairs = world.sample_pairs(spec.train.evaluation_samples, generator=stream(spec.seed, "measurement"))
    h, h_next = run.encode(pairs.x), run.encode(pairs.x_next)
    if not (torch.isfinite(h).all() and torch.isfinite(h_next).all()):
        keys = (*RECOVERY_KEYS, *BOUND_KEYS)
        return metrics | dict.fromkeys(keys, math.nan) | {"reasons": dict.fromkeys(keys, "the embedding is not finite")}
    for part, why in (
        _recovery(pairs, h),
        _bound(spec, world, run),
        _oracle(pairs, h),
        _published(spec, world, run),
        _spectrum(world, pairs, h),
        _predictions(spec, world, objective),
    ):
        metrics |= part
        reasons |= why
    if math.isnan(metrics["regulariser"]):
        reasons["regulariser"] = "the objective has none" if run.status != "diverged" else run.reason
    if math.isnan(metrics["loss"]):
        reasons["loss"] = run.reason
    return metrics | {"reasons": reasons}


Part = tuple[dict[str, Any], dict[str, str]]
"""Metrics, and the reasons for those that are NaN."""


def _resamples(dim: int) -> int:
    return RESAMPLES if dim <= RESAMPLED_DIM else max(FEWEST_RESAMPLES, RESAMPLES * RESAMPLED_DIM // dim)


def _recovery(pairs: Pairs, h: Tensor) -> Part:
    found = recovery(pairs.z, h, resamples=_resamples(h.shape[1]))
    metrics = {key: getattr(found, key) for key in RECOVERY_KEYS}
    metrics |= {f"{key}_ci": list(found.ci[key]) for key in RECOVERY_KEYS if key in found.ci}
    return metrics, {key: why for key, why in found.reasons.items() if key in RECOVERY_KEYS}


def _bound(spec: RunSpec, world: World, run: Run) -> Part:
    """Return the bound, from pairs of its own of which a batch is held at a time."""
    if not isinstance(world.r, float):
        why = "the latents have different correlations: the theorem needs one"
        return dict.fromkeys(BOUND_KEYS, math.nan), dict.fromkeys(BOUND_KEYS, why)
    samples = spec.train.bound_samples or spec.train.evaluation_samples
    resamples = _resamples(world.dim)
    limit = bound_of_batches(_embedded(spec, world, run, samples), rho=world.r, resamples=resamples)
    metrics: dict[str, Any] = {key: getattr(limit, key) for key in BOUND_KEYS}
    metrics |= {f"{key}_ci": list(limit.ci[key]) for key in BOUND_KEYS if key in limit.ci}
    metrics |= {"bound_pairs": limit.n, "chain": _chain(limit)}
    reasons = {key: why for key, why in limit.reasons.items() if key in BOUND_KEYS}
    if not world.source.is_gaussian:
        for key in OF_THEOREM:
            metrics[key] = math.nan
            metrics.pop(f"{key}_ci", None)
        del metrics["chain"]
        reasons |= dict.fromkeys(OF_THEOREM, f"the theorem needs a Gaussian world: the source is {world.source!r}")
    return metrics, reasons


def _embedded(spec: RunSpec, world: World, run: Run, samples: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield embeddings and latents of fresh pairs in as many batches as there are groups of the bootstrap."""
    generator = stream(spec.seed, "measurement", "bound")
    groups = group_count(samples, 4 * world.dim + 1)
    for group in range(groups):
        n = samples * (group + 1) // groups - samples * group // groups
        pairs = world.sample_pairs(n, generator=generator)
        yield run.encode(pairs.x), run.encode(pairs.x_next), pairs.z, pairs.z_next


def _chain(limit: Bound) -> dict[str, float]:
    """Return both sides of each step of the proof by name."""
    steps = limit.proof_steps()
    names = {
        "spectral_gap": ("nonlinear_energy_true", "nonlinear_energy"),
        "gram": ("gram_error", "gram_bound"),
        "polar": ("polar_error", "polar_bound"),
        "pythagoras": ("procrustes", "true_error"),
    }
    return {name: side for step, pair in names.items() for name, side in zip(pair, steps[step], strict=True)}


def _oracle(pairs: Pairs, h: Tensor) -> Part:
    oracle = linear_oracle(pairs.x, pairs.x_next, min(pairs.z.shape[1], h.shape[1]))
    r2 = recovery(pairs.z, oracle.transform(pairs.x), resamples=0).r2_hz
    return {"linear_oracle_r2_hz": r2, "linear_oracle_alignment": oracle.loss}, {}


def _published(spec: RunSpec, world: World, run: Run) -> Part:
    """Return the measures as the published code takes them, on states of the source."""
    z = world.source.sample(spec.train.evaluation_samples, generator=stream(spec.seed, "measurement", "published"))
    x = world.mixing(z)
    h = run.encode(x)
    metrics = {
        "published_r2_hz": in_sample_r2(h, z),
        "published_r2_zh": in_sample_r2(z, h),
        "published_r2_xz": in_sample_r2(x, z),
        "published_r2_zx": in_sample_r2(z, x),
        "published_orth_err": orthogonality_error(z, h),
    }
    if run.curve:
        last = run.curve[-1]
        regulariser = last["loss"] if spec.objective.name == "infonce" else last["regulariser"]
        metrics |= {
            "published_align": last["alignment"] / (4 * h.shape[1]),
            "published_regulariser": regulariser,
        }
    if world.dim == 2:
        z = grid()
        h = run.encode(world.mixing(z))
        metrics |= {
            "published_r2_hz_grid": in_sample_r2(h, z),
            "published_r2_zh_grid": in_sample_r2(z, h),
            "published_orth_err_grid": orthogonality_error(z, h),
        }
    return metrics, {name: "the embedding does not vary" for name, value in metrics.items() if math.isnan(value)}


def _spectrum(world: World, pairs: Pairs, h: Tensor) -> Part:
    if not _has_spectrum(world):
        return {}, {}
    found = hermite_spectrum(pairs.z, h, degree=SPECTRUM_DEGREE)
    low = {index: share for index, share in found.modes.items() if sum(index) <= CURVE_DEGREE}
    return {
        "hermite_energy": [*found.degrees, found.rest],
        "hermite_modes": {mode_name(index): share for index, share in low.items()},
        "hermite_modes_ci": {mode_name(index): list(found.modes_ci[index]) for index in low if index in found.modes_ci},
    }, {}


def _predictions(spec: RunSpec, world: World, objective: Objective) -> Part:
    """Return what the theory says beforehand."""
    metrics: dict[str, Any] = {}
    if isinstance(objective, LeJEPA) and isinstance(world.r, float):
        metrics["predicted_orth_err"] = abs(objective.predicted_scale(world.r, spec.train.batch) ** 2 - 1)
    if isinstance(world.transition, Langevin):
        metrics["predicted_r2_hz"] = world.transition.linear_recovery(world.source)
    return metrics, {}
