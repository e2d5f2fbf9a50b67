"""Runs in their folders: not repeated, resumed after any interruption, the same in the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import orthoworld
from orthoworld.errors import ArgumentError, ResultError
from orthoworld.experiments.config import RunSpec
from orthoworld.results.execute import execute, provenance
from orthoworld.results.store import FILES, MANIFEST, RunFolder, collect
from small_runs import COMMAND, SMALL, folder_of, small_spec, wait_until


def assert_same_files(one, other):
    for name in ("spec.yaml", "curve.csv", "encoder.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return execute(small_spec(), tmp_path_factory.mktemp("finished"))


def test_finished_run_is_not_repeated(finished):
    def written():
        return [(finished.path / name).stat().st_mtime_ns for name in (*FILES, MANIFEST)]

    before = written()
    told = []
    assert execute(small_spec(), finished.path.parent.parent, on_step=told.append) == finished
    assert told == []
    assert written() == before


def test_run_lies_below_its_experiment_under_its_id(finished):
    assert finished.path.parent.name == "two-d"
    assert finished.path.name == small_spec().run_id


def test_damaged_result_is_neither_read_nor_overwritten(tmp_path):
    path = execute(small_spec(), tmp_path).path
    (path / "metrics.json").write_text("{}")
    with pytest.raises(ResultError, match=r"metrics\.json"):
        execute(small_spec(), tmp_path)
    assert (path / "metrics.json").read_text() == "{}"


def test_damaged_checkpoint_is_refused_by_name(tmp_path):
    path = folder_of(small_spec(), tmp_path)
    path.mkdir(parents=True)
    (path / "checkpoint-0.pt").write_bytes(b"half")
    with pytest.raises(ResultError, match=r"checkpoint-0\.pt is damaged"):
        execute(small_spec(), tmp_path)


def test_bad_option_leaves_no_finished_run(tmp_path):
    with pytest.raises(ArgumentError, match="lam=2"):
        execute(small_spec("objective.lam=2"), tmp_path)
    assert collect(tmp_path).runs == []


@pytest.mark.parametrize("stop_after", [1, 7, 10, 19])
def test_stopped_run_resumes_to_the_same_bytes(finished, tmp_path, stop_after):
    told = []
    assert execute(small_spec(), tmp_path, stop=lambda: len(told) == stop_after, on_step=told.append) is None
    path = folder_of(small_spec(), tmp_path)
    assert (path / "checkpoint-0.pt").exists()
    assert not (path / MANIFEST).exists()
    resumed = execute(small_spec(), tmp_path, on_step=told.append)
    assert told == list(range(1, 21))
    assert_same_files(resumed.path, finished.path)
    assert not list(path.glob("checkpoint-*"))


def test_run_stopped_after_every_step_resumes_to_the_same_bytes(finished, tmp_path):
    for _ in range(19):
        assert execute(small_spec(), tmp_path, stop=lambda: True) is None
    assert_same_files(execute(small_spec(), tmp_path, stop=lambda: True).path, finished.path)


def test_run_of_several_restarts_resumes_within_the_second(tmp_path):
    spec = small_spec("train.restarts=2", "train.steps=8")
    whole = execute(spec, tmp_path / "whole")
    told = []
    assert execute(spec, tmp_path / "parts", stop=lambda: len(told) == 11, on_step=told.append) is None
    resumed = execute(spec, tmp_path / "parts")
    assert_same_files(resumed.path, whole.path)
    assert resumed.metrics["restart_losses"] == whole.metrics["restart_losses"]


def test_run_is_computed_with_the_threads_of_its_spec(tmp_path):
    seen = []

    def stop():
        seen.append(torch.get_num_threads())
        return True

    assert execute(small_spec("train.threads=2"), tmp_path, stop=stop) is None
    assert set(seen) == {2}


def test_diverged_run_is_kept_with_its_status(tmp_path):
    diverged = execute(small_spec("train.optimizer.lr=1e30"), tmp_path)
    assert diverged.metrics["status"] == "diverged"
    assert diverged.metrics["status_reason"].startswith("step 2")
    assert collect(tmp_path).runs == [diverged]


def test_nulls_of_a_diverged_run_have_reasons(tmp_path):
    metrics = execute(small_spec("train.optimizer.lr=1e30"), tmp_path).metrics
    missing = {key for key, value in metrics.items() if value is None or (isinstance(value, list) and None in value)}
    assert {"r2_hz", "bound", "loss"} <= missing
    assert missing <= set(metrics["reasons"])


def test_provenance_names_versions_and_machine():
    found = provenance("cpu")
    assert found["orthoworld"] == orthoworld.__version__
    assert found["torch"] == torch.__version__
    assert found["cpus"] == os.cpu_count()
    assert found["commit"] is None or len(found["commit"].removesuffix("+")) >= 7


def test_provenance_does_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance("cpu")["commit"] is None


def test_package_installed_in_a_foreign_checkout_has_no_commit(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / ".gitignore").write_text(".venv/\n")
    git("add", ".gitignore")
    git("commit", "-m", "theirs")
    installed = tmp_path / ".venv" / "site-packages" / "orthoworld" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(orthoworld, "__file__", str(installed))
    assert provenance("cpu")["commit"] is None


KILLED = """
import json, os, sys, time
from pathlib import Path

