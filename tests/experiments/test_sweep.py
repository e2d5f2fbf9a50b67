"""Many runs in processes of their own."""

import functools
import multiprocessing
import os
import signal
import time

import pytest

from orthoworld.experiments import sweep as sweep_module
from orthoworld.experiments.groups import groups_of
from orthoworld.experiments.sweep import Event, Local, StopFlag, default_workers, run_all
from orthoworld.results.execute import execute, execute_group
from small_runs import folder_of, small_specs, wait_until

ENDLESS = ("train.steps=1000000", "train.evaluate_every=0")


def never():
    return False


def sweep(groups, root, *, workers=2, stop=never):
    return run_all(groups, functools.partial(execute_group, root=root), workers=workers, stop=stop)


def alone(specs):
    return [[spec] for spec in specs]


def ends(events):
    """Return the last event of each run."""
    found = {}
    for event in events:
        if event.kind != "step":
            assert event.ends
            assert event.run_id not in found
            found[event.run_id] = event
    return found


def kinds(specs, found):
    return [found[spec.run_id].kind for spec in specs if spec.run_id in found]


def checkpoint_of(spec, root):
    return folder_of(spec, root) / "checkpoint-0.pt"


def test_every_run_ends_with_the_result_it_has_alone(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    found = ends(sweep(alone(specs), tmp_path / "sweep"))
    assert kinds(specs, found) == ["done"] * 3
    assert [found[spec.run_id].value.spec for spec in specs] == specs
    single = execute(specs[1], tmp_path / "alone")
    for name in ("encoder.safetensors", "curve.csv"):
        assert (found[specs[1].run_id].value.path / name).read_bytes() == (single.path / name).read_bytes()


def test_one_failing_run_does_not_stop_the_others(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    damaged = checkpoint_of(specs[1], tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no checkpoint")
    found = ends(sweep(alone(specs), tmp_path))
    assert kinds(specs, found) == ["done", "failed", "done"]
    why = found[specs[1].run_id].value
    assert "ResultError" in why.splitlines()[0]
    assert str(damaged) in why


@pytest.mark.parametrize("culprit", [0, 2, 4])
def test_failing_run_does_not_take_the_others_of_its_group_along(tmp_path, culprit):
    specs = small_specs("seeds=[0,1,2,3,4]")
    damaged = checkpoint_of(specs[culprit], tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no checkpoint")
    found = ends(sweep([specs], tmp_path))
    assert kinds(specs, found) == ["failed" if index == culprit else "done" for index in range(5)]
    assert "is damaged" in found[specs[culprit].run_id].value


def die_with_the_third(group, *, stop, tell):
    if any(spec.seed == 2 for spec in group):
        os.kill(os.getpid(), signal.SIGKILL)
    for spec in group:
        tell(Event(spec.run_id, "done", len(group)))


def test_run_that_kills_its_process_does_not_take_the_others_along():
    specs = small_specs("seeds=[0,1,2,3,4]")
    found = ends(run_all([specs], die_with_the_third, workers=1, stop=never))
    assert kinds(specs, found) == ["done", "done", "failed", "done", "done"]
    assert "exit code -9" in found[specs[2].run_id].value
    assert [found[specs[index].run_id].value for index in (0, 1, 3, 4)] == [2, 2, 2, 2]


def end_half(group, *, stop, tell):
    tell(Event(group[0].run_id, "done", len(group)))
    if len(group) > 1:
        raise RuntimeError("the rest has to be done again")


def test_runs_that_ended_before_their_group_failed_are_not_repeated():
    specs = small_specs("seeds=[0,1,2]")
    found = ends(run_all([specs], end_half, workers=1, stop=never))
    assert [found[spec.run_id].value for spec in specs] == [3, 1, 1]


def test_worker_that_is_killed_is_reported_and_the_next_run_goes_on(tmp_path):
    specs = [*small_specs(*ENDLESS), *small_specs("seeds=1")]
    found = {}
    for event in sweep(alone(specs), tmp_path, workers=1):
        if event.run_id == specs[0].run_id and event.kind == "step":
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGKILL)
        elif event.ends:
            found[event.run_id] = event
    assert kinds(specs, found) == ["failed", "done"]
    assert "-9" in found[specs[0].run_id].value


def test_stopped_sweep_leaves_checkpoints_and_starts_nothing_new(tmp_path):
    specs = small_specs(*ENDLESS, "seeds=[0,1,2,3]")
    seen = set()
    found = {}
    for event in sweep([specs[:2], specs[2:3], specs[3:]], tmp_path, stop=lambda: len(seen) == 3):
        if event.kind == "step":
            seen.add(event.run_id)
        else:
            found[event.run_id] = event
    assert kinds(specs, found) == ["stopped"] * 3
    assert [checkpoint_of(spec, tmp_path).exists() for spec in specs] == [True, True, True, False]


def test_run_that_is_stopped_while_its_process_starts_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "REPORT_SECONDS", 0.0)  # asked at once after the processes are started
    begun = time.monotonic()
    asked = []

    def at_the_second_time():
        assert time.monotonic() - begun < 30, "the sweep does not stop"
        asked.append(None)
        return len(asked) > 1

    specs = small_specs(*ENDLESS, "seeds=[0,1,2]")
    found = ends(sweep([specs[:1], specs[1:]], tmp_path, stop=at_the_second_time))
    assert kinds(specs, found) == ["stopped"] * 3


def test_sweep_that_is_stopped_before_it_begins_does_nothing(tmp_path):
    assert list(sweep([small_specs()], tmp_path, stop=lambda: True)) == []
    assert list(tmp_path.iterdir()) == []


def test_sweep_that_is_left_early_stops_its_runs(tmp_path):
    (spec,) = small_specs(*ENDLESS)
    events = sweep([[spec]], tmp_path)
    assert next(events).kind == "step"
    events.close()
    wait_until(lambda: not multiprocessing.active_children())
    assert checkpoint_of(spec, tmp_path).exists()


def test_steps_that_are_told_grow(tmp_path):
    specs = small_specs(*ENDLESS, "seeds=[0,1]")
    steps = {spec.run_id: [] for spec in specs}
    for event in sweep([specs], tmp_path, stop=lambda: min(map(len, steps.values())) == 3):
        if event.kind == "step":
            steps[event.run_id].append(event.value)
    for told in steps.values():
        assert told[:3] == sorted(set(told[:3]))


def test_groups_that_share_runs_wait_for_each_other_and_nothing_is_done_twice(tmp_path):
    specs = small_specs("seeds=[0,1,2,3]", "train.steps=200")
    one, other = specs[:3], specs[:0:-1]  # in opposite orders
    told = []
    for event in sweep([one, other], tmp_path):
        if event.ends:
            told.append((event.run_id, event.kind, event.value.manifest["finished"]))
    assert len(told) == 6
    assert {kind for _, kind, _ in told} == {"done"}
    assert len(set(told)) == 4  # who came second read what the first had written


def test_local_executor_says_how_to_go_on(tmp_path):
    executor = Local(1, functools.partial(execute_group, root=tmp_path))
    specs = small_specs()
    assert kinds(specs, ends(executor.carry_out(groups_of(specs, 1), never))) == ["done"]
    assert executor.farewell() == "the same command goes on from here"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_signal_sets_the_flag_and_the_old_handlers_come_back(number):
    before = [signal.getsignal(number) for number in StopFlag.SIGNALS]
    with StopFlag().installed() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
    assert [signal.getsignal(number) for number in StopFlag.SIGNALS] == before


@pytest.mark.parametrize(
    ("processors", "threads", "runs", "expected"),
    [(8, 1, 24, 8), (8, 2, 24, 4), (8, 1, 3, 3), (2, 4, 24, 1), (None, 1, 24, 1)],
)
def test_default_workers_fit_the_machine(monkeypatch, processors, threads, runs, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    specs = small_specs(f"train.threads={threads}", f"seeds={list(range(runs))}")
    assert default_workers(specs) == expected
