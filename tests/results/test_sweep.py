"""A sweep in its folder: it does what is missing, and is the same in the end, whatever happens on the way."""

import json
import multiprocessing
import os
import signal
import subprocess

import pytest
import torch

from orthoworld.errors import ResultError
from orthoworld.experiments.slurm import SlurmSpec
from orthoworld.experiments.sweep import Event, Local
from orthoworld.results.execute import execute, execute_group
from orthoworld.results.slurm import Slurm
from orthoworld.results.store import MANIFEST, RunFolder, collect
from orthoworld.results.sweep import Sweep, executor_of, find, plan_of
from small_runs import COMMAND, SMALL, folder_of, small_spec, small_specs, start, wait_until


class Recorder:
    """An executor that says of each run it is given that it failed."""

    def carry_out(self, groups, stop):
        self.groups = groups
        for group in groups:
            for spec in group:
                yield Event(spec.run_id, "failed", "not carried out")

    def farewell(self):
        return ""


def test_sweep_reads_what_is_there_and_gives_the_rest_to_the_executor(tmp_path):
    specs = small_specs("seeds=[0,1,2,3]")
    execute(specs[1], tmp_path)
    recorder = Recorder()
    events = {event.run_id: event for event in Sweep(specs, tmp_path, 2).carry_out(recorder, lambda: False)}
    assert [events[spec.run_id].kind for spec in specs] == ["failed", "done", "failed", "failed"]
    assert recorder.groups == [[specs[0]], specs[2:]]  # what is left of the groups of the whole sweep


def test_damaged_result_is_the_failure_of_its_run_alone(tmp_path):
    specs = small_specs("seeds=[0,1]")
    for spec in specs:
        execute(spec, tmp_path)
    (folder_of(specs[0], tmp_path) / "metrics.json").write_text("{}")
    with pytest.raises(ResultError, match=r"metrics\.json"):
        find(specs[0], tmp_path)
    events = list(Sweep(specs, tmp_path, 1).carry_out(Recorder(), lambda: False))
    assert [event.kind for event in events] == ["failed", "done"]
    assert "metrics.json" in events[0].value


