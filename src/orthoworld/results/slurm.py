"""Carry out groups of runs as jobs of SLURM, one job a group, and watch them.

`runs/<experiment>/.slurm/` holds what submitit writes, `jobs.json` with the job of each run, and for each job that has
begun a file of how far its runs are. Whoever calls next finds there what is still in the queue and does not submit it
again.
"""

import contextlib
import getpass
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from orthoworld.errors import ArgumentError, OrthoworldError
from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.slurm import SlurmSpec
from orthoworld.experiments.sweep import Event, Execute, Group, run_all
from orthoworld.extras import require
from orthoworld.results.store import locked, strict_json, write_atomically

POLL_SECONDS = 5.0
"""Time between two looks at the queue."""

NOTE_SECONDS = 2.0
"""Time between two notes of a job about the steps of its runs."""

GONE_AFTER = 3
"""Looks in a row at which a job has ended and its run is not there, before the run counts as failed: a job that goes
back into the queue may look ended for a moment, and files may arrive late over a network."""

ARRAY = 1000
"""Jobs submitted at a time; SLURM takes 1001 by default."""

LINGER_SECONDS = 900.0
"""A job that was told to end keeps its state and waits to be ended: what ends by itself SLURM does not put back."""

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
"""States of a job after which nothing comes, unless it is put back into the queue."""

RECORD = "jobs.json"


def slurm_is_here() -> ModuleType:
    """Return submitit.

    Raises:
        ArgumentError: this machine has no `sbatch`.
        MissingExtraError: submitit is not installed.
    """
    for program in ("sbatch", "srun", "squeue"):
        if shutil.which(program) is None:
            raise ArgumentError(f"--executor slurm: expected {program} on the PATH, as on a login node of a cluster")
    return require("submitit", "slurm")


@dataclass
class Slurm:
    """Carries out groups as jobs; a group whose runs are in the queue already is watched only.

    Attributes:
        options: what the jobs ask for.
        folder: where the record of jobs, their notes and logs are kept; every node has to see it.
        execute: carries out one group, on a node.
        find: returns the result of a run, or None when it is not finished.
        at_a_time: jobs that run at a time, at most.
    """

    options: SlurmSpec
    folder: Path
    execute: Execute
    find: Callable[[RunSpec], Any]
    at_a_time: int | None = None
    jobs: dict[str, str] = field(default_factory=dict, init=False)
    """The job of each run that has not ended."""

    def carry_out(self, groups: Sequence[Group], stop: Callable[[], bool]) -> Iterator[Event]:
        """Submit what is not in the queue, and yield what happens until every run has ended or `stop` answers True.

        Raises:
            ArgumentError: SLURM refuses the jobs, or is not here.
            OrthoworldError: the queue cannot be read.
        """
        submitit = slurm_is_here()
        self.jobs = self._submit(submitit, groups, stop)
        open_runs = {spec.run_id: spec for group in groups for spec in group if spec.run_id in self.jobs}
        states: dict[str, str] = {}
        gone: Counter[str] = Counter()
        while open_runs and not stop():
            states = read_queue() or states  # a queue that does not answer is asked again
            notes = {job: _read(self.folder / f"{job}.json") for job in {self.jobs[run] for run in open_runs}}
            for run_id, spec in list(open_runs.items()):
                job = self.jobs[run_id]
                event = self._look(spec, job, states.get(job, "unknown"), notes[job], gone)
                if event.ends:
                    del open_runs[run_id], self.jobs[run_id]
                yield event
            if open_runs:
                _pause(stop)

    def farewell(self) -> str:
        """Return what becomes of the jobs when nobody watches them."""
        if not self.jobs:
            return "nothing is left in the queue"
        arrays = sorted({job.partition("_")[0] for job in self.jobs.values()})
        return f"jobs go on in the queue: the same command watches them again, scancel {' '.join(arrays)} cancels them"

    def _look(self, spec: RunSpec, job: str, state: str, notes: dict[str, Any], gone: Counter[str]) -> Event:
        """Return what is known about a run."""
        run_id = spec.run_id
        kind, value = notes.get(run_id, ("state", None))
        try:
            result = self.find(spec)
        except OrthoworldError as error:
            return Event(run_id, "failed", str(error))
        if result is not None:
            return Event(run_id, "done", result)
        if kind == "failed":
            return Event(run_id, "failed", value)
        gone[run_id] = gone[run_id] + 1 if state in ENDED or state == "unknown" else 0
        if gone[run_id] >= GONE_AFTER:
            why = "is not known to SLURM any more" if state == "unknown" else f"has ended as {state}"
            return Event(run_id, "failed", f"job {job} {why}; what it printed is in {self.folder}/{job}_0_log.err")
        return Event(run_id, "step", value) if kind == "step" else Event(run_id, "state", state.lower())

    def _submit(self, submitit: ModuleType, groups: Sequence[Group], stop: Callable[[], bool]) -> dict[str, str]:
        """Submit the runs that are in no job that waits or runs, and return the job of every run."""
        with locked(self.folder / ".lock", stop) as ours:
            if not ours:
                return {}
            record = _read(self.folder / RECORD)
            states = read_queue()
            if states is None:
                raise OrthoworldError("squeue does not answer: what is in the queue already cannot be known")
            wanted = {spec.run_id for group in groups for spec in group}
            jobs = {
                run: job for run, job in record.items() if run in wanted and states.get(job, "COMPLETED") not in ENDED
            }
            left = [[spec for spec in group if spec.run_id not in jobs] for group in groups]
            left = [group for group in left if group]
            for begin in range(0, len(left), ARRAY):
                part = left[begin : begin + ARRAY]
                for group, job in zip(part, self._sbatch(submitit, part), strict=True):
                    jobs |= {spec.run_id: job for spec in group}
                write_atomically(self.folder / RECORD, strict_json(record | jobs).encode())
            return jobs

    def _sbatch(self, submitit: ModuleType, groups: Sequence[Group]) -> list[str]:
        """Submit an array of jobs, one a group, and return their ids."""
        executor = submitit.SlurmExecutor(folder=self.folder, max_num_timeout=self.options.timeouts)
        threads = max(spec.train.threads for group in groups for spec in group)
        parameters = {
            "job_name": f"orthoworld-{groups[0][0].experiment}",
            "time": self.options.minutes,
            "signal_delay_s": self.options.grace,
            "cpus_per_task": self.options.cpus or threads,
            "gpus_per_node": self.options.gpus,
            "array_parallelism": self.at_a_time or len(groups),
            "additional_parameters": {"requeue": True, **self.options.extra},
            **self.options.model_dump(
                include={"partition", "account", "qos", "constraint", "nodelist", "exclude", "mem"}
            ),
        }
        executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
        try:
            # submitit would print what sbatch says, which is in the error too.
            with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                jobs = [executor.submit(Job(list(group), self.folder, self.execute)) for group in groups]
        except submitit.core.utils.FailedJobError as error:
            raise ArgumentError(f"sbatch refused the jobs: {_reason(str(error))}") from None
        return [str(job.job_id) for job in jobs]


