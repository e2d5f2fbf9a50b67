"""Run folders: one folder a run, written atomically, complete when its manifest is there.

`runs/<experiment>/<run id>/` holds `spec.yaml`, `metrics.json`, `curve.csv`, `encoder.safetensors` and, written last,
`manifest.json` with the hash of each file. While a run is going on it holds `checkpoint-<restart>.pt` and a lock.
"""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
import yaml

from orthoworld.errors import ArgumentError, ResultError
from orthoworld.experiments.build import build_encoder, build_run_world
from orthoworld.experiments.config import RunSpec, load_yaml
from orthoworld.objectives.whitening import Whitener
from orthoworld.training.run import Representation
from orthoworld.worlds.world import World

MANIFEST = "manifest.json"
FILES = ("spec.yaml", "metrics.json", "curve.csv", "encoder.safetensors")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either wholly there or not at all, whenever the process or the machine dies.

    The content goes to a temporary file in the same folder, is flushed to the disk, and takes the name in one step.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def strict_json(data: Any) -> str:
    """Return JSON that every parser reads: no NaN and no infinity, which become null."""
    return json.dumps(_plain(data), allow_nan=False, sort_keys=True, indent=1)


def _plain(value: Any) -> Any:
    """Return `value` as JSON's types; tensors and numpy scalars become numbers, numbers that are not finite None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form: expected numbers, strings, lists and mappings")


def with_reasons(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON's types, with an entry in `reasons` for each value that is null or holds one."""
    plain = {key: _plain(value) for key, value in metrics.items()}
    reasons = dict(metrics.get("reasons", {}))
    for key, value in plain.items():
        if _holds_null(value):
            reasons.setdefault(key, f"the value is {metrics[key]}")
    return {**plain, "reasons": reasons}


