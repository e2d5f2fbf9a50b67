"""Carry out one run into its folder, unless it is already there."""

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import orthoworld
from orthoworld.devices import device_name
from orthoworld.experiments.carry_out import carry_out
from orthoworld.experiments.config import RunSpec
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
    folder = RunFolder(root / spec.experiment / spec.run_id)
    with folder.lock(stop if stop is not None else lambda: False) as ours:
        if not ours:
            return None
        if not folder.finished:
            torch.set_num_threads(spec.train.threads)
            outcome = carry_out(spec, checkpoints=folder.checkpoint, stop=stop, on_step=on_step)
            if outcome.run.status == "interrupted":
                return None
            folder.write(
                spec, outcome.metrics, outcome.run.curve, outcome.run.representation, provenance(spec.train.device)
            )
        return folder.read()


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
