"""Carry out one run: build, train, measure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orthoworld.devices import device_of
from orthoworld.experiments.build import build_encoder, build_objective, build_recipes, build_run_world
from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.measure import curve_metrics, measure
from orthoworld.objectives.objective import Objective
from orthoworld.streams import stream
from orthoworld.training.run import Run
from orthoworld.training.session import Checkpoint
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
    """Train every restart of a run, keep the one with the least loss, and measure it.

    Args:
        spec: the run.
        checkpoints: where each restart keeps its state.
        stop: asked after every step; the outcome is then that of an interrupted run, without metrics.
        on_step: told the number of steps done.

    Raises:
        ArgumentError: an option of the spec lies outside its range, or this machine does not have its device.
    """
    objective = build_objective(spec)
    return outcome_of(spec, objective, train_restarts(spec, objective, checkpoints, stop, on_step))


def train_restarts(
    spec: RunSpec,
    objective: Objective,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], bool] | None = None,
    on_step: OnStep | None = None,
) -> list[Run]:
    """Train one restart after the other, and end with the one that was interrupted, if one is."""
    runs: list[Run] = []
    for restart in range(spec.train.restarts):
        world = build_run_world(spec, restart)
        runs.append(train_restart(spec, world, objective, restart, checkpoints, stop, on_step))
        if runs[-1].status == "interrupted":
            break
    return runs


def outcome_of(spec: RunSpec, objective: Objective, runs: Sequence[Run]) -> Outcome:
    """Keep the best of the restarts of a run, and measure it; an interrupted run has no metrics."""
    if runs[-1].status == "interrupted":
        return Outcome(runs[-1], {})
    losses = [_loss(spec, objective, run) for run in runs]
    best = min(range(len(runs)), key=lambda restart: (runs[restart].status != "finished", losses[restart]))
    metrics = measure(spec, objective, runs[best])
    metrics["restart"] = best
    metrics["restart_losses"] = [run.held_out_loss for run in runs]
    metrics["restart_r2_hz"] = [run.curve[-1]["r2_hz"] if run.curve else math.nan for run in runs]
    return Outcome(runs[best], metrics)


def _loss(spec: RunSpec, objective: Objective, run: Run) -> float:
    """Return the loss by which restarts are compared; infinite where there is none."""
    loss = run.held_out_loss
    if spec.train.selection == "one-batch" and not math.isnan(loss):
        pairs = run.world.sample_pairs(spec.train.batch, generator=stream(spec.seed, "selection"))
        h = torch.stack([run.encode(pairs.x), run.encode(pairs.x_next)])
        loss = objective(h, generator=stream(spec.seed, "selection", "slices")).total.item()
    return math.inf if math.isnan(loss) else loss


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
    done = restart * spec.train.steps
    return train(
        world,
        build_encoder(spec, world, restart).to(device_of(spec.train.device)),
        objective,
        seed=spec.seed,
        restart=restart,
        checkpoint=None if checkpoints is None else checkpoints(restart),
        stop=stop,
        progress=None if on_step is None else lambda step, _: on_step(done + step),
        **training_options(spec),
    )


def training_options(spec: RunSpec) -> dict[str, Any]:
    """Return what `train` and `train_ensemble` take from a run alike."""
    optimizer, schedule = build_recipes(spec)
    return {
        "steps": spec.train.steps,
        "batch": spec.train.batch,
        "optimizer": optimizer,
        "schedule": schedule,
        "evaluate_every": spec.train.evaluate_every,
        "evaluation_samples": spec.train.evaluation_samples,
        "whitener_samples": spec.train.whitener_samples,
        "metrics": curve_metrics,
    }
