"""Run folders: written atomically, checked when read, never mistaken for what they are not."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from orthoworld.errors import ArgumentError, ResultError
from orthoworld.experiments.carry_out import carry_out
from orthoworld.results import store
from orthoworld.results.execute import execute
from orthoworld.results.store import FILES, MANIFEST, FileCheckpoint, RunFolder, collect, strict_json, write_atomically
from orthoworld.training.run import encode
from small_runs import small_spec


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return execute(small_spec(), tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of a finished run that a test may damage."""
    folder = tmp_path / "two-d" / finished.path.name
    folder.mkdir(parents=True)
    for name in (*FILES, MANIFEST):
        (folder / name).write_bytes((finished.path / name).read_bytes())
    return folder


def test_new_content_replaces_the_old(tmp_path):
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_crash_before_the_new_name_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", crash) if step == "fsync" else monkeypatch.setattr(type(path), "replace", crash)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"


def test_json_is_strict_and_plain():
    data = {
        "nan": math.nan,
        "infinite": [math.inf, -math.inf],
        "float32": np.float32(0.5),
        "int64": np.int64(3),
        "flag": np.bool_(True),
        "array": np.array([[1.0, np.nan]]),
        "tensor": torch.tensor([1, 2]),
        "scalar": torch.tensor(-math.inf),
        "tuple": (1, None, "text", False),
        3: {"nested": np.float64(2)},
    }
    assert json.loads(strict_json(data), parse_constant=no_constant) == {
        "nan": None,
        "infinite": [None, None],
        "float32": 0.5,
        "int64": 3,
        "flag": True,
        "array": [[1.0, None]],
        "tensor": [1, 2],
        "scalar": None,
        "tuple": [1, None, "text", False],
        "3": {"nested": 2.0},
    }


def test_json_of_something_else_is_refused_by_its_type():
    with pytest.raises(TypeError, match="object has no JSON form"):
        strict_json({"a": object()})


def test_checkpoint_gives_back_what_was_saved(tmp_path):
    checkpoint = FileCheckpoint(tmp_path / "checkpoint-0.pt")
    assert checkpoint.load() is None
    for step in (1, 2):
        checkpoint.save({"step": step, "weights": torch.full((3,), float(step))})
    state = checkpoint.load()
    assert state["step"] == 2
    assert torch.equal(state["weights"], torch.full((3,), 2.0))


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_truncated_checkpoint_is_refused_by_name(tmp_path, keep):
    checkpoint = FileCheckpoint(tmp_path / "checkpoint-0.pt")
    checkpoint.save({"weights": torch.zeros(1000)})
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:keep])
    with pytest.raises(ResultError, match=r"checkpoint-0\.pt is damaged.*remove it"):
        checkpoint.load()