def _holds_null(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(_holds_null(entry) for entry in inside)


class FileCheckpoint:
    """A checkpoint in one file, replaced atomically.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, Any] | None:
        """Return the state last saved, or None.

        Raises:
            ResultError: the file is damaged.
        """
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ResultError(f"{self.path} is damaged: remove it to start the run afresh") from error
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file by one that holds `state`."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.path, buffer.getvalue())


LOCK_POLL_SECONDS = 0.2


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, stop: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold a file against other processes, after waiting for one that has it; the system frees it if we die.

    Yields:
        Whether it is ours; False when `stop` answered True while waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while not (ours := _try_lock(file)) and not stop():
            time.sleep(LOCK_POLL_SECONDS)
        yield ours


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def finished(self) -> bool:
        """Whether the manifest, which is written last, is there."""
        return (self.path / MANIFEST).exists()

    def checkpoint(self, restart: int) -> FileCheckpoint:
        """Return where a restart keeps its state."""
        return FileCheckpoint(self.path / f"checkpoint-{restart}.pt")

    @contextlib.contextmanager
    def lock(self, stop: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold the folder against other writers; see `locked`."""
        with locked(self.path / ".lock", stop) as ours:
            yield ours

    def write(
        self,
        spec: RunSpec,
        metrics: Mapping[str, Any],
        curve: Sequence[Mapping[str, float]],
        representation: Representation,
        provenance: Mapping[str, Any],
    ) -> None:
        """Write the files of a finished run, its manifest last, and remove what is no longer needed.

        The checkpoint of a run that diverged is left: it is the last good state.
        """
        contents = {
            "spec.yaml": yaml.safe_dump(spec.resolved(), sort_keys=False).encode(),
            "metrics.json": strict_json(with_reasons(metrics)).encode(),
            "curve.csv": _csv(curve).encode(),
            "encoder.safetensors": safetensors.torch.save(
                {name: tensor.contiguous() for name, tensor in representation.state_dict().items()}
            ),
        }
        for name, content in contents.items():
            write_atomically(self.path / name, content)
        manifest = {
            "run_id": spec.run_id,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
            **provenance,
        }
        write_atomically(self.path / MANIFEST, strict_json(manifest).encode())
        for leftover in self.path.glob(".*.tmp"):  # of a process that was killed while writing
            leftover.unlink()
        if metrics.get("status") != "diverged":
            for checkpoint in self.path.glob("checkpoint-*.pt"):
                checkpoint.unlink()

    def read(self) -> "StoredRun":
        """Return the run that is kept here.

        Raises:
            ResultError: the run is not finished, or a file is missing, damaged or not what the manifest says.
        """
        if not self.finished:
            raise ResultError(f"{self.path} has no {MANIFEST}: the run is not finished")
        manifest = self._json(MANIFEST)
        hashes = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(hashes, dict):
            raise ResultError(f"{self.path / MANIFEST} lists no files: it is not the manifest of a run")
        for name in FILES:
            expected = hashes.get(name)
            if expected is None or not (self.path / name).exists():
                raise ResultError(f"{self.path}: {name} is missing; remove the folder to run it again")
            found = hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            if found != expected:
                raise ResultError(
                    f"{self.path / name} has hash {found[:12]}: the manifest says {expected[:12]}; remove the "
                    "folder to run it again"
                )
        spec = RunSpec.from_data(load_yaml((self.path / "spec.yaml").read_text(), str(self.path / "spec.yaml")))
        return StoredRun(self.path, spec, self._json("metrics.json"), self._curve(), manifest)

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except ValueError as error:
            raise ResultError(f"{self.path / name} is no JSON: {error}") from None

    def _curve(self) -> list[dict[str, float]]:
        with (self.path / "curve.csv").open(newline="") as file:
            return [
                {key: float(value) if value else math.nan for key, value in row.items()} for row in csv.DictReader(file)
            ]


@dataclass(frozen=True)
class StoredRun:
    """A finished run as read from its folder."""

    path: Path
    spec: RunSpec
    metrics: dict[str, Any]
    curve: list[dict[str, float]]
    manifest: dict[str, Any]

    def world(self) -> World:
        """Return the world of the run."""
        return build_run_world(self.spec, self.metrics["restart"])

    def representation(self) -> Representation:
        """Return the trained encoder, on the CPU, in evaluation mode."""
        tensors = safetensors.torch.load_file(self.path / "encoder.safetensors")
        encoder = build_encoder(self.spec, self.world())
        mean = tensors.get("whitener.mean")
        representation = Representation(encoder, None if mean is None else Whitener(len(mean)))
        representation.load_state_dict(tensors)
        return representation.eval()


def _csv(rows: Sequence[Mapping[str, float]]) -> str:
    """Return rows as CSV with the union of their columns; a value that is not finite is left empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: value for key, value in row.items() if math.isfinite(value)})
    return buffer.getvalue()


@dataclass(frozen=True)
class Collected:
    """What a folder of runs holds: the finished runs, and the entries that are none, with the reason."""

    runs: list[StoredRun]
    skipped: dict[str, str]


REPORT = "report"
"""Name of the folder a report is written to, beside the run folders."""


def collect(root: Path) -> Collected:
    """Read every finished run below `root`; whatever else lies there is listed, never read as a run.

    Raises:
        ArgumentError: `root` is no folder, or that of a single run.
    """
    if not root.is_dir():
        raise ArgumentError(f"{root} is no folder: expected one that `orthoworld run` has written")
    if (root / MANIFEST).exists():
        raise ArgumentError(f"{root} is the folder of one run: expected the folder it lies in, {root.parent}")
    runs: list[StoredRun] = []
    skipped: dict[str, str] = {}
    for entry in _entries(root):
        name = str(entry.relative_to(root))
        try:
            if not entry.is_dir():
                raise ResultError("is no run folder")
            run = RunFolder(entry).read()
            if any(run.spec == other.spec and run.path.parent == other.path.parent for other in runs):
                raise ResultError(f"is a copy of the run {run.spec.run_id}")
            runs.append(run)
        except (ResultError, ValueError, OSError) as error:
            skipped[name] = str(error)
    return Collected(runs, skipped)


def _entries(root: Path) -> Iterator[Path]:
    """Yield what lies in `root` and in those of its folders that hold folders and are no run folders themselves."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".") or entry.name == REPORT:
            continue
        inside = {item.name for item in entry.iterdir()} if entry.is_dir() else set()
        is_run = inside & {*FILES, MANIFEST, ".lock"} or any(name.startswith("checkpoint-") for name in inside)
        if not is_run and any((entry / name).is_dir() for name in inside):
            yield from _entries(entry)
        else:
            yield entry
