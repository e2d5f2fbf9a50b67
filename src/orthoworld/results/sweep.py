"""A sweep: all runs of an experiment, what of it is there, and what an executor has to do."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthoworld.errors import ArgumentError, OrthoworldError
from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.cost import Estimate, estimate
from orthoworld.experiments.groups import MAX_MEMBERS, groups_of
from orthoworld.experiments.slurm import SlurmSpec
from orthoworld.experiments.sweep import Event, Executor, Group, Local
from orthoworld.results.execute import execute_group, run_folder
from orthoworld.results.slurm import Slurm
from orthoworld.results.store import StoredRun


@dataclass(frozen=True)
class Sweep:
    """Runs in their folders.

    Attributes:
        specs: all runs.
        root: the folder of all runs.
        workers: groups that are carried out at a time; None for no limit, and groups as large as they may be.
        most: members of a group at most.
    """

    specs: Sequence[RunSpec]
    root: Path
    workers: int | None
    most: int = MAX_MEMBERS

    def missing(self) -> list[Group]:
        """Return the groups, without the runs that are finished."""
        done = {spec.run_id for spec in self.specs if run_folder(spec, self.root).finished}
        if len(done) == len(self.specs):
            return []
        groups = groups_of(self.specs, self.workers or 1, self.most)
        left = [[spec for spec in group if spec.run_id not in done] for group in groups]
        return [group for group in left if group]

    def carry_out(self, executor: Executor, stop: Callable[[], bool]) -> Iterator[Event]:
        """Yield how every run ends: those that are finished at once, the others as the executor has it."""
        groups = self.missing()
        open_runs = {spec.run_id for group in groups for spec in group}
        for spec in self.specs:
            if spec.run_id not in open_runs:
                yield _read(spec, self.root)
        if groups:
            yield from executor.carry_out(groups, stop)


def find(spec: RunSpec, root: Path) -> StoredRun | None:
    """Return a run that is finished.

    Raises:
        ResultError: it is damaged.
    """
    folder = run_folder(spec, root)
    return folder.read() if folder.finished else None


def executor_of(sweep: Sweep, options: SlurmSpec | None) -> Executor:
    """Return what carries out a sweep: processes here, or jobs of SLURM where there are options for it."""
    execute = functools.partial(execute_group, root=sweep.root, most=sweep.most)
    if options is None:
        return Local(sweep.workers or 1, execute)
    folder = sweep.root / sweep.specs[0].experiment / ".slurm"
    return Slurm(options, folder, execute, functools.partial(find, root=sweep.root), sweep.workers)


def plan_of(sweep: Sweep, executor: str) -> dict[str, Any]:
    """Return what is to be done and what it would cost, as JSON's types; times are null where there is no estimate."""
    groups = sweep.missing()
    missing = sum(len(group) for group in groups)
    plan: dict[str, Any] = {
        "experiment": sweep.specs[0].experiment,
        "runs": len(sweep.specs),
        "finished": len(sweep.specs) - missing,
        "missing": missing,
        "groups": len(groups),
        "together": sum(len(group) for group in groups if len(group) > 1),
        "executor": executor,
        "workers": sweep.workers,
        "estimate_reason": "",
    }
    cost = Estimate(0.0, 0.0, 0, 0)
    try:
        if groups:
            cost = estimate(groups, sweep.workers or len(groups), sweep.most)
    except ArgumentError as error:  # the runs are for a device of another machine
        return plan | dict.fromkeys(dataclasses.asdict(cost)) | {"estimate_reason": str(error)}
    return plan | dataclasses.asdict(cost)


def _read(spec: RunSpec, root: Path) -> Event:
    try:
        return Event(spec.run_id, "done", run_folder(spec, root).read())
    except OrthoworldError as error:
        return Event(spec.run_id, "failed", str(error))