def test_second_writer_of_a_folder_is_kept_out(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.lock() as ours:
        assert ours
        with folder.lock(stop=lambda: True) as second:
            assert not second
    with folder.lock(stop=lambda: True) as again:
        assert again


def test_second_writer_waits_until_the_folder_is_free(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    first = folder.lock()
    first.__enter__()
    waits = []

    def free_at_the_second_wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            first.__exit__(None, None, None)

    monkeypatch.setattr(store.time, "sleep", free_at_the_second_wait)
    with folder.lock() as ours:
        assert ours
    assert len(waits) == 2


def test_lock_of_a_killed_process_is_free(tmp_path):
    script = (
        "import sys, fcntl\n"
        f"file = open({str(tmp_path / 'run' / '.lock')!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"locked\n"
        with folder.lock(stop=lambda: True) as ours:
            assert not ours
        process.kill()
    with folder.lock(stop=lambda: True) as ours:
        assert ours


def test_run_is_read_as_it_was_written(finished):
    again = RunFolder(finished.path).read()
    assert again.spec == small_spec()
    assert again.metrics == finished.metrics
    assert [row["step"] for row in again.curve] == [5.0, 10.0, 15.0, 20.0]
    assert again.manifest["run_id"] == small_spec().run_id == finished.path.name


def test_finished_folder_holds_the_files_of_the_manifest_and_no_checkpoint(finished):
    visible = {entry.name for entry in finished.path.iterdir() if not entry.name.startswith(".")}
    assert visible == {*FILES, MANIFEST}
    assert set(finished.manifest["files"]) == set(FILES)


def test_values_missing_from_a_curve_leave_gaps(finished, tmp_path):
    curve = [{"step": 1.0, "loss": math.nan}, {"step": 2.0, "loss": 0.1, "bound": math.inf}]
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write(finished.spec, {"status": "finished"}, curve, finished.representation(), {})
    first, second = folder.read().curve
    assert (first["step"], second["step"], second["loss"]) == (1, 2, 0.1)
    assert all(math.isnan(value) for value in (first["loss"], first["bound"], second["bound"]))
    assert "nan" not in (folder.path / "curve.csv").read_text()


@pytest.mark.parametrize("objective", ["objectives=lejepa", "objectives=whitened-lejepa"])
def test_stored_encoder_is_the_trained_one(tmp_path, generator, objective):
    spec = small_spec(objective)
    trained = carry_out(spec).run
    stored = execute(spec, tmp_path)
    representation = stored.representation()
    x = stored.world().sample_pairs(100, generator=generator).x
    assert not representation.training
    assert (representation.whitener is not None) == (objective == "objectives=whitened-lejepa")
    assert torch.equal(encode(representation, x), trained.encode(x))


@pytest.mark.parametrize("name", FILES)
def test_tampered_file_is_refused_by_name(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ResultError, match=rf"{name} has hash"):
        RunFolder(copy).read()


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_refused_by_name(copy, name):
    (copy / name).write_bytes((copy / name).read_bytes()[:-5])
    with pytest.raises(ResultError, match=rf"{name} has hash"):
        RunFolder(copy).read()


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(ResultError, match=f"{name} is missing"):
        RunFolder(copy).read()


def test_folder_without_manifest_is_unfinished(copy):
    (copy / MANIFEST).unlink()
    assert not RunFolder(copy).finished
    with pytest.raises(ResultError, match=r"manifest\.json: the run is not finished"):
        RunFolder(copy).read()


@pytest.mark.parametrize(
    "text", ["", '{"files": ', "[]", "3", "null", "{}", '{"files": []}', '{"files": ["a.txt"]}', '{"files": null}']
)
def test_manifest_of_another_form_is_refused(copy, text):
    (copy / MANIFEST).write_text(text)
    with pytest.raises(ResultError):
        RunFolder(copy).read()
    found = collect(copy.parent)
    assert found.runs == []
    assert list(found.skipped) == [copy.name]


@pytest.mark.parametrize("crash_at", range(len(FILES) + 1))
def test_crash_while_writing_leaves_an_unfinished_run_that_can_be_completed(finished, tmp_path, monkeypatch, crash_at):
    written = []

    def crash(path, content):
        if path.suffix != ".pt":
            if len(written) == crash_at:
                raise OSError("no space left on device")
            written.append(path.name)
        write_atomically(path, content)

    folder = tmp_path / "two-d" / finished.path.name
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomically", crash)
        with pytest.raises(OSError, match="no space"):
            execute(small_spec(), tmp_path)
    assert MANIFEST not in written
    assert (folder / "checkpoint-0.pt").exists()
    assert list(collect(tmp_path).skipped) == [str(folder.relative_to(tmp_path))]
    completed = execute(small_spec(), tmp_path)
    for name in ("spec.yaml", "curve.csv", "encoder.safetensors"):
        assert (completed.path / name).read_bytes() == (finished.path / name).read_bytes()


def test_everything_but_finished_runs_is_listed(copy, tmp_path):
    root = copy.parent
    (root / "notes.txt").write_text("mine")
    (root / "summary.json").write_text("[]")
    (root / "empty").mkdir()
    (root / "unfinished").mkdir()
    (root / "unfinished" / "checkpoint-0.pt").write_bytes(b"")
    (root / "report").mkdir()
    (root / ".DS_Store").write_bytes(b"")
    found = collect(root)
    assert [run.path for run in found.runs] == [copy]
    assert set(found.skipped) == {"notes.txt", "summary.json", "empty", "unfinished"}


@pytest.mark.parametrize("stray", ["notes.txt", ".DS_Store", "report/index.html"])
def test_stray_file_beside_the_runs_hides_none_of_them(copy, tmp_path, stray):
    (copy.parent / stray).parent.mkdir(exist_ok=True)
    (copy.parent / stray).write_text("mine")
    assert [run.path for run in collect(tmp_path).runs] == [copy]


def test_runs_are_found_below_folders_of_experiments(copy, tmp_path):
    assert [run.path for run in collect(tmp_path).runs] == [copy]
    assert collect(tmp_path / "two-d").runs == collect(tmp_path).runs


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_collecting_what_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=f"{name} is no folder"):
        collect(tmp_path / name)