import torch._dynamo  # which optimisers load when they are first made
import yaml

from orthoworld.experiments.config import RunSpec
from orthoworld.results.execute import execute
from orthoworld.training import session

session.CHECKPOINT_SECONDS = 0.05
spec = RunSpec.from_data(yaml.safe_load(sys.argv[1]))


def tell_group_at_the_first_step(step, told=[]):
    if not told:
        told.append(step)
        print(os.getpid(), flush=True)


# One process imports everything and forks each attempt into a group of its own.
print("ready", flush=True)
for root in sys.stdin:
    child = os.fork()
    if child == 0:
        os.setsid()
        execute(spec, Path(root.strip()), on_step=tell_group_at_the_first_step)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def attempts():
    """A function that starts a run of some seconds, kills it after a time, and returns its exit code."""
    spec = small_spec("train.steps=1500", "train.evaluate_every=250")
    command = [sys.executable, "-c", KILLED, yaml.safe_dump(spec.resolved())]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"

        def attempt(root, kill_after=None):
            print(root, file=process.stdin, flush=True)
            group = int(process.stdout.readline())
            if kill_after is not None:
                deadline = time.monotonic() + kill_after
                while time.monotonic() < deadline:
                    found = collect(root)
                    # The manifest is the last file: whoever reads a run has seen it.
                    assert not found.runs or (found.runs[0].path / MANIFEST).exists()
                    time.sleep(0.02)
                os.killpg(group, signal.SIGKILL)
            return int(process.stdout.readline())

        yield spec, attempt
        process.stdin.close()


def test_run_killed_ten_times_resumes_bitwise(attempts, tmp_path):
    spec, attempt = attempts
    delays = random.Random(20)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    path = folder_of(spec, killed)
    begun = time.monotonic()
    assert attempt(whole) == 0
    took = time.monotonic() - begun
    for _ in range(10):
        assert attempt(killed, kill_after=delays.uniform(0, took / 14)) == -signal.SIGKILL
        found = collect(killed)
        assert found.runs == []
        assert list(found.skipped) == [str(path.relative_to(killed))]
    state = torch.load(path / "checkpoint-0.pt", weights_only=True)
    assert 0 < state["step"] < spec.train.steps
    assert attempt(killed) == 0
    assert_same_files(path, folder_of(spec, whole))
    steps = [row["step"] for row in RunFolder(path).read().curve]
    assert steps == list(range(250, 1501, 250))


def test_runs_whose_parent_is_killed_keep_their_state_and_end(tmp_path):
    specs = [small_spec("train.steps=300000", "train.evaluate_every=0", f"seeds={seed}") for seed in (0, 1)]
    assignments = [*SMALL, "train.steps=300000", "train.evaluate_every=0", "seeds=[0,1]"]
    process = subprocess.Popen(
        [COMMAND, "run", "two-d", *assignments, "--workers", "2", "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    locks = [folder_of(spec, tmp_path) / ".lock" for spec in specs]
    wait_until(lambda: all(lock.exists() for lock in locks))
    process.kill()
    # The children hold the other ends of the pipes: both are at their ends when all children are gone.
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    for spec in specs:
        path = folder_of(spec, tmp_path)
        assert (path / "checkpoint-0.pt").exists()
        assert not (path / MANIFEST).exists()
        with RunFolder(path).lock(stop=lambda: True) as ours:
            assert ours


def test_stored_spec_describes_the_run(finished):
    data = yaml.safe_load((finished.path / "spec.yaml").read_text())
    assert RunSpec.from_data(data) == small_spec()
    assert json.loads((finished.path / MANIFEST).read_text())["run_id"] == RunSpec.from_data(data).run_id
