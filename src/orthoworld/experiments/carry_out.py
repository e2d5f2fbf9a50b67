"""Carry out one run: build, train, measure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from orthoworld.devices import device_of
from orthoworld.experiments.build import build_encoder, build_objective, build_recipes, build_world
from orthoworld.experiments.config import RunSpec
from orthoworld.identifiability.bound import bound
from orthoworld.identifiability.oracle import linear_oracle
from orthoworld.identifiability.recovery import recovery
from orthoworld.objectives.lejepa import LeJEPA
from orthoworld.objectives.objective import Objective
from orthoworld.streams import stream
from orthoworld.training.run import Run
from orthoworld.training.session import Checkpoint, HeldOut
from orthoworld.training.trainer import train
from orthoworld.worlds.world import World

Checkpoints = Callable[[int], Checkpoint]
"""Where each restart keeps its state."""

OnStep = Callable[[int], None]
"""Called after every step with the number of steps done, over all restarts."""


@dataclass(frozen=True)
class Outcome:
    """The run that is kept, and everything measured about it, as plain numbers, lists and strings."""

    run: Run
    metrics: dict[str, Any]


def carry_out(
    spec: RunSpec,
    *,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], bool] | None = None,
    on_step: OnStep | None = None,
) -> Outcome:
    """Train every restart of a run in the same world, keep the one with the least held-out loss, and measure it.

    Args:
        spec: the run.
        checkpoints: where each restart keeps its state.
        stop: asked after every step; the outcome is then that of an interrupted run, without metrics.
        on_step: told the number of steps done.

    Raises:
        ArgumentError: an option of the spec lies outside its range, or this machine does not have its device.
    """
    world = build_world(spec.world, spec.seed)
    objective = build_objective(spec)
    runs: list[Run] = []
    for restart in range(spec.train.restarts):
        run = train_restart(spec, world, objective, restart, checkpoints, stop, on_step)
        runs.append(run)
        if run.status == "interrupted":
            return Outcome(run, {})
    best = min(range(len(runs)), key=lambda index: _rank(runs[index]))
    metrics = _measure(spec, world, objective, runs[best])
    metrics["restart"] = best
    metrics["restart_losses"] = [run.held_out_loss for run in runs]
    return Outcome(runs[best], metrics)


def _rank(run: Run) -> tuple[bool, float]:
    """Order runs by how well they ended: one that finished before one that collapsed or diverged, then by loss."""
    return run.status != "finished", math.inf if math.isnan(run.held_out_loss) else run.held_out_loss


def train_restart(
    spec: RunSpec,
    world: World,
    objective: Objective,
    restart: int = 0,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], bool] | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train one restart of a run in its world; the other arguments are those of `carry_out`."""
    optimizer, schedule = build_recipes(spec)
    done = restart * spec.train.steps
    return train(
        world,
        build_encoder(spec, world, restart).to(device_of(spec.train.device)),
        objective,
        steps=spec.train.steps,
        batch=spec.train.batch,
        seed=spec.seed,
        optimizer=optimizer,
        schedule=schedule,
        evaluate_every=spec.train.evaluate_every,
        evaluation_samples=spec.train.evaluation_samples,
        whitener_samples=spec.train.whitener_samples,
        restart=restart,
        metrics=curve_metrics,
        checkpoint=None if checkpoints is None else checkpoints(restart),
        stop=stop,
        progress=None if on_step is None else lambda step, _: on_step(done + step),
    )


def curve_metrics(held_out: HeldOut) -> dict[str, float]:
    """Return the columns of a learning curve: recovery both ways, orthogonality, bound and exact error."""
    found = recovery(held_out.pairs.z, held_out.h, resamples=0)
    row = {"r2_hz": found.r2_hz, "r2_zh": found.r2_zh, "orth_err": found.orth_err}
    r = held_out.pairs.r
    if isinstance(r, float):
        z, z_next = held_out.pairs.z, held_out.pairs.z_next
        limit = bound(held_out.h, held_out.h_next, rho=r, z=z, z_next=z_next, resamples=0)
        row |= {key: getattr(limit, key) for key in ("bound", "bound_controlled", "true_error")}
        if not held_out.world.source.is_gaussian:
            row |= {"bound": math.nan, "bound_controlled": math.nan}
    return row


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
    "bound_controlled",
    "true_error",
    "linear_error",
    "nonlinear_energy_true",
)
OF_THEOREM = ("nonlinear_energy", "bound", "bound_debiased", "bound_controlled")
"""What means something in a Gaussian world only."""


def _measure(spec: RunSpec, world: World, objective: Objective, run: Run) -> dict[str, Any]:
    """Return everything there is to say about a trained run, from held-out pairs."""
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
        why = "the embedding is not finite"
        metrics |= dict.fromkeys((*RECOVERY_KEYS, *BOUND_KEYS), math.nan)
        return metrics | {"reasons": dict.fromkeys((*RECOVERY_KEYS, *BOUND_KEYS), why)}
    found = recovery(pairs.z, h)
    metrics |= {key: getattr(found, key) for key in RECOVERY_KEYS}
    metrics |= {f"{key}_ci": list(found.ci[key]) for key in RECOVERY_KEYS if key in found.ci}
    reasons |= {key: why for key, why in found.reasons.items() if key in RECOVERY_KEYS}
    if isinstance(world.r, float):
        limit = bound(h, h_next, rho=world.r, z=pairs.z, z_next=pairs.z_next)
        metrics |= {key: getattr(limit, key) for key in BOUND_KEYS}
        metrics |= {f"{key}_ci": list(limit.ci[key]) for key in BOUND_KEYS if key in limit.ci}
        reasons |= {key: why for key, why in limit.reasons.items() if key in BOUND_KEYS}
        if not world.source.is_gaussian:
            metrics |= dict.fromkeys(OF_THEOREM, math.nan)
            for key in OF_THEOREM:
                metrics.pop(f"{key}_ci", None)
            reasons |= dict.fromkeys(OF_THEOREM, f"the theorem needs a Gaussian world: the source is {world.source!r}")
    else:
        metrics |= dict.fromkeys(BOUND_KEYS, math.nan)
        reasons |= dict.fromkeys(BOUND_KEYS, "the latents have different correlations: the theorem needs one")
    oracle = linear_oracle(pairs.x, pairs.x_next, min(world.dim, h.shape[1]))
    metrics |= {
        "linear_oracle_r2_hz": recovery(pairs.z, oracle.transform(pairs.x), resamples=0).r2_hz,
        "linear_oracle_alignment": oracle.loss,
    }
    if isinstance(objective, LeJEPA) and isinstance(world.r, float):
        metrics["predicted_orth_err"] = abs(objective.predicted_scale(world.r, spec.train.batch) ** 2 - 1)
    if math.isnan(metrics["regulariser"]):
        reasons["regulariser"] = "the objective has none" if run.status != "diverged" else run.reason
    if math.isnan(metrics["loss"]):
        reasons["loss"] = run.reason
    return metrics | {"reasons": reasons}
