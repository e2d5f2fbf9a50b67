"""Many runs on one machine: each in a process of its own, a few at a time."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, runtime_checkable

from orthoworld.experiments.config import RunSpec

REPORT_SECONDS = 0.2
"""Time between two messages about steps."""


@runtime_checkable
class Execute(Protocol):
    """Carries out one run; a function that can be pickled."""

    def __call__(self, spec: RunSpec, *, stop: Callable[[], bool], on_step: Callable[[int], None]) -> Any:
        """Return the run's result, or None when it was stopped."""
        ...


@dataclass(frozen=True)
class Event:
    """What happened to run number `index`: `kind` is `step`, `done`, `failed` or `stopped`.

    `value` is the number of steps done, the result, the description of the failure, or None.
    """

    index: int
    kind: str
    value: Any


class StopFlag:
    """Asked whether to stop; answers True after SIGINT or SIGTERM, or when the process that started us is gone."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self) -> bool:
        parent = multiprocessing.parent_process()
        return self.set or (parent is not None and not parent.is_alive())

    def _on_signal(self, *_: Any) -> None:
        self.set = True

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopFlag"]:
        """Set the flag on SIGINT and SIGTERM within the block, instead of an exception at any place."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def default_workers(specs: Sequence[RunSpec]) -> int:
    """Return how many runs to carry out at once: as many as have a processor for each of their threads."""
    threads = max(spec.train.threads for spec in specs)
    return max(1, min(len(specs), (os.cpu_count() or 1) // threads))


def run_all(specs: Sequence[RunSpec], execute: Execute, *, workers: int, stop: Callable[[], bool]) -> Iterator[Event]:
    """Carry out runs, `workers` at a time, and yield what happens; one that fails does not stop the others.

    Args:
        specs: the runs.
        execute: carries out one run, in a process of its own.
        workers: runs at a time.
        stop: asked several times a second; when it answers True, running ones are stopped and no others are started.

    Yields:
        Events in the order in which they arrive.
    """
    context = multiprocessing.get_context("forkserver")
    # torch and, where it is installed, numba are then loaded once for all runs.
    context.set_forkserver_preload(["orthoworld.experiments.carry_out", "orthoworld.objectives.kernels.cpu"])
    waiting = list(enumerate(specs))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    stopping = False
    try:
        while waiting or running:
            if stopping := stopping or stop():
                waiting.clear()
                for _, process in running.values():
                    _interrupt(process)  # again at each turn: a process that is starting does not listen yet
            while waiting and len(running) < workers:
                index, spec = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(theirs, spec, execute), daemon=False)
                process.start()
                theirs.close()
                running[ours] = (index, process)
            for connection in wait(list(running), timeout=REPORT_SECONDS):
                assert isinstance(connection, Connection)
                index, process = running[connection]
                event = _receive(connection, index, process)
                if stopping and event.kind == "failed" and process.exitcode is not None:
                    event = Event(index, "stopped", None)  # it was interrupted before it could listen
                if event.kind != "step":
                    process.join()
                    connection.close()
                    del running[connection]
                yield event
    finally:
        for connection, (_, process) in running.items():
            _interrupt(process)
            connection.close()


def _interrupt(process: BaseProcess) -> None:
    if process.is_alive() and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)


def _receive(connection: Connection, index: int, process: BaseProcess) -> Event:
    try:
        kind, value = connection.recv()
    except (EOFError, OSError):  # it died, maybe in the middle of a message
        process.join()
        return Event(index, "failed", f"its process ended with exit code {process.exitcode}")
    return Event(index, kind, value)


def _child(connection: Connection, spec: RunSpec, execute: Execute) -> None:
    """Carry out one run and report on it."""
    last = 0.0

    def on_step(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > REPORT_SECONDS:
            last = now
            send("step", done)

    def send(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the run goes on to a place to stop at
            connection.send((kind, value))

    with StopFlag().installed() as stop:
        try:
            result = execute(spec, stop=stop, on_step=on_step)
            send("stopped" if result is None else "done", result)
        except Exception as error:
            send("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            connection.close()
