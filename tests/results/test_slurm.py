"""Sweeps as jobs of a real SLURM, on a cluster of one node that the tests start."""

import functools
import json
import subprocess
import sys

import pytest

from orthoworld.errors import ArgumentError, MissingExtraError, OrthoworldError
from orthoworld.experiments.slurm import SlurmSpec
from orthoworld.experiments.sweep import Local
from orthoworld.results import slurm as module
from orthoworld.results.execute import execute_group
from orthoworld.results.slurm import Job, Slurm, read_queue, slurm_is_here
from orthoworld.results.sweep import Sweep, executor_of, find
from slurm_cluster import NoClusterError, cluster
from small_runs import folder_of, small_specs, wait_until

OPTIONS = SlurmSpec(partition="tests", time=30, cpus=1, mem="400MB")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """SLURM's commands speak to a cluster that is here for the tests of this file."""
    pytest.importorskip("submitit")
    try:
        with cluster(tmp_path_factory.mktemp("slurm")):
            yield
    except NoClusterError as error:
        pytest.skip(f"no SLURM: {error}")


@pytest.fixture
def polled_often(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.5)


def never():
    return False


def jobs_of(sweep):
    return json.loads((sweep.root / "two-d" / ".slurm" / module.RECORD).read_text())


def watch(sweep, until=lambda steps: False):
    """Carry out a sweep until something is so; return how runs ended, the steps seen last, and what is said then."""
    executor = executor_of(sweep, OPTIONS)
    ends, steps = {}, {}
    for event in sweep.carry_out(executor, lambda: until(steps)):
        if event.ends:
            ends[event.run_id] = event
        elif event.kind == "step":
            steps[event.run_id] = event.value
    return ends, steps, executor.farewell()


def test_sweep_left_preempted_cancelled_and_resubmitted_ends_as_a_local_one(slurm, polled_often, tmp_path):
    specs = small_specs("seeds=[0,1,2,3]", "train.steps=1200", "train.evaluate_every=600")
    sweep = Sweep(specs, tmp_path / "slurm", 2)
    groups = [specs[:2], specs[2:]]
    assert sweep.missing() == groups

    # Whoever leaves is told what goes on and how to end it.
    ends, _, farewell = watch(sweep, until=lambda steps: len(steps) == 4)
    assert ends == {}
    jobs = jobs_of(sweep)
    first, second = (jobs[group[0].run_id] for group in groups)
    array = first.partition("_")[0]
    assert (first, second) == (f"{array}_0", f"{array}_1")
    assert farewell == (f"jobs go on in the queue: the same command watches them again, scancel {array} cancels them")

    # Whoever comes back submits nothing twice. One job is told to make room, one is cancelled.
    signalled = []

    def disturb(steps):
        if len(steps) == 4 and not signalled:
            signalled.append(subprocess.run(["scancel", "--signal=USR2", first], check=True))
            signalled.append(subprocess.run(["scancel", second], check=True))
            wait_until(lambda: all((folder_of(spec, sweep.root) / "checkpoint-0.pt").exists() for spec in specs))
        return False

    ends, _, farewell = watch(sweep, until=disturb)
    assert jobs_of(sweep) == jobs
    assert [ends[spec.run_id].kind for spec in specs] == ["done", "done", "failed", "failed"]
    for spec in groups[1]:
        assert f"job {second} has ended as CANCELLED" in ends[spec.run_id].value
        assert (folder_of(spec, sweep.root) / "checkpoint-0.pt").exists()
    assert farewell == "nothing is left in the queue"
    log = (sweep.root / "two-d" / ".slurm" / f"{first}_0_log.out").read_text()
    assert f"Requeued job {first}" in log
    assert log.count("Starting with JobEnvironment") == 2

    # The next call does what is missing, from where it was.
    begun = []
    ends, steps, _ = watch(sweep, until=lambda steps: begun.append(dict(steps)) or False)
    assert [ends[spec.run_id].kind for spec in specs] == ["done"] * 4
    assert set(steps) <= {spec.run_id for spec in groups[1]}
    assert {jobs_of(sweep)[spec.run_id] for spec in groups[0]} == {first}
    assert {jobs_of(sweep)[spec.run_id].partition("_")[0] for spec in groups[1]} != {array}

    local = Sweep(specs, tmp_path / "local", 2)
    events = list(local.carry_out(Local(2, functools.partial(execute_group, root=local.root)), never))
    assert {event.kind for event in events if event.ends} == {"done"}
    for spec in specs:
        for name in ("encoder.safetensors", "curve.csv"):
            mine, other = (folder_of(spec, root) / name for root in (sweep.root, local.root))
            assert mine.read_bytes() == other.read_bytes()


