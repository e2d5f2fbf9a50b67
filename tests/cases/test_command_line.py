"""Cases C reported by users: the command line, its configuration and its results."""

import csv
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
import yaml

import orthoworld
from orthoworld import cli
from orthoworld.errors import ConfigError
from orthoworld.experiments.config import RunSpec, load_experiment, load_yaml
from orthoworld.results.execute import execute
from orthoworld.results.store import FILES, MANIFEST, RunFolder, collect
from small_runs import SMALL, small_spec, start


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return execute(small_spec(), tmp_path_factory.mktemp("finished"))


def test_c2_yaml_floats():
    assert load_yaml("lr: 1e-3", "here") == {"lr": 0.001}
    assert load_yaml("lr: 1E5", "here") == {"lr": 100000.0}
    assert load_yaml("mode: on", "here") == {"mode": "on"}
    assert small_spec("train.optimizer.lr=1e-3").train.optimizer.lr == 0.001
    assert small_spec("train.optimizer.lr=1E5").train.optimizer.lr == 100000.0
    with pytest.raises(ConfigError, match=r"^train\.optimizer\.lr='abc': .*number"):
        small_spec("train.optimizer.lr=abc")
    with pytest.raises(ConfigError, match=r"^objective\.pooled='on': .*boolean"):
        small_spec("objective.pooled=on")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lamb", "0.5"], ["--lamb"]),  # the reference takes it and runs with the lambda of its own table
        (["lamb=0.5"], ["unknown key lamb"]),
        (["objectives=whitened-lejepa", "objective.lam=0.5"], ["unknown key objective.lam", "shape"]),
        (["objective.lam=0.5"], ["unknown key objective.lam", "shape"]),  # one of the experiment's objectives has none
        (["mixings=spiral", "world.mixing.layers=4"], ["unknown key world.mixing.layers"]),
        (["slurm.partition=cpu"], ["slurm.partition=cpu", "--executor slurm"]),
    ],
)
def test_c3_inapplicable_flag(monkeypatch, capfd, tmp_path, arguments, told):
    monkeypatch.setattr(sys, "argv", ["orthoworld", "run", "two-d", *arguments, "--out", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output, errors = capfd.readouterr()
    assert (ended.value.code, output) == (2, "")
    (line,) = errors.splitlines()
    for part in told:
        assert part in line
    assert not (tmp_path / "runs").exists()


def test_c3_applicable_flag_is_applied_to_every_run():
    experiment = load_experiment("grid", "paper").overridden(["objective.lam=0.5"])
    assert {spec.objective.lam for spec in experiment.runs()} == {0.5}
    assert len(experiment.runs()) == len({spec.run_id for spec in experiment.runs()})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["scalling"], ["scalling", "did you mean scaling?", "two-d"]),
        (["scaling", "dims=3"], ["dims", "3", "64"]),
        (["gennorm", "alphas=[]"], ["alphas", "0.5"]),
        (["two-d", "--preset", "fast"], ["fast", "quick", "paper", "best"]),
        (["two-d", "mixings=torus"], ["mixings", "torus", "spiral", "banana", "sinusoid", "coupling"]),
        (["two-d", "objectives=gennorm"], ["objectives", "gennorm", "lejepa"]),
        (["two-d", "objective={name: lejepa}", "objectives=whitened-lejepa"], ["objective.lam"]),
        (["two-d", "world.source=generalized-normal"], ["world.source.alpha"]),
    ],
)
def test_c4_missing_required_option(monkeypatch, capfd, tmp_path, arguments, told):
    monkeypatch.setattr(sys, "argv", ["orthoworld", "run", *arguments, "--out", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output, errors = capfd.readouterr()
    assert (ended.value.code, output) == (2, "")
    (line,) = errors.splitlines()
    for part in told:
        assert part in line
    assert not (tmp_path / "runs").exists()


def test_c6_strict_json(finished, tmp_path):
    metrics = {
        "status": "finished",
        "nan": float("nan"),
        "infinite": float("inf"),
        "negative": -np.inf,
        "float32": np.float32("nan"),
        "scalar": torch.tensor(torch.inf),
        "tensor": torch.tensor([1.0, torch.nan]),
        "list": [0.5, float("nan")],
        "fine": np.float32(0.5),
        "count": np.int64(3),
        "given": float("nan"),
        "reasons": {"given": "the world has none"},
    }
    folder = RunFolder(tmp_path)
    folder.write(finished.spec, metrics, [], finished.representation(), {})
    stored = strict((tmp_path / "metrics.json").read_text())
    for key in ("nan", "infinite", "negative", "float32", "scalar"):
        assert stored[key] is None
    assert (stored["tensor"], stored["list"]) == ([1.0, None], [0.5, None])
    assert (stored["fine"], stored["count"]) == (0.5, 3)
    missing = {"nan", "infinite", "negative", "float32", "scalar", "tensor", "list", "given"}
    assert set(stored["reasons"]) == missing
    assert stored["reasons"]["given"] == "the world has none"
    strict((finished.path / "metrics.json").read_text())
    strict((finished.path / MANIFEST).read_text())


def test_c7_aggregation_of_a_messy_folder(tmp_path):
    good = [
        execute(small_spec(*changes), tmp_path)
        for changes in ([], ["seeds=1"], ["world.source={name: generalized-normal, alpha: 4}", "train.restarts=2"])
    ]
    folder = tmp_path / "two-d"
    truncated = execute(small_spec("seeds=2"), tmp_path).path
    text = (truncated / "metrics.json").read_text()
    (truncated / "metrics.json").write_text(text[: len(text) // 2])
    other = execute(RunSpec.from_data(small_spec().resolved() | {"experiment": "other"}), tmp_path).path
    other.rename(folder / "z-other")
    other.parent.rmdir()
    (folder / "list.json").write_text("[1, 2]")
    (folder / "summary.csv").write_text("a,b\n1,2\n")
    (folder / "foreign").mkdir()
    (folder / "foreign" / MANIFEST).write_text('{"files": ["a.txt"]}')

    with start("report", folder, "--strict", "--json") as process:
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (1, "")
    found = strict(output)
    assert found["runs"] == 3
    assert set(found["skipped"]) == {truncated.name, "z-other", "list.json", "summary.csv", "foreign"}
    with (folder / "report" / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run_id"] for row in rows} == {run.spec.run_id for run in good}
    assert {(row["world.source.alpha"], row["train.restarts"], row["seed"]) for row in rows} == {
        ("", "1", "0"),
        ("", "1", "1"),
        ("4.0", "2", "0"),
    }


def test_c10_two_writers(tmp_path):
    slow = ("train.steps=100", "train.evaluate_every=20")
    with start("run", "two-d", *SMALL, *slow, "--out", tmp_path, "--json") as one:  # noqa: SIM117
        with start("run", "two-d", *SMALL, *slow, "--out", tmp_path, "--json") as other:
            answers = [process.communicate(timeout=120) for process in (one, other)]
    assert [process.returncode for process in (one, other)] == [0, 0]
    (run,) = collect(tmp_path).runs
    assert collect(tmp_path).skipped == {}
    for output, errors in answers:
        assert errors == ""
        row = strict(output)
        assert row["run_id"] == run.spec.run_id
        # The second waited for the first and read its result.
        assert row["wall_s"] == run.metrics["wall_s"]


@pytest.mark.parametrize("content", ["nothing", "no metrics", "failed run"])
def test_c12_headless_plots(finished, tmp_path, content):
    root = tmp_path / "runs"
    root.mkdir()
    if content == "failed run":
        execute(small_spec("train.optimizer.lr=1e30"), root)
    elif content == "no metrics":
        metrics = dict.fromkeys(finished.metrics) | {"status": "finished", "wall_s": 0.0, "reasons": {}}
        folder = RunFolder(root / "two-d" / finished.path.name)
        folder.path.mkdir(parents=True)
        folder.write(finished.spec, metrics, [{"step": 5.0}], finished.representation(), {})
    environment = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    with start("report", root, env=environment) as process:
        output, errors = process.communicate(timeout=120)
    if content == "nothing":
        assert (process.returncode, output) == (2, "")
        assert errors == f"orthoworld: {root} holds no finished run: expected a folder of runs (it is empty)\n"
        return
    assert (process.returncode, errors) == (0, "")
    folder = root / "two-d" / "report"
    assert "1 finished runs" in output
    for name in ("recovered.png", "recovered.pdf", "curves.png", "curves.pdf", "index.html", "summary.csv"):
        assert (folder / name).stat().st_size > 0


def test_c13_provenance(finished, tmp_path):
    manifest = json.loads((finished.path / MANIFEST).read_text())
    assert manifest["orthoworld"] == orthoworld.__version__
    assert manifest["commit"] is None or len(manifest["commit"]) >= 7
    assert manifest["torch"] == torch.__version__
    assert manifest["device"] == "cpu"
    assert set(manifest["files"]) == set(FILES)
    assert finished.metrics["wall_s"] > 0
    described = yaml.safe_load((finished.path / "spec.yaml").read_text())
    assert described == small_spec().resolved()
    assert described["seed"] == 0

    again = execute(RunSpec.from_data(described), tmp_path)
    assert again.path.name == finished.path.name == manifest["run_id"]
    of_the_machine = ("wall_s", "peak_rss_mb")
    assert {key: value for key, value in again.metrics.items() if key not in of_the_machine} == {
        key: value for key, value in finished.metrics.items() if key not in of_the_machine
    }
    assert (again.path / "encoder.safetensors").read_bytes() == (finished.path / "encoder.safetensors").read_bytes()


def test_c14_interrupt(tmp_path):
    long = ("train.steps=600", "train.evaluate_every=200")
    spec = small_spec(*long)
    path = tmp_path / "interrupted" / "two-d" / spec.run_id
    command = ("run", "two-d", *SMALL, *long, "--out", tmp_path / "interrupted", "--json")
    with start(*command) as process:
        deadline = time.monotonic() + 60
        while not (path / ".lock").exists():
            assert time.monotonic() < deadline, "the run does not begin"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert errors == "orthoworld: interrupted; the same command goes on from here\n"
    assert (path / "checkpoint-0.pt").exists()
    assert not (path / MANIFEST).exists()
    done = torch.load(path / "checkpoint-0.pt", weights_only=True)["step"]
    assert 0 < done < 600

    with start(*command) as process:
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert strict(output)["steps"] == 600
    assert not (path / "checkpoint-0.pt").exists()
    undisturbed = execute(spec, tmp_path / "undisturbed")
    for name in ("encoder.safetensors", "curve.csv"):
        assert (path / name).read_bytes() == (undisturbed.path / name).read_bytes()
