"""The command line: what it prints, where, and how it ends."""

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import orthoworld
from orthoworld import cli, doctor
from orthoworld.experiments import config
from orthoworld.experiments.config import load_experiment
from orthoworld.results.execute import execute
from orthoworld.results.store import collect
from orthoworld.results.tables import flatten
from small_runs import COMMAND, SMALL

KEYS = {
    *("experiment", "run_id", "status", "seed", "r2_hz", "r2_zh", "r2_hz_per_dim", "r2_hz_pooled", "orth_err"),
    *("procrustes", "mcc", "effective_rank", "pair_correlation", "alignment", "regulariser", "delta", "epsilon"),
    *("epsilon_debiased", "epsilon_floor", "nonlinear_energy", "bound", "true_error", "steps", "wall_s", "peak_rss_mb"),
    *("r2_hz_ci", "r2_zh_ci", "orth_err_ci", "delta_ci", "epsilon_ci", "bound_ci", "true_error_ci"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of runs that holds one finished run."""
    root = tmp_path_factory.mktemp("runs")
    (spec,) = load_experiment("two-d").overridden(SMALL).runs()
    execute(spec, root)
    return root


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_run_prints_a_table_and_keeps_the_run(call, tmp_path):
    code, output, errors = call("run", "two-d", *SMALL, "--out", tmp_path)
    assert (code, errors) == (0, "")
    (line,) = [line for line in output.splitlines() if line.strip().startswith("spiral")]
    (run,) = collect(tmp_path).runs
    assert line.split()[:4] == ["spiral", "lejepa", "0", "finished"]
    assert f"{run.metrics['r2_hz']:.5f}" in line
    assert f"{run.metrics['orth_err']:.5f}" in line
    assert str(tmp_path / "two-d") in output


def test_json_is_one_object_a_run_and_nothing_else(call, tmp_path):
    specs = load_experiment("two-d").overridden([*SMALL, "seeds=[0,1]"]).runs()
    there = execute(specs[0], tmp_path)
    code, output, errors = call("run", "two-d", *SMALL, "seeds=[0,1]", "--out", tmp_path, "--json")
    assert (code, errors) == (0, "")
    rows = {row["seed"]: row for row in map(strict, output.splitlines())}
    assert set(rows) == {0, 1}
    for spec in specs:
        row = rows[spec.seed]
        assert set(row) >= KEYS | set(dict(flatten(spec.resolved())))
        assert (row["experiment"], row["run_id"], row["train.steps"]) == ("two-d", spec.run_id, 20)
    assert there in collect(tmp_path).runs


def test_finished_run_is_printed_and_not_repeated(call, kept):
    (before,) = collect(kept).runs
    code, output, errors = call("run", "two-d", *SMALL, "--out", kept, "--json")
    assert (code, errors) == (0, "")
    assert strict(output)["wall_s"] == before.metrics["wall_s"]
    assert collect(kept).runs == [before]


def test_one_failing_run_does_not_stop_the_others_and_exits_one(call, tmp_path):
    specs = load_experiment("two-d").overridden([*SMALL, "seeds=[0,1,2]"]).runs()
    damaged = tmp_path / "two-d" / specs[1].run_id
    damaged.mkdir(parents=True)
    (damaged / "checkpoint-0.pt").write_bytes(b"half")
    code, output, errors = call("run", "two-d", *SMALL, "seeds=[0,1,2]", "--out", tmp_path, "--json")
    assert code == 1
    rows = {row["seed"]: row for row in map(strict, output.splitlines())}
    assert {seed: row["status"] for seed, row in rows.items()} == {0: "finished", 1: "failed", 2: "finished"}
    assert "checkpoint-0.pt is damaged" in rows[1]["status_reason"]
    (line,) = errors.splitlines()
    assert line.startswith(f"orthoworld: {specs[1].run_id} failed: ")
    assert "checkpoint-0.pt" in line


def test_table_says_which_run_failed_and_why(call, tmp_path):
    specs = load_experiment("two-d").overridden([*SMALL, "seeds=[0,1]"]).runs()
    damaged = tmp_path / "two-d" / specs[1].run_id
    damaged.mkdir(parents=True)
    (damaged / "checkpoint-0.pt").write_bytes(b"half")
    code, output, errors = call("run", "two-d", *SMALL, "seeds=[0,1]", "--out", tmp_path)
    assert code == 1
    assert len([line for line in output.splitlines() if " finished " in line]) == 1
    (line,) = [line for line in errors.splitlines() if specs[1].run_id in line]
    assert "checkpoint-0.pt is damaged: remove it to start the run afresh" in line


def test_plan_is_printed_and_nothing_is_done(call, kept):
    before = sorted(kept.rglob("*"))
    for arguments in ([], ["--executor", "slurm", "slurm.partition=cpu"]):
        code, output, errors = call("run", "two-d", *SMALL, "seeds=[0,1,2]", "--out", kept, "--dry-run", *arguments)
        assert (code, errors) == (0, "")
        assert output.splitlines()[0] == "two-d: 3 runs, 1 finished, 2 to do"
        assert "estimate" in output
    code, output, errors = call("run", "two-d", *SMALL, "seeds=[0,1,2]", "--out", kept, "--dry-run", "--json")
    assert (code, errors) == (0, "")
    plan = strict(output)
    assert (plan["runs"], plan["finished"], plan["missing"], plan["executor"]) == (3, 1, 2, "local")
    assert plan["wall_s"] > 0
    assert sorted(kept.rglob("*")) == before
    code, output, _ = call("run", "two-d", *SMALL, "train.device=cuda", "--dry-run", "--executor", "slurm")
    assert code == 0
    assert "no estimate: device='cuda'" in output or torch.cuda.is_available()


def test_runs_can_be_kept_from_being_trained_together(call, tmp_path):
    assert call("run", "two-d", *SMALL, "seeds=[0,1]", "--workers", 1, "--group", 1, "--out", tmp_path)[0] == 0
    (alone,) = load_experiment("two-d").overridden([*SMALL, "seeds=1"]).runs()
    for name in ("encoder.safetensors", "curve.csv"):
        single = execute(alone, tmp_path / "alone").path / name
        assert (tmp_path / "two-d" / alone.run_id / name).read_bytes() == single.read_bytes()


def test_cluster_that_is_not_there_is_a_misuse_and_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    code, output, errors = call("run", "two-d", *SMALL, "--executor", "slurm", "--out", tmp_path / "runs")
    assert (code, output) == (2, "")
    assert errors == "orthoworld: --executor slurm: expected sbatch on the PATH, as on a login node of a cluster\n"
    assert not (tmp_path / "runs").exists()


def test_diverged_run_exits_one_and_is_strict_json(call, tmp_path):
    code, output, _ = call("run", "two-d", *SMALL, "train.optimizer.lr=1e30", "--out", tmp_path, "--json")
    assert code == 1
    row = strict(output)
    assert row["status"] == "diverged"
    assert row["r2_hz"] is None
    assert row["reasons"]["r2_hz"]
    code, output, _ = call("run", "two-d", *SMALL, "train.optimizer.lr=1e30", "--out", tmp_path)
    assert code == 1
    assert "diverged" in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "two-dd"], ["two-dd", "did you mean two-d?"]),
        (["run", "two-d", "--preset", "papre"], ["papre", "did you mean paper?", "quick", "best"]),
        (["run", "two-d", "mixings=spirall"], ["spirall", "did you mean spiral?", "banana"]),
        (["run", "two-d", "mixings=[[spiral]]"], ["mixings", "spiral", "banana"]),
        (["run", "two-d", "train.stpes=1"], ["train.stpes", "did you mean steps?"]),
        (["run", "two-d", "train={1: 2}"], ["train.1", "steps"]),
        (["run", "two-d", "objective={name: lejepa}"], ["objective.lam"]),
        (["run", "two-d", "steps"], ["steps", "key=value"]),
        (["run", "two-d", *SMALL, "objective.lam=2"], ["lam=2"]),
        (["run", "two-d", *SMALL, "encoder.width=0"], ["width=0"]),
        (["run", "two-d", *SMALL, "world.transition.rho=1"], ["rho=1"]),
        (["run", "two-d", *SMALL, "world.dim=3"], ["3"]),
        (["run", "two-d", *SMALL, "train.optimizer.lr=-1"], ["lr=-1"]),
        (["run", "two-d", "--workers", "0"], ["--workers"]),
        (["run", "two-d", "--group", "0"], ["--group"]),
        (["run", "two-d", "--executor", "cloud"], ["cloud", "local", "slurm"]),
        (["run", "two-d", "slurm.time=60"], ["slurm.time=60", "--executor slurm"]),
        (["run", "two-d", "--executor", "slurm", "slurm.tiem=60"], ["slurm.tiem", "did you mean time?"]),
        (["run", "two-d", "--executor", "slurm", "slurm.gpus=1", "train.device=cpu"], ["slurm.gpus=1", "train.device"]),
        (["run", "two-d", "--wrokers", "1"], ["--wrokers"]),
        (["run"], ["experiment"]),
        (["frobnicate"], ["frobnicate"]),
        (["report"], ["folder"]),
        (["report", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["list", "everything"], ["everything"]),
    ],
)
def test_misuse_is_told_in_one_line_and_exits_two(call, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    code, output, errors = call(*arguments)
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("orthoworld: ")
    for part in told:
        assert part.lower() in line.lower()
    assert list(tmp_path.iterdir()) == []


def test_failure_that_is_no_misuse_exits_one(call, monkeypatch):
    def fail():
        raise RuntimeError("no such luck")

    monkeypatch.setattr(doctor, "examine", fail)
    code, output, errors = call("doctor")
    assert (code, output) == (1, "")
    assert errors == "orthoworld: RuntimeError: no such luck (--debug shows where)\n"


def test_folder_that_cannot_be_made_is_a_misuse(call, tmp_path):
    (tmp_path / "file").write_text("")
    code, output, errors = call("run", "two-d", *SMALL, "--out", tmp_path / "file")
    assert (code, output) == (2, "")
    assert errors == f"orthoworld: --out {tmp_path / 'file'}: expected a folder that can be written (File exists)\n"


def test_reader_that_has_enough_is_no_failure():
    script = f"set -o pipefail; {COMMAND} list | true"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_traceback_is_shown_on_request_only(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["orthoworld", "run", "two-dd", "--debug"])
    with pytest.raises(orthoworld.OrthoworldError, match="two-dd"):
        cli.main()


@pytest.mark.parametrize("command", ["run", "report", "list", "doctor", "bench"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(call, command, flag):
    code, output, errors = call(command, flag)
    assert (code, errors) == (0, "")
    assert f"orthoworld {command} [OPTIONS]" in output


def test_command_without_arguments_shows_the_help_and_no_empty_error(call):
    _, output, errors = call()
    assert "orthoworld [OPTIONS] COMMAND" in output + errors
    assert "orthoworld:" not in [line.strip() for line in errors.splitlines()]


def test_list_names_everything_there_is(call):
    code, output, errors = call("list", "--json")
    assert (code, errors) == (0, "")
    found = strict(output)
    assert set(found["experiments"]) == set(config.experiment_names())
    assert set(found["mixings"]) == set(config.MIXINGS)
    assert set(found["objectives"]) == set(config.OBJECTIVES)
    assert set(found["encoders"]) == set(config.ENCODERS)
    assert found["objectives"]["lejepa"]["lam"] == "required"
    assert found["encoders"]["mlp"] == {"width": 256, "depth": 4}
    code, text, errors = call("list")
    assert (code, errors) == (0, "")
    for choices in found.values():
        for name in choices:
            assert f"  {name} " in text or f"  {name}\n" in text


def test_doctor_prints_text_or_one_object(call):
    code, output, errors = call("doctor", "--json")
    assert (code, errors) == (0, "")
    sections = strict(output)
    code, text, errors = call("doctor")
    assert (code, errors) == (0, "")
    for section, entries in sections.items():
        assert section in text.splitlines()
        for name, value in entries.items():
            assert name in text
            assert value in text


def test_report_prints_the_table_and_where_the_rest_is(call, kept):
    code, output, errors = call("report", kept)
    assert (code, errors) == (0, "")
    folder = kept / "two-d" / "report"
    assert (folder / "summary.md").read_text() in output
    assert f"1 finished runs; tables and index.html are in {folder}" in output
    assert (folder / "recovered.png").exists()


def test_report_as_json_is_one_object_for_each_experiment(call, kept):
    code, output, errors = call("report", kept / "two-d", "--json")
    assert (code, errors) == (0, "")
    assert strict(output) == {
        "experiment": "two-d",
        "folder": str(kept / "two-d" / "report"),
        "runs": 1,
        "skipped": {},
    }


def test_strict_report_fails_when_something_is_left_out(call, kept, tmp_path):
    shutil.copytree(kept / "two-d", tmp_path / "two-d")
    (tmp_path / "two-d" / "notes.txt").write_text("")
    for arguments, expected in (([], 0), (["--strict"], 1), (["--strict", "--json"], 1)):
        code, _, errors = call("report", tmp_path / "two-d", *arguments)
        assert code == expected
        assert ("left out: notes.txt" in errors) == ("--json" not in arguments)


@pytest.mark.parametrize("colours", [{}, {"FORCE_COLOR": "1"}])
def test_progress_is_silent_when_errors_go_to_no_terminal(kept, colours):
    answer = subprocess.run(
        [COMMAND, "run", "two-d", *SMALL, "--out", kept, "--json"],
        env=os.environ | colours,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert strict(answer.stdout)["status"] == "finished"


def test_json_goes_to_standard_output_while_progress_is_shown_in_a_terminal(kept):
    ours, terminal = pty.openpty()
    shown: list[bytes] = []

    def read():
        with contextlib.suppress(OSError):  # how a terminal says that its other side is closed
            while part := os.read(ours, 4096):
                shown.append(part)

    # It has to be read meanwhile: a terminal holds a few kilobytes, and its writer waits when it is full.
    reader = threading.Thread(target=read)
    reader.start()
    with subprocess.Popen(
        [COMMAND, "run", "two-d", *SMALL, "--out", kept, "--json"],
        env=os.environ | {"TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=120)
    os.close(terminal)
    reader.join(timeout=10)
    os.close(ours)
    assert process.returncode == 0
    assert b"all steps" in b"".join(shown)
    assert [strict(line)["status"] for line in output.splitlines()] == ["finished"]