def test_failure_on_a_node_is_told_and_takes_nothing_along(slurm, polled_often, tmp_path):
    specs = small_specs("seeds=[0,1]")
    damaged = folder_of(specs[0], tmp_path) / "checkpoint-0.pt"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half")
    ends, _, _ = watch(Sweep(specs, tmp_path, None))
    assert [ends[spec.run_id].kind for spec in specs] == ["failed", "done"]
    assert f"{damaged} is damaged" in ends[specs[0].run_id].value


def test_jobs_that_slurm_refuses_are_a_misuse_in_one_line(slurm, tmp_path, capfd):
    sweep = Sweep(small_specs(), tmp_path, None)
    with pytest.raises(ArgumentError, match=r"^sbatch refused the jobs: sbatch: error: .*partition.*nowhere"):
        list(sweep.carry_out(executor_of(sweep, SlurmSpec(partition="nowhere")), never))
    assert capfd.readouterr() == ("", "")


def test_machine_without_slurm_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match="expected sbatch on the PATH"):
        slurm_is_here()
    assert read_queue() is None


@pytest.fixture
def fake_slurm(monkeypatch, tmp_path):
    """Commands of SLURM that answer what a test says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def answer(**commands):
        for name, script in {"sbatch": "", "srun": "", "squeue": "", **commands}.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    answer()
    return answer


def test_missing_extra_is_named(monkeypatch, fake_slurm):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtraError, match=r"pip install orthoworld\[slurm\]"):
        slurm_is_here()


def test_queue_is_read_as_squeue_prints_it(fake_slurm):
    fake_slurm(squeue="echo '12_0 RUNNING'; echo '12_1 PENDING'; echo '13 CANCELLED'")
    assert read_queue() == {"12_0": "RUNNING", "12_1": "PENDING", "13": "CANCELLED"}
    fake_slurm(squeue="exit 1")
    assert read_queue() is None


def test_nothing_is_submitted_while_the_queue_does_not_answer(fake_slurm, tmp_path):
    fake_slurm(squeue="exit 1", sbatch=f"touch {tmp_path}/submitted")
    sweep = Sweep(small_specs(), tmp_path, None)
    with pytest.raises(OrthoworldError, match="squeue does not answer"):
        list(sweep.carry_out(executor_of(sweep, OPTIONS), never))
    assert not (tmp_path / "submitted").exists()


def test_job_that_slurm_has_forgotten_is_a_failure_only_after_several_looks(fake_slurm, polled_often, tmp_path):
    fake_slurm(sbatch="echo Submitted batch job 7")
    sweep = Sweep(small_specs(), tmp_path, None)
    executor = executor_of(sweep, OPTIONS)
    events = list(sweep.carry_out(executor, never))
    assert [event.kind for event in events] == ["state"] * (module.GONE_AFTER - 1) + ["failed"]
    assert events[-1].value.startswith("job 7 is not known to SLURM any more")


def test_jobs_ask_for_what_was_said(fake_slurm, tmp_path):
    fake_slurm(sbatch=f"cp $1 {tmp_path}/script; echo Submitted batch job 7", squeue="echo '7_0 PENDING'")
    options = SlurmSpec(
        partition="fast", account="me", time="1:00:00", cpus=3, mem="5GB", gpus=2, grace=30, extra={"nice": 10}
    )
    specs = small_specs("seeds=[0,1,2]")
    execute = functools.partial(execute_group, root=tmp_path)
    slurm = Slurm(options, tmp_path / ".slurm", execute, functools.partial(find, root=tmp_path), at_a_time=2)
    asked = iter([False, False, True])
    list(slurm.carry_out([[spec] for spec in specs], lambda: next(asked, True)))
    script = (tmp_path / "script").read_text()
    for line in (
        *("partition=fast", "account=me", "time=60", "cpus-per-task=3", "mem=5GB", "gpus-per-node=2"),
        *("signal=USR2@30", "nice=10", "requeue", "array=0-2%2", "job-name=orthoworld-two-d"),
    ):
        assert f"#SBATCH --{line}\n" in script
    assert slurm.jobs == {spec.run_id: f"7_{index}" for index, spec in enumerate(specs)}


def test_job_notes_how_far_its_runs_are(monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    specs = small_specs("seeds=[0,1]")
    Job(specs, tmp_path, functools.partial(execute_group, root=tmp_path))()
    notes = json.loads((tmp_path / "7.json").read_text())
    assert notes == {spec.run_id: ["done", None] for spec in specs}