def test_missing_run_is_not_found(tmp_path):
    assert find(small_spec(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_executor_is_the_one_that_was_asked_for(tmp_path):
    sweep = Sweep(small_specs(), tmp_path, 3, most=5)
    local = executor_of(sweep, None)
    assert isinstance(local, Local)
    assert (local.workers, local.execute.keywords) == (3, {"root": tmp_path, "most": 5})
    slurm = executor_of(sweep, SlurmSpec(partition="cpu"))
    assert isinstance(slurm, Slurm)
    assert (slurm.at_a_time, slurm.options.partition) == (3, "cpu")
    assert slurm.folder == tmp_path / "two-d" / ".slurm"


def test_plan_counts_runs_groups_and_cost(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    execute(specs[0], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    plan = plan_of(Sweep(specs, tmp_path, 1), "local")
    assert sorted(tmp_path.rglob("*")) == before
    counts = {"experiment": "two-d", "runs": 3, "finished": 1, "missing": 2, "groups": 1, "together": 2}
    assert plan.items() >= {**counts, "executor": "local", "workers": 1, "measured": 1, "kinds": 1}.items()
    assert 0 < plan["wall_s"] == plan["compute_s"] < 60
    for spec in specs:
        execute(spec, tmp_path)
    assert plan_of(Sweep(specs, tmp_path, 1), "local").items() >= {"missing": 0, "wall_s": 0.0}.items()


def test_plan_for_the_device_of_another_machine_has_no_estimate(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    plan = plan_of(Sweep(small_specs("train.device=cuda"), tmp_path, None), "slurm")
    assert (plan["wall_s"], plan["workers"], plan["groups"]) == (None, None, 1)
    assert "cuda" in plan["estimate_reason"]


def test_run_whose_result_cannot_be_written_is_the_only_one_that_fails(tmp_path):
    specs = small_specs("seeds=[0,1,2]")
    (folder_of(specs[1], tmp_path) / "curve.csv").mkdir(parents=True)  # where a file has to go
    told = {}
    execute_group(specs, tmp_path, stop=lambda: False, tell=lambda event: told.update({event.run_id: event}))
    assert [told[spec.run_id].kind for spec in specs] == ["done", "failed", "done"]
    assert "curve.csv" in told[specs[1].run_id].value


def test_group_whose_folder_is_held_elsewhere_stops_when_asked(tmp_path):
    specs = small_specs("seeds=[0,1]")
    told = []
    with RunFolder(folder_of(specs[1], tmp_path)).lock():
        execute_group(specs, tmp_path, stop=lambda: True, tell=told.append)
    assert {event.kind for event in told} == {"stopped"}
    assert len(told) == 2


TWELVE = [*SMALL, "mixings=[spiral,banana]", "seeds=[0,1,2,3,4,5]", "train.steps=500", "train.evaluate_every=250"]


def command(root, workers=2):
    return [COMMAND, "run", "two-d", *TWELVE, "--workers", str(workers), "--out", root]


def finished(specs, root):
    """Return when each finished run was finished."""
    found = {}
    for spec in specs:
        manifest = folder_of(spec, root) / MANIFEST
        if manifest.exists():
            found[spec.run_id] = (manifest.stat().st_mtime_ns, json.loads(manifest.read_text())["finished"])
    return found


def damage(spec, root):
    """Make a run fail: it cannot be resumed from what lies there."""
    path = folder_of(spec, root)
    path.mkdir(parents=True)
    (path / "checkpoint-0.pt").write_bytes(b"half a checkpoint")


def test_sweep_killed_twice_completes_what_is_missing_and_ends_as_an_undisturbed_one(tmp_path):
    specs = small_specs(*TWELVE[len(SMALL) :])
    assert len(specs) == 12
    broken, killed, undisturbed = specs[4], tmp_path / "killed", tmp_path / "undisturbed"
    for root in (killed, undisturbed):
        damage(broken, root)
    sweep = Sweep(specs, undisturbed, 2)
    ends = [event.kind for event in sweep.carry_out(executor_of(sweep, None), lambda: False) if event.ends]
    assert sorted(ends) == ["done"] * 11 + ["failed"]

    # Killed when both groups of six have begun, and, one group after the other, when some runs of the first are there.
    for workers, begun, there in ((2, 7, 0), (1, 0, 3)):
        with start(*command(killed, workers)[1:]) as process:
            wait_until(
                lambda begun=begun, there=there: (
                    len(list(killed.rglob(".lock"))) >= begun and len(finished(specs, killed)) >= there
                ),
                120,
            )
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)  # the pipes are closed when its workers have ended, too
        assert process.returncode == -signal.SIGKILL
        assert len(list(killed.rglob("checkpoint-0.pt"))) > 1  # another than the damaged one
    before = finished(specs, killed)
    assert 3 <= len(before) < 11

    answer = subprocess.run(command(killed), capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 1
    after = finished(specs, killed)
    assert set(after) == {spec.run_id for spec in specs} - {broken.run_id}
    assert {run: after[run] for run in before} == before
    (line,) = [line for line in answer.stderr.splitlines() if broken.run_id in line]
    assert "checkpoint-0.pt is damaged" in line
    assert len([line for line in answer.stdout.splitlines() if " finished " in line]) == 11

    for spec in specs:
        if spec is not broken:
            for name in ("encoder.safetensors", "curve.csv"):
                mine, other = (folder_of(spec, root) / name for root in (killed, undisturbed))
                assert mine.read_bytes() == other.read_bytes()


def test_killed_worker_is_made_good_within_the_sweep(tmp_path):
    """A process that dies takes nothing along: its runs go on from their checkpoints, in smaller groups."""
    specs = small_specs("seeds=[0,1,2,3]", "train.steps=300", "train.evaluate_every=0")
    sweep, victims = Sweep(specs, tmp_path, 1), []

    def stop():
        if not victims and all((folder_of(spec, tmp_path) / ".lock").exists() for spec in specs):
            victims.extend(process.pid for process in multiprocessing.active_children())
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        return False

    events = [event for event in sweep.carry_out(executor_of(sweep, None), stop) if event.ends]
    assert victims
    assert sorted(event.run_id for event in events) == sorted(spec.run_id for spec in specs)
    assert {event.kind for event in events} == {"done"}
    assert len(collect(tmp_path).runs) == 4


def test_two_sweeps_into_one_folder_do_every_run_once(tmp_path):
    specs = small_specs("seeds=[0,1,2,3,4]", "train.steps=200")
    seeds = (["seeds=[0,1,2,3]"], ["seeds=[4,3,2,1]"])
    both = [
        start("run", "two-d", *SMALL, "train.steps=200", *chosen, "--workers", 1, "--out", tmp_path, "--json")
        for chosen in seeds
    ]
    answers = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [errors for _, errors in answers] == ["", ""]
    rows = [[json.loads(line) for line in output.splitlines()] for output, _ in answers]
    assert [len(own) for own in rows] == [4, 4]
    assert collect(tmp_path).skipped == {}
    kept = {run.spec.run_id: run.metrics["wall_s"] for run in collect(tmp_path).runs}
    assert set(kept) == {spec.run_id for spec in specs}
    for row in (*rows[0], *rows[1]):
        assert row["wall_s"] == kept[row["run_id"]]