def _reason(error: str) -> str:
    """Return what sbatch said, out of what submitit says."""
    said = [line.strip() for line in error.splitlines() if line.strip().startswith("sbatch:")]
    return "; ".join(said) or error


def _pause(stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + POLL_SECONDS
    while time.monotonic() < deadline and not stop():
        time.sleep(min(0.2, POLL_SECONDS))


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping that a file of JSON holds; an empty one when it is not there."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return data


def read_queue() -> dict[str, str] | None:
    """Return the state of each job of this user that SLURM knows, by id; None when it does not answer."""
    command = ["squeue", "--user", getpass.getuser(), "--states=all", "--array", "--noheader", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines() if line.strip())


@dataclass
class Job:
    """What a job does on its node; submitit calls it, and `checkpoint` when the job is to make room."""

    group: list[RunSpec]
    folder: Path
    execute: Execute

    def __call__(self) -> None:
        """Carry out the group and note how far it is."""
        job = require("submitit", "slurm").JobEnvironment().job_id
        notes: dict[str, tuple[str, Any]] = {}
        noted = 0.0
        for event in run_all([self.group], self.execute, workers=1, stop=lambda: False):
            notes[event.run_id] = (event.kind, None if event.kind == "done" else event.value)
            if event.ends or time.monotonic() - noted > NOTE_SECONDS:
                noted = time.monotonic()
                write_atomically(self.folder / f"{job}.json", strict_json(notes).encode())
        if any(kind == "stopped" for kind, _ in notes.values()):
            time.sleep(LINGER_SECONDS)

    def checkpoint(self) -> Any:
        """Let the runs keep their state, and return what to do when the job is back."""
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
            process.join(timeout=60)
        return require("submitit", "slurm").helpers.DelayedSubmission(self)
