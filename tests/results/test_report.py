"""The report: tables, figures and a page beside the runs."""

import csv
import dataclasses
import html.parser
import math
import re
import shutil
import sys

import pytest

from orthoworld.errors import ArgumentError, MissingExtraError
from orthoworld.experiments.config import RunSpec, load_experiment
from orthoworld.results import report as module
from orthoworld.results.execute import execute
from orthoworld.results.report import write_reports
from orthoworld.results.store import RunFolder

SMALL = (
    "objectives=lejepa",
    "encoder.width=16",
    "encoder.depth=1",
    "train.steps=4",
    "train.batch=32",
    "train.whitener_samples=1000",
    "train.evaluation_samples=300",
    "train.evaluate_every=2",
)
TEXTS = {"runs.csv", "summary.csv", "summary.md", "summary.tex", "index.html"}
FIGURES = {f"{name}.{kind}" for name in ("recovered", "curves") for kind in ("pdf", "png")}


def small_spec(mixing, *assignments):
    return load_experiment("two-d").overridden([*SMALL, f"mixings={mixing}", *assignments]).runs()[0]


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class References(html.parser.HTMLParser):
    """The addresses a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found |= {value for key, value in attributes if key in ("href", "src")}


@pytest.fixture
def few_points(monkeypatch):
    """Figures of a hundred points in a resolution that is quickly drawn."""
    sample_points = module.sample_points
    monkeypatch.setattr(module, "sample_points", lambda run: sample_points(run, 100))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two seeds, two mixings, two sources, a run of three latents, and what is no run."""
    root = tmp_path_factory.mktemp("runs")
    for spec in (
        small_spec("spiral"),
        small_spec("spiral", "seeds=1"),
        small_spec("banana"),
        small_spec("coupling", "world.dim=3"),
        small_spec("spiral", "world.source={name: generalized-normal, alpha: 4}"),
    ):
        execute(spec, root)
    (root / "two-d" / "unfinished").mkdir()
    (root / "two-d" / "unfinished" / "checkpoint-0.pt").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def written(root):
    with pytest.MonkeyPatch.context() as monkeypatch:
        sample_points = module.sample_points
        monkeypatch.setattr(module, "sample_points", lambda run: sample_points(run, 100))
        (written,) = write_reports(root)
    return written


def test_report_lies_beside_the_runs_of_its_experiment(root, written):
    assert written.experiment == "two-d"
    assert written.folder == root / "two-d" / "report"
    assert {entry.name for entry in written.folder.iterdir()} == TEXTS | FIGURES


def test_report_counts_the_runs_and_lists_what_is_none(written):
    assert written.runs == 5
    assert list(written.skipped) == ["two-d/unfinished"]
    page = (written.folder / "index.html").read_text()
    assert "5 finished runs, 1 entries left out" in page
    assert "two-d/unfinished" in page


def test_page_refers_to_every_file_and_to_no_other(written):
    found = References((written.folder / "index.html").read_text()).found
    assert found == (TEXTS | FIGURES) - {"index.html"}
    assert all((written.folder / name).stat().st_size > 0 for name in found)


def test_tables_can_be_read_and_agree(written):
    rows = read_csv(written.folder / "runs.csv")
    assert len(rows) == 5
    assert [row["status"] for row in rows] == ["finished"] * 5
    assert {row["world.source.alpha"] for row in rows} == {"", "4.0"}
    summary = read_csv(written.folder / "summary.csv")
    assert [row["runs"] for row in summary if row["mixing"] == "spiral"] in (["1", "2"], ["2", "1"])
    markdown = (written.folder / "summary.md").read_text()
    assert markdown == written.summary
    assert len(markdown.splitlines()) == 2 + len(summary)
    assert (written.folder / "summary.tex").read_text().count(r"\\") == 1 + len(summary)


