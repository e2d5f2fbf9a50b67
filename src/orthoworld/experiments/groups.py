"""Which runs of a sweep are trained as one program, and training them so.

A step of a small encoder costs more in the interpreter and in torch than in arithmetic; runs that share an encoder's
shape, a number of latents, a training and an objective share that cost. Restarts of a run are such runs too.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orthoworld.devices import device_of
from orthoworld.experiments.build import build_encoder, build_objective, build_run_world
from orthoworld.experiments.carry_out import Checkpoints, Outcome, outcome_of, train_restarts, training_options
from orthoworld.experiments.config import RunSpec
from orthoworld.objectives.objective import Objective
from orthoworld.training.ensemble import Member, train_ensemble
from orthoworld.training.run import CurveRow, Run

SHARED_PRODUCTS = 10_000_000
"""Weights of the encoder times pairs of a batch, up to which runs are trained together.

Measured on one thread of a CPU, eight runs together against one by one: a perceptron of 4 x 64 gains 1.6 at a batch of
256 and nothing at 1024, one of 4 x 128 gains 1.3 at 256, one of 4 x 256 loses 1.2; couplings gain 2 to 4 with 2 latents
and 1.1 with 128."""

MAX_MEMBERS = 32
"""Runs and restarts trained as one program at most: more share hardly more."""


def groups_of(specs: Sequence[RunSpec], workers: int, most: int = MAX_MEMBERS) -> list[list[RunSpec]]:
    """Return all runs in groups: those that may and should be trained as one together, every other one alone.

    The groups depend on the arguments only, so a sweep that is begun again with the same ones has the same groups,
    whatever is finished by then: its results are then those of a sweep that was not interrupted, bit by bit.

    Args:
        specs: all runs of the sweep, finished ones too.
        workers: groups that are carried out at a time; none gets more than its share of the runs.
        most: members of a group at most, counting each restart; a run is never divided.
    """
    kinds: dict[str, list[RunSpec]] = {}
    for spec in specs:
        kinds.setdefault(kind_of(spec), []).append(spec)
    share = math.ceil(sum(spec.train.restarts for spec in specs) / workers)
    groups: list[list[RunSpec]] = []
    for alike in kinds.values():
        per_group = min(most, share) // alike[0].train.restarts
        if per_group < 2 or len(alike) < 2 or not pays(alike[0]):
            groups += [[spec] for spec in alike]
        else:
            groups += _evenly(alike, math.ceil(len(alike) / per_group))
    order = {spec.run_id: index for index, spec in enumerate(specs)}
    return sorted(groups, key=lambda group: order[group[0].run_id])


def _evenly(specs: list[RunSpec], parts: int) -> list[list[RunSpec]]:
    """Return the runs in so many parts, whose sizes differ by one at most."""
    bounds = [len(specs) * part // parts for part in range(parts + 1)]
    return [specs[first:last] for first, last in itertools.pairwise(bounds)]


def kind_of(spec: RunSpec) -> str:
    """Return what runs must share to be trained as one."""
    coefficients = getattr(type(spec.objective).target, "coefficients", None) or ()
    data = spec.resolved()
    objective = {key: value for key, value in data["objective"].items() if key not in coefficients}
    return json.dumps([spec.world.dim, spec.out_dim, data["encoder"], objective, data["train"]], sort_keys=True)


def rounds(group: Sequence[RunSpec], most: int = MAX_MEMBERS) -> int:
    """Return how many trainings of a group follow one another."""
    restarts = group[0].train.restarts
    return restarts if _alone(group, most) else math.ceil(len(group) * restarts / most)


def _alone(group: Sequence[RunSpec], most: int) -> bool:
    """Return whether a run is trained by itself, one restart after the other."""
    return len(group) == 1 and (min(group[0].train.restarts, most) == 1 or not pays(group[0]))


def pays(spec: RunSpec) -> bool:
    """Return whether a step of the run costs so little that it should be shared."""
    return encoder_weights(spec) * spec.train.batch <= SHARED_PRODUCTS


def encoder_weights(spec: RunSpec) -> int:
    """Return the number of weights of a run's encoder."""
    encoder = build_encoder(spec, build_run_world(spec))
    return sum(parameter.numel() for parameter in encoder.parameters())


@dataclass(frozen=True)
class Trained:
    """The restarts of a run, in order; of one that was interrupted the last is, and further ones may be missing."""

    spec: RunSpec
    objective: Objective
    runs: list[Run]

    @property
    def interrupted(self) -> bool:
        """Whether there is more to train."""
        return len(self.runs) < self.spec.train.restarts or self.runs[-1].status == "interrupted"

    def outcome(self) -> Outcome:
        """Measure the restart that is kept."""
        return outcome_of(self.spec, self.objective, self.runs)


def train_together(
    specs: Sequence[RunSpec],
    *,
    checkpoints: Callable[[RunSpec], Checkpoints] | None = None,
    stop: Callable[[], bool] | None = None,
    on_step: Callable[[RunSpec, int], None] | None = None,
    most: int = MAX_MEMBERS,
) -> list[Trained]:
    """Train every restart of every run of a group.

    A single run whose encoder is large, or which has one restart, is trained as `carry_out` trains it.

    Args:
        specs: runs that were put together by `groups_of`.
        checkpoints: where each restart of each run keeps its state.
        stop: asked after every step.
        on_step: told a run and the number of its steps done, over all restarts.
        most: members that are trained at once.

    Raises:
        ArgumentError: an option lies outside its range, or this machine does not have the device.
    """
    objectives = [build_objective(spec) for spec in specs]
    first = specs[0]
    if _alone(specs, most):
        kept = None if checkpoints is None else checkpoints(first)
        told = None if on_step is None else functools.partial(on_step, first)
        return [Trained(first, objectives[0], train_restarts(first, objectives[0], kept, stop, told))]
    owners: list[int] = []
    members: list[Member] = []
    for index, (spec, objective) in enumerate(zip(specs, objectives, strict=True)):
        own = _members(spec, objective, None if checkpoints is None else checkpoints(spec))
        members += own
        owners += [index] * len(own)
    done, totals = [0] * len(members), [0] * len(specs)

    def progress(begin: int, index: int, step: int, _: CurveRow | None) -> None:
        member, owner = begin + index, owners[begin + index]
        totals[owner] += step - done[member]
        done[member] = step
        if on_step is not None:
            on_step(specs[owner], totals[owner])

    runs: list[Run] = []
    for begin in range(0, len(members), most):
        told = functools.partial(progress, begin)
        runs += train_ensemble(members[begin : begin + most], stop=stop, progress=told, **training_options(first))
        if any(run.status == "interrupted" for run in runs):
            break
    return [
        Trained(spec, objective, [run for run, owner in zip(runs, owners, strict=False) if owner == index])
        for index, (spec, objective) in enumerate(zip(specs, objectives, strict=True))
    ]


def _members(spec: RunSpec, objective: Objective, checkpoints: Checkpoints | None) -> list[Member]:
    """Return the restarts of a run."""
    device = device_of(spec.train.device)
    members = []
    for restart in range(spec.train.restarts):
        world = build_run_world(spec, restart)
        encoder = build_encoder(spec, world, restart).to(device)
        kept = None if checkpoints is None else checkpoints(restart)
        members.append(Member(world, encoder, objective, spec.seed, restart, kept))
    return members
