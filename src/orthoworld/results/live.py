"""What is shown of a sweep while it goes on, on standard error, and nothing where that is no terminal."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orthoworld.experiments.config import RunSpec
from orthoworld.experiments.sweep import Event

ROWS = 20
"""Runs shown at a time."""


@dataclass
class _Row:
    """What is known about a run; `since` is when its first step was told, and `first` that step."""

    total: int
    status: str = "waiting"
    done: int = 0
    first: int = 0
    since: float | None = None
    reason: str = ""

    def rate(self, now: float) -> float | None:
        """Return the steps in a second since the first that was told."""
        if self.since is None or now <= self.since or self.done <= self.first:
            return None
        return (self.done - self.first) / (now - self.since)


class LiveTable:
    """A table of the runs that are being carried out, and of those that failed, above a bar of all steps."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self.rows = {spec.run_id: _Row(spec.train.steps * spec.train.restarts) for spec in specs}
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        self.progress = Progress(*columns, TimeRemainingColumn())
        self.everything = self.progress.add_task("all steps", total=sum(row.total for row in self.rows.values()))
        self.live = Live(
            console=Console(stderr=True),
            get_renderable=self.render,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> "LiveTable":
        if self.shown:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self.live.stop()

    def update(self, event: Event) -> None:
        """Take in what happened to a run."""
        row = self.rows[event.run_id]
        if event.kind == "step":
            if row.since is None:
                row.since, row.first = time.monotonic(), event.value
            row.status, row.done = "running", event.value
        elif event.kind == "state":
            row.status = event.value
        else:
            row.status = {"done": "finished"}.get(event.kind, event.kind)
            row.done = row.done if event.kind == "stopped" else row.total
            row.reason = event.value.splitlines()[0] if event.kind == "failed" else ""
        self.progress.update(self.everything, completed=sum(row.done for row in self.rows.values()))

    def render(self) -> RenderableType:
        """Return the table as it is now."""
        counts = Counter(row.status for row in self.rows.values())
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        listed = [(run, row) for run, row in self.rows.items() if row.status not in ("waiting", "finished")]
        listed.sort(key=lambda entry: entry[1].status not in ("running", "failed"))
        table = Table("run", "status", box=box.SIMPLE_HEAD)
        for heading in ("step", "a second", "left"):
            table.add_column(heading, justify="right")
        now = time.monotonic()
        for run, row in listed[:ROWS]:
            table.add_row(run, *_cells(row, now))
        more = [f"and {len(listed) - ROWS} more"] if len(listed) > ROWS else []
        return Group(table, *more, self.progress, summary)


def _cells(row: _Row, now: float) -> tuple[str, ...]:
    """Return what is said about a run beside its name."""
    if row.status == "failed":
        return (f"failed: {row.reason}",)
    rate = row.rate(now)
    if rate is None:
        return row.status, f"{row.done}/{row.total}"
    return row.status, f"{row.done}/{row.total}", f"{rate:.1f}", duration((row.total - row.done) / rate)


def duration(seconds: float) -> str:
    """Return a length of time for people.

    Example:
        >>> duration(7), duration(400), duration(9000), duration(400000)
        ('7 s', '7 min', '2.5 h', '4.6 d')
    """
    for unit, length, digits in (("d", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