def test_figures_are_what_their_names_say(written):
    for name in ("recovered", "curves"):
        assert (written.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (written.folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_same_runs_give_the_same_report(root, written, few_points):
    before = {entry.name: entry.read_bytes() for entry in written.folder.iterdir()}
    write_reports(root)
    assert {entry.name: entry.read_bytes() for entry in written.folder.iterdir()} == before


@pytest.mark.parametrize("entries", [[], ["notes.txt"]])
def test_report_on_no_run_is_refused_and_writes_nothing(tmp_path, entries):
    for name in entries:
        (tmp_path / name).write_text("")
    with pytest.raises(ArgumentError, match=r"holds no finished run.*(it is empty|notes\.txt: is no run folder)"):
        write_reports(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == entries


def test_report_on_one_run_names_the_folder_it_lies_in(root):
    path = root / "two-d" / small_spec("spiral").run_id
    with pytest.raises(ArgumentError, match=f"is the folder of one run: expected .*{path.parent}"):
        write_reports(path)


def test_copy_of_a_run_is_not_counted_twice(tmp_path, few_points):
    run = execute(small_spec("spiral"), tmp_path)
    shutil.copytree(run.path, run.path.with_name("zz-copy"))
    (written,) = write_reports(tmp_path)
    assert written.runs == 1
    assert written.skipped == {"two-d/zz-copy": f"is a copy of the run {run.spec.run_id}"}


@pytest.mark.parametrize("others", [0, 1])
def test_failed_run_is_reported_and_spoils_no_report(tmp_path, few_points, others):
    execute(small_spec("spiral", "train.optimizer.lr=1e30"), tmp_path)
    for seed in range(others):
        execute(small_spec("banana", f"seeds={seed}"), tmp_path)
    (written,) = write_reports(tmp_path)
    assert written.runs == 1 + others
    assert "diverged" in written.summary
    assert {entry.name for entry in written.folder.iterdir()} == TEXTS | FIGURES


def test_run_of_another_experiment_is_listed_and_not_mixed_in(tmp_path, few_points):
    spec = small_spec("spiral")
    execute(spec, tmp_path)
    other = execute(RunSpec.from_data(spec.resolved() | {"experiment": "mine", "seed": 7}), tmp_path)
    other.path.rename(tmp_path / "two-d" / other.path.name)
    (tmp_path / "mine").rmdir()
    execute(small_spec("spiral", "seeds=1"), tmp_path)
    (written,) = write_reports(tmp_path)
    assert (written.experiment, written.runs) == ("two-d", 2)
    assert written.skipped == {f"two-d/{other.path.name}": "belongs to the experiment mine"}


def test_run_of_an_experiment_of_ones_own_has_a_report(tmp_path, few_points):
    spec = RunSpec.from_data(small_spec("spiral").resolved() | {"experiment": "mine"})
    execute(spec, tmp_path)
    (written,) = write_reports(tmp_path)
    assert (written.experiment, written.runs) == ("mine", 1)


def test_each_experiment_has_its_own_report(tmp_path, few_points, monkeypatch):
    monkeypatch.setattr(module, "experiment_description", lambda name: f"about {name}")
    spec = small_spec("spiral")
    execute(spec, tmp_path)
    execute(RunSpec.from_data(spec.resolved() | {"experiment": "mine"}), tmp_path)
    (tmp_path / "notes.txt").write_text("")
    reports = {written.experiment: written for written in write_reports(tmp_path)}
    assert {name: written.folder for name, written in reports.items()} == {
        "mine": tmp_path / "mine" / "report",
        "two-d": tmp_path / "two-d" / "report",
    }
    assert [name for written in reports.values() for name in written.skipped] == ["notes.txt"]


def test_best_seed_is_the_one_with_the_least_held_out_loss(root, monkeypatch):
    shown = []
    sample_points = module.sample_points

    def remember(run):
        shown.append(run)
        return sample_points(run, 100)

    monkeypatch.setattr(module, "sample_points", remember)
    runs = [RunFolder(root / "two-d" / small_spec("spiral", f"seeds={seed}").run_id).read() for seed in (0, 1)]
    module._figures(runs)
    losses = [run.metrics["loss"] for run in runs]
    assert shown == [runs[losses.index(min(losses))]]
    failed = dataclasses.replace(runs[losses.index(min(losses))], metrics={"status": "diverged", "loss": None})
    module._figures([failed, runs[losses.index(max(losses))]])
    assert shown[1] == runs[losses.index(max(losses))]


def test_text_of_others_is_escaped_on_the_page(tmp_path):
    execute(small_spec("spiral"), tmp_path)
    (tmp_path / "<script>alert(1)<").mkdir()
    (written,) = write_reports(tmp_path)
    assert "<script>" not in (written.folder / "index.html").read_text()


@pytest.mark.parametrize("package", ["pandas", "matplotlib", "jinja2"])
def test_report_without_its_packages_says_how_to_get_them(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*pip install orthoworld\[report\]"):
        write_reports(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_report_on_no_folder_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="nowhere is no folder"):
        write_reports(tmp_path / "nowhere")


def test_numbers_on_the_page_are_those_of_the_runs(root, written):
    run = RunFolder(root / "two-d" / small_spec("coupling", "world.dim=3").run_id).read()
    page = (written.folder / "index.html").read_text()
    assert math.isfinite(run.metrics["orth_err"])
    assert re.search(rf"<td>{run.metrics['orth_err']:.5f}</td>", page)
