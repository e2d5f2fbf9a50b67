"""Carry out runs into their folders, unless they are already there."""

import contextlib
import functools
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import orthoworld
from orthoworld.devices import device_name
from orthoworld.experiments.carry_out import Outcome, carry_out
from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.groups import MAX_MEMBERS, Trained, train_together
from orthoworld.experiments.sweep import Event, Group, Tell, failure
from orthoworld.results.store import RunFolder, StoredRun


def execute(
    spec: RunSpec, root: Path, *, stop: Callable[[], bool] | None = None, on_step: Callable[[int], None] | None = None
) -> StoredRun | None:
    """Return the finished run: read from its folder if it is there, else carried out, or resumed, and written.

    A process that runs this sets the number of torch's threads to that of the spec, since sums over another number of
    threads round differently and the same spec must give the same weights.

    Args:
        spec: the run.
        root: the folder of all runs; this one goes to `root/<experiment>/<run id>`.
        stop: asked after every step; when it answers True the state is kept for a later call.
        on_step: told the number of steps done.

    Returns:
        The run, or None when it was stopped.

    Raises:
        ArgumentError: an option of the spec lies outside its range, or this machine does not have its device.
        ResultError: the folder holds a damaged checkpoint or result.
    """
    folder = run_folder(spec, root)
    with folder.lock(stop if stop is not None else lambda: False) as ours:
        if not ours:
            return None
        if not folder.finished:
            torch.set_num_threads(spec.train.threads)
            outcome = carry_out(spec, checkpoints=folder.checkpoint, stop=stop, on_step=on_step)
            if outcome.run.status == "interrupted":
                return None
            _write(spec, folder, outcome)
        return folder.read()


def execute_group(group: Group, root: Path, *, stop: Callable[[], bool], tell: Tell, most: int = MAX_MEMBERS) -> None:
    """Carry out a group of runs as one program, each into its folder; what is there already is read.

    Args:
        group: runs that were put together by `groups_of`.
        root: the folder of all runs.
        stop: asked after every step; when it answers True all states are kept for a later call.
        tell: told the steps of every run, and how it ended. What goes wrong after training is the failure of one run.
        most: members that are trained at once.

    Raises:
        Exception: of what goes wrong before, which can be any run's fault.
    """
    with contextlib.ExitStack() as locks:
        # In one order everywhere: two groups that share runs never wait for each other.
        for spec in sorted(group, key=lambda spec: spec.run_id):
            if not locks.enter_context(run_folder(spec, root).lock(stop)):
                _stopped(group, tell)
                return
        missing = []
        for spec in group:
            folder = run_folder(spec, root)
            if folder.finished:  # by somebody else, since the sweep began
                _finish(spec, folder.read, tell)
            else:
                missing.append(spec)
        if not missing:
            return
        torch.set_num_threads(missing[0].train.threads)
        trained = train_together(
            missing,
            checkpoints=lambda spec: run_folder(spec, root).checkpoint,
            stop=stop,
            on_step=lambda spec, done: tell(Event(spec.run_id, "step", done)),
            most=most,
        )
        _stopped([run.spec for run in trained if run.interrupted], tell)
        for run in trained:
            if not run.interrupted:
                _finish(run.spec, functools.partial(_keep, run, root), tell)


def _stopped(specs: Sequence[RunSpec], tell: Tell) -> None:
    for spec in specs:
        tell(Event(spec.run_id, "stopped"))


def _finish(spec: RunSpec, result: Callable[[], StoredRun], tell: Tell) -> None:
    """Tell the result of a run, or why there is none."""
    try:
        event = Event(spec.run_id, "done", result())
    except Exception as error:
        event = Event(spec.run_id, "failed", failure(error))
    tell(event)


def _keep(run: Trained, root: Path) -> StoredRun:
    """Measure a trained run, write it, and return what was written."""
    folder = run_folder(run.spec, root)
    _write(run.spec, folder, run.outcome())
    return folder.read()


def _write(spec: RunSpec, folder: RunFolder, outcome: Outcome) -> None:
    folder.write(spec, outcome.metrics, outcome.run.curve, outcome.run.representation, provenance(spec.train.device))


def run_folder(spec: RunSpec, root: Path) -> RunFolder:
    """Return the folder of a run below the folder of all runs."""
    return RunFolder(root / spec.experiment / spec.run_id)


def provenance(device: str) -> dict[str, Any]:
    """Return what a run was made with: versions, commit, machine, and the device it was trained on."""
    return {
        "orthoworld": orthoworld.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "device": device_name(device),
    }


def _commit() -> str | None:
    """Return the commit of the checkout the package is run from, with `+` after it if files differ; None elsewhere."""
    file = Path(orthoworld.__file__).resolve()
    try:
        # A package installed inside somebody's checkout is not part of it.
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        return _git(file.parent, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
