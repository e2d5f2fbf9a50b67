"""What a sweep will cost, from a few steps of one group of each kind."""

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.groups import MAX_MEMBERS, encoder_weights, kind_of, rounds, train_together
from orthoworld.experiments.sweep import Group

BUDGET_SECONDS = 8.0
"""Time spent on measuring; building the largest worlds comes on top."""

KIND_SECONDS = 1.0
"""Time spent on one kind of group, unless three of its steps take longer."""

STEPS = 3
"""Steps of a group at least; the first, in which things are compiled, does not count."""


@dataclass(frozen=True)
class Estimate:
    """The cost of training, extrapolated; evaluations on the way and measures at the end are left out.

    Attributes:
        compute_s: seconds of all groups, one after the other.
        wall_s: seconds with so many groups at a time.
        measured, kinds: kinds of groups of which steps were taken, and all; the others are taken to cost what the
            nearest of those costs, by their weights and batch.
    """

    compute_s: float
    wall_s: float
    measured: int
    kinds: int


def estimate(groups: Sequence[Group], workers: int, most: int = MAX_MEMBERS) -> Estimate:
    """Return what it costs to train groups, `workers` of them at a time.

    Args:
        groups: one or more.
        workers: groups at a time.
        most: members that are trained at once.

    Raises:
        ArgumentError: this machine does not have the device of a run.
    """
    kinds: dict[tuple[str, int], Group] = {}
    for group in groups:
        kinds.setdefault(_kind(group), group)
    work = {kind: _work(group) for kind, group in kinds.items()}
    begun = time.monotonic()
    measured: dict[tuple[str, int], float] = {}
    for kind in sorted(kinds, key=lambda kind: -work[kind]):
        left = BUDGET_SECONDS - (time.monotonic() - begun)
        if left <= 0 and measured:
            break
        share = min(KIND_SECONDS, left / (len(kinds) - len(measured)))
        measured[kind] = step_seconds(kinds[kind], share, most)
    nearest = {kind: min(measured, key=lambda other: abs(math.log(work[kind] / work[other]))) for kind in kinds}
    costs = [group[0].train.steps * rounds(group, most) * measured[nearest[_kind(group)]] for group in groups]
    return Estimate(sum(costs), _makespan(costs, workers), len(measured), len(kinds))


def step_seconds(group: Group, seconds: float, most: int) -> float:
    """Return the median time of a step that all runs of a group take together, from about so many seconds of steps."""
    marks: list[float] = []

    def stop() -> bool:
        marks.append(time.monotonic())
        return len(marks) >= STEPS and marks[-1] - marks[0] > seconds

    threads = torch.get_num_threads()
    torch.set_num_threads(group[0].train.threads)
    try:
        train_together([_endless(spec) for spec in group], stop=stop, most=most)
    finally:
        torch.set_num_threads(threads)
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(marks))
    return steps[len(steps) // 2]


def _endless(spec: RunSpec) -> RunSpec:
    """Return the run without an end, and without evaluations on the way to it."""
    data = spec.resolved()
    data["train"] |= {"steps": 10**9, "evaluate_every": 0, "whitener_samples": 100}
    return RunSpec.from_data(data)


def _kind(group: Group) -> tuple[str, int]:
    return kind_of(group[0]), len(group)


def _work(group: Group) -> float:
    spec = group[0]
    return float((1 + encoder_weights(spec)) * spec.train.batch * spec.world.dim * len(group))


def _makespan(costs: Sequence[float], workers: int) -> float:
    """Return when the last group ends if each begins as soon as a worker is free."""
    free = [0.0] * max(1, min(workers, len(costs)))
    for cost in costs:
        heapq.heappush(free, heapq.heappop(free) + cost)
    return max(free)
