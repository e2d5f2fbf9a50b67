"""Many runs on one machine: groups of them in processes of their own, a few at a time.

A group that fails as a whole, because one of its runs cannot be resumed, say, or its process died, is split in two and
each half tried again, until the run that is to blame is alone.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, runtime_checkable

from orthoworld.experiments.config import RunSpec

REPORT_SECONDS = 0.2
"""Time between two messages about the steps of a run."""

Group = Sequence[RunSpec]
"""Runs that are carried out together, in one process."""


@dataclass(frozen=True)
class Event:
    """What happened to a run: `kind` is `state`, `step`, `done`, `failed` or `stopped`; the last three end it.

    `value` is a word for the state, the number of steps done, the result, the description of the failure, or None.
    """

    run_id: str
    kind: str
    value: Any = None

    @property
    def ends(self) -> bool:
        """Whether nothing more happens to the run."""
        return self.kind in ("done", "failed", "stopped")


Tell = Callable[[Event], None]


@runtime_checkable
class Execute(Protocol):
    """Carries out a group of runs; a function that can be pickled."""

    def __call__(self, group: Group, *, stop: Callable[[], bool], tell: Tell) -> None:
        """Tell an event that ends it for each run; an exception is a failure of all that have none yet."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Where groups of runs are carried out."""

    def carry_out(self, groups: Sequence[Group], stop: Callable[[], bool]) -> Iterator[Event]:
        """Carry out the groups and yield what happens, until every run has ended or `stop` answers True."""
        ...

    def farewell(self) -> str:
        """Return what becomes of the runs when the sweep is left before its end."""
        ...


class StopFlag:
    """Asked whether to stop; answers True after a signal, or when the process that started us is gone."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    """Ctrl-C; the end; and what a cluster sends before it takes a machine back."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self) -> bool:
        parent = multiprocessing.parent_process()
        return self.set or (parent is not None and not parent.is_alive())

    def _on_signal(self, *_: Any) -> None:
        self.set = True

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopFlag"]:
        """Set the flag on a signal within the block, instead of an exception at any place."""
        before = [signal.signal(number, self._on_signal) for number in self.SIGNALS]
        try:
            yield self
        finally:
            for number, handler in zip(self.SIGNALS, before, strict=True):
                signal.signal(number, handler)


@dataclass(frozen=True)
class Local:
    """Carries out groups in processes of this machine, `workers` at a time."""

    workers: int
    execute: Execute

    def carry_out(self, groups: Sequence[Group], stop: Callable[[], bool]) -> Iterator[Event]:
        """Carry out the groups; see `run_all`."""
        return run_all(groups, self.execute, workers=self.workers, stop=stop)

    def farewell(self) -> str:
        """Return what becomes of the runs when the sweep is left before its end."""
        return "the same command goes on from here"


def default_workers(specs: Sequence[RunSpec]) -> int:
    """Return how many groups to carry out at once: as many as have a processor for each of their threads."""
    threads = max(spec.train.threads for spec in specs)
    return max(1, min(len(specs), (os.cpu_count() or 1) // threads))


@dataclass
class _Task:
    """A group in its process: the runs that have not ended, and what went wrong with all of them."""

    process: BaseProcess
    open: dict[str, RunSpec]
    reason: str = field(default="")


def run_all(groups: Sequence[Group], execute: Execute, *, workers: int, stop: Callable[[], bool]) -> Iterator[Event]:
    """Carry out groups of runs, `workers` at a time, and yield what happens; a run that fails does not stop the others.

    Args:
        groups: the runs, those together that are carried out together.
        execute: carries out one group, in a process of its own.
        workers: groups at a time.
        stop: asked several times a second; when it answers True, running ones are stopped and no others are started.

    Yields:
        Events in the order in which they arrive.
    """
    context = multiprocessing.get_context("forkserver")
    # torch and, where it is installed, numba are then loaded once for all runs.
    context.set_forkserver_preload(["orthoworld.experiments.groups", "orthoworld.objectives.kernels.cpu"])
    waiting = [list(group) for group in groups][::-1]
    running: dict[Connection, _Task] = {}
    stopping = False
    try:
        while waiting or running:
            if stopping := stopping or stop():
                waiting.clear()
                for task in running.values():
                    _interrupt(task.process)  # again at each turn: a process that is starting does not listen yet
            while waiting and len(running) < workers:
                group = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(theirs, group, execute), daemon=False)
                process.start()
                theirs.close()
                running[ours] = _Task(process, {spec.run_id: spec for spec in group})
            for connection in wait(list(running), timeout=REPORT_SECONDS):
                assert isinstance(connection, Connection)
                task = running[connection]
                told = _receive(connection)
                if isinstance(told, Event):
                    if told.ends:
                        del task.open[told.run_id]
                    yield told
                elif told is not None:
                    task.reason = told
                else:
                    connection.close()
                    del running[connection]
                    yield from _ended(task, waiting, stopping)
    finally:
        for connection, task in running.items():
            _interrupt(task.process)
            connection.close()


def _ended(task: _Task, waiting: list[list[RunSpec]], stopping: bool) -> Iterator[Event]:
    """Yield what a process that is over means for its runs that have not ended, or put them back in halves."""
    task.process.join()
    left = list(task.open.values())
    if stopping:  # also one that was interrupted before it could listen
        yield from (Event(run_id, "stopped") for run_id in task.open)
    elif len(left) == 1:
        reason = task.reason or f"its process ended with exit code {task.process.exitcode}"
        yield Event(left[0].run_id, "failed", reason)
    elif left:
        middle = len(left) // 2
        waiting += [left[middle:], left[:middle]]


def _interrupt(process: BaseProcess) -> None:
    if process.is_alive() and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)


def _receive(connection: Connection) -> Event | str | None:
    """Return the next event, the reason for which the whole group failed, or None when the process is over."""
    try:
        told: Event | str = connection.recv()
    except (EOFError, OSError):  # maybe it died in the middle of a message
        return None
    return told


def _child(connection: Connection, group: Group, execute: Execute) -> None:
    """Carry out a group and report on it."""
    last: dict[str, float] = {}

    def tell(event: Event) -> None:
        now = time.monotonic()
        if event.kind != "step" or now - last.get(event.run_id, 0.0) > REPORT_SECONDS:
            last[event.run_id] = now
            send(event)

    def send(message: Event | str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the runs go on to a place to stop at
            connection.send(message)

    with StopFlag().installed() as stop:
        try:
            execute(group, stop=stop, tell=tell)
        except Exception as error:
            send(failure(error))
        finally:
            connection.close()


def failure(error: Exception) -> str:
    """Return the description of a failure: the error in the first line, and where it happened below."""
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
