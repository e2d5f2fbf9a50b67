"""What is shown of a sweep while it goes on."""

import io

import pytest
from rich.console import Console

from orthoworld.experiments.sweep import Event
from orthoworld.results import live as module
from orthoworld.results.live import LiveTable, duration
from small_runs import small_specs

SPECS = small_specs("seeds=[0,1,2,3]", "train.steps=100", "train.restarts=2")
RUNS = [spec.run_id for spec in SPECS]


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def shown(table):
    console = Console(file=io.StringIO(), width=160)
    console.print(table.render())
    return console.file.getvalue()


def line_of(run, text):
    (line,) = [line for line in text.splitlines() if run in line]
    return line.split()


def test_running_run_has_steps_rate_and_time_left(clock):
    table = LiveTable(SPECS)
    table.update(Event(RUNS[0], "step", 50))
    assert line_of(RUNS[0], shown(table)) == [RUNS[0], "running", "50/200"]
    clock[0] += 10
    table.update(Event(RUNS[0], "step", 100))
    assert line_of(RUNS[0], shown(table)) == [RUNS[0], "running", "100/200", "5.0", "20", "s"]


def test_failed_run_stays_with_its_reason_and_finished_ones_are_counted(clock):
    table = LiveTable(SPECS)
    table.update(Event(RUNS[0], "failed", "ResultError: no luck\nTraceback"))
    table.update(Event(RUNS[1], "done", None))
    table.update(Event(RUNS[2], "state", "pending"))
    text = shown(table)
    assert line_of(RUNS[0], text) == [RUNS[0], "failed:", "ResultError:", "no", "luck"]
    assert line_of(RUNS[2], text) == [RUNS[2], "pending", "0/200"]
    assert RUNS[1] not in text
    assert RUNS[3] not in text
    assert "1 failed, 1 finished, 1 pending, 1 waiting" in text


def test_bar_counts_the_steps_of_all_runs(clock):
    table = LiveTable(SPECS)
    table.update(Event(RUNS[0], "done", None))
    table.update(Event(RUNS[1], "step", 100))
    table.update(Event(RUNS[2], "stopped"))
    assert "38%" in shown(table)
    (task,) = table.progress.tasks
    assert (task.completed, task.total) == (300, 800)


def test_table_is_not_longer_than_a_screen(monkeypatch, clock):
    monkeypatch.setattr(module, "ROWS", 2)
    table = LiveTable(SPECS)
    for run in RUNS[:3]:
        table.update(Event(run, "state", "pending"))
    table.update(Event(RUNS[3], "step", 1))
    text = shown(table)
    assert line_of(RUNS[3], text)  # what is running comes first
    assert "and 2 more" in text


def test_nothing_is_written_where_no_terminal_is(capfd):
    with LiveTable(SPECS) as table:
        table.update(Event(RUNS[0], "done", None))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h")])
def test_durations_are_told_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text
