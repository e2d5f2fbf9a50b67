"""Tables of runs: every hyper-parameter a column, one row a setting, and forms that other programs read."""

import csv
import io
import math
import re
import sys
from pathlib import Path

import pytest

from orthoworld.errors import MissingExtraError
from orthoworld.experiments.config import load_experiment
from orthoworld.results.store import StoredRun
from orthoworld.results.tables import SUMMARY, by_setting, flatten, runs_table, summary_table, to_latex, to_markdown

pandas = pytest.importorskip("pandas")


def stored(*assignments, metrics=None, **changes):
    """A run as read from a folder, with invented measurements."""
    (spec,) = load_experiment("two-d").overridden(["objectives=lejepa", *assignments]).runs()
    found = {"status": "finished", "r2_hz": 0.9, "orth_err": 0.25, "r2_hz_per_dim": [0.8, 1.0], "reasons": {}}
    return StoredRun(Path("nowhere"), spec, (metrics or found) | changes, [], {})


@pytest.fixture
def runs():
    return [
        stored("mixings=spiral", "seeds=0", r2_hz=0.9),
        stored("mixings=spiral", "seeds=1", r2_hz=0.7),
        stored("mixings=banana", r2_hz=None, reasons={"r2_hz": "the embedding is not finite"}, status="diverged"),
        stored("mixings=spiral", "objective={name: vicreg}"),
        stored("mixings=spiral", "world.source={name: generalized-normal, alpha: 4}"),
    ]


def test_leaves_of_nested_data_have_dotted_names():
    assert list(flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": None})) == [("a.b.c", 1), ("d", [1, 2]), ("e", None)]


def test_every_hyper_parameter_is_a_column(runs):
    table = runs_table(runs)
    for run in runs:
        for name, _ in flatten(run.spec.resolved()):
            assert name in table.columns
    assert {"seed", "train.restarts", "world.source.alpha", "world.transition.rho", "objective.lam"} <= set(
        table.columns
    )
    assert table["seed"].tolist() == [0, 1, 0, 0, 0]
    assert table["run_id"].tolist() == [run.spec.run_id for run in runs]


def test_hyper_parameter_that_a_run_lacks_is_empty(runs):
    table = runs_table(runs)
    assert table["world.source.alpha"].isna().tolist() == [True, True, True, True, False]
    assert table["objective.lam"].isna().tolist() == [False, False, False, True, False]


def test_reasons_stand_beside_missing_values(runs):
    row = runs_table(runs).iloc[2]
    assert math.isnan(row["r2_hz"])
    assert row["reasons"] == "r2_hz: the embedding is not finite"


def test_table_of_runs_survives_csv(runs):
    rows = list(csv.DictReader(io.StringIO(runs_table(runs).to_csv(index=False))))
    assert [row["objective.name"] for row in rows] == ["lejepa", "lejepa", "lejepa", "vicreg", "lejepa"]
    assert [row["r2_hz"] for row in rows] == ["0.9", "0.7", "", "0.9", "0.9"]
    assert float(rows[4]["world.source.alpha"]) == 4


def test_runs_that_differ_in_the_seed_alone_share_a_row(runs):
    groups = by_setting(runs)
    assert sum(len(members) for members in groups.values()) == len(runs)
    assert sorted(len(members) for members in groups.values()) == [1, 1, 1, 2]
    assert [run.spec.seed for run in next(members for members in groups.values() if len(members) == 2)] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([[]], ["lejepa"]),
        ([["objective.lam=0.5"], ["objective.lam=0.25"]], ["lejepa (lam=0.5)", "lejepa (lam=0.25)"]),
        ([["train.steps=10"], ["train.steps=20"]], ["lejepa (steps=10)", "lejepa (steps=20)"]),
        (
            [["objective.lam=0.5", "train.batch=8"], ["objective.lam=0.5", "train.batch=4"], ["objective.lam=0.1"]],
            ["lejepa (lam=0.5, batch=8)", "lejepa (lam=0.5, batch=4)", "lejepa (lam=0.1, batch=256)"],
        ),
    ],
)
def test_settings_of_one_objective_are_told_apart_by_the_fewest_keys(changes, labels):
    groups = by_setting([stored("mixings=spiral", *change) for change in changes])
    assert [objective for _, objective in groups] == labels


def test_summary_has_means_and_spreads(runs):
    table = summary_table(runs)
    row = table[(table["mixing"] == "spiral") & (table["runs"] == 2)].iloc[0]
    assert row["status"] == "finished"
    # Mean of 0.9 and 0.7; standard deviation sqrt(2) * 0.1.
    assert row["R2(h->z)"] == "0.80000 +- 0.14142"
    assert row["orthogonality error"] == "0.25000 +- 0.00000"


def test_failed_runs_stay_in_the_summary():
    runs = [
        stored("mixings=spiral", "seeds=0", r2_hz=0.5),
        stored("mixings=spiral", "seeds=1", r2_hz=None, status="diverged"),
    ]
    row = summary_table(runs).iloc[0]
    assert row["runs"] == 2
    assert row["status"] == "1 finished, 1 diverged"
    assert row["R2(h->z)"] == "0.50000 (1 of 2)"


def test_measure_that_no_run_has_is_a_dash():
    assert summary_table([stored("mixings=spiral", r2_hz=None)]).iloc[0]["R2(h->z)"] == "-"


def test_tables_of_no_runs_are_empty():
    assert len(runs_table([])) == 0
    assert list(summary_table([]).columns) == ["mixing", "objective", "runs", "status", *SUMMARY.values()]
    assert to_markdown(summary_table([])).count("\n") == 2
    assert r"\begin{tabular}" in to_latex(summary_table([]))


def test_markdown_has_as_many_cells_in_every_line(runs):
    table = summary_table(runs)
    lines = to_markdown(table).splitlines()
    assert len(lines) == 2 + len(table)
    assert {line.count("|") for line in lines} == {len(table.columns) + 1}
    assert lines[2].split("|")[1].strip() == "spiral"


def test_latex_has_as_many_cells_in_every_line(runs):
    table = summary_table(runs)
    body = to_latex(table).split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == len(table)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.columns) - 1}
    assert all(line.endswith(r"\\") for line in body)
    assert r"$\pm$" in body[0]


def test_latex_escapes_what_has_a_meaning_there():
    settings = [stored("mixings=spiral", f"train.evaluate_every={every}") for every in (5, 10)]
    text = to_latex(summary_table(settings))
    assert "every=5" in text
    assert not re.search(r"(?<!\\)[_#%]", text)


def test_tables_without_pandas_say_how_to_get_it(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in (runs_table, summary_table):
        with pytest.raises(MissingExtraError, match=r"pip install orthoworld\[report\]"):
            table(runs)
