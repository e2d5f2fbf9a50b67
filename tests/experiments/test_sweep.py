"""Many runs in processes of their own."""

import functools
import multiprocessing
import os
import signal
import time

import pytest

from orthoworld.experiments import sweep as sweep_module
from orthoworld.experiments.sweep import StopFlag, default_workers, run_all
from orthoworld.results.execute import execute
from small_runs import small_specs, wait_until

ENDLESS = ("train.steps=1000000", "train.evaluate_every=0")


def never():
    return False


def sweep(specs, root, *, workers=2, stop=never):
    return run_all(specs, functools.partial(execute, root=root), workers=workers, stop=stop)


def ends(events):
    """Return the last event of each run, by index."""
    return {event.index: event for event in events if event.kind != "step"}


def checkpoint_of(spec, root):
    return root / spec.experiment / spec.run_id / "checkpoint-0.pt"


def test_every_run_ends_with_the_result_it_has_alone(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    found = ends(sweep(specs, tmp_path / "sweep"))
    assert {event.kind for event in found.values()} == {"done"}
    assert [found[index].value.spec for index in range(3)] == specs
    alone = execute(specs[1], tmp_path / "alone")
    for name in ("encoder.safetensors", "curve.csv"):
        assert (found[1].value.path / name).read_bytes() == (alone.path / name).read_bytes()


def test_one_failing_run_does_not_stop_the_others(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    damaged = checkpoint_of(specs[1], tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no checkpoint")
    found = ends(sweep(specs, tmp_path))
    assert [found[index].kind for index in range(3)] == ["done", "failed", "done"]
    assert "ResultError" in found[1].value.splitlines()[0]
    assert str(damaged) in found[1].value


def test_worker_that_is_killed_is_reported_and_the_next_run_goes_on(tmp_path):
    specs = [*small_specs(*ENDLESS), *small_specs("seeds=1")]
    found = {}
    for event in sweep(specs, tmp_path, workers=1):
        if event.index == 0 and event.kind == "step":
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGKILL)
        elif event.kind != "step":
            found[event.index] = event
    assert found[0].kind == "failed"
    assert "-9" in found[0].value
    assert found[1].kind == "done"


def test_stopped_sweep_leaves_checkpoints_and_starts_nothing_new(tmp_path):
    specs = small_specs(*ENDLESS, "seeds=[0,1,2]")
    seen = set()
    found = {}
    for event in sweep(specs, tmp_path, stop=lambda: len(seen) == 2):
        if event.kind == "step":
            seen.add(event.index)
        else:
            found[event.index] = event
    assert {index: event.kind for index, event in found.items()} == {0: "stopped", 1: "stopped"}
    assert [checkpoint_of(spec, tmp_path).exists() for spec in specs] == [True, True, False]


def test_run_that_is_stopped_while_its_process_starts_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "REPORT_SECONDS", 0.0)  # asked at once after the processes are started
    begun = time.monotonic()
    asked = []

    def at_the_second_time():
        assert time.monotonic() - begun < 30, "the sweep does not stop"
        asked.append(None)
        return len(asked) > 1

    found = ends(sweep(small_specs(*ENDLESS, "seeds=[0,1]"), tmp_path, stop=at_the_second_time))
    assert {index: event.kind for index, event in found.items()} == {0: "stopped", 1: "stopped"}


def test_sweep_that_is_stopped_before_it_begins_does_nothing(tmp_path):
    assert list(sweep(small_specs(), tmp_path, stop=lambda: True)) == []
    assert list(tmp_path.iterdir()) == []


def test_sweep_that_is_left_early_stops_its_runs(tmp_path):
    (spec,) = small_specs(*ENDLESS)
    events = sweep([spec], tmp_path)
    assert next(events).kind == "step"
    events.close()
    wait_until(lambda: not multiprocessing.active_children())
    assert checkpoint_of(spec, tmp_path).exists()


def test_steps_that_are_told_grow(tmp_path):
    specs = small_specs(*ENDLESS)
    steps = []
    for event in sweep(specs, tmp_path, stop=lambda: len(steps) == 3):
        if event.kind == "step":
            steps.append(event.value)
    assert steps[:3] == sorted(set(steps[:3]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_sets_the_flag_and_the_old_handlers_come_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopFlag().installed() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("processors", "threads", "runs", "expected"),
    [(8, 1, 24, 8), (8, 2, 24, 4), (8, 1, 3, 3), (2, 4, 24, 1), (None, 1, 24, 1)],
)
def test_default_workers_fit_the_machine(monkeypatch, processors, threads, runs, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    specs = small_specs(f"train.threads={threads}", f"seeds={list(range(runs))}")
    assert default_workers(specs) == expected
