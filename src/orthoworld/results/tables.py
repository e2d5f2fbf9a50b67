"""Tables: from runs to rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orthoworld.extras import require
from orthoworld.results.store import StoredRun

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = {
    "r2_hz": "R2(h->z)",
    "orth_err": "orthogonality error",
    "predicted_orth_err": "predicted by shrinkage",
    "bound_controlled": "bound (latents known)",
    "true_error": "true error",
    "linear_oracle_r2_hz": "R2 of the linear oracle",
}
"""Columns of the summary: metric to heading."""


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `("a.b", value)` for every leaf of nested mappings; lists are leaves."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def runs_table(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Return one row for each run: its id, every hyper-parameter of its spec, and every metric.

    Reasons for missing values are in the column `reasons`.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = require("pandas", "report")
    rows = []
    for run in runs:
        spec = dict(flatten(run.spec.resolved()))
        metrics = {key: value for key, value in run.metrics.items() if key != "reasons"}
        reasons = "; ".join(f"{key}: {why}" for key, why in run.metrics.get("reasons", {}).items())
        rows.append({"run_id": run.spec.run_id, **spec, **metrics, "reasons": reasons})
    return pandas.DataFrame(rows)


def summary_table(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Return one row for each setting: mean and standard deviation over seeds of the main metrics.

    Runs that did not finish well are counted in the column `status` and are part of the means, unless a metric of
    theirs does not exist.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = require("pandas", "report")
    rows = []
    for (mixing, objective), members in by_setting(runs).items():
        row = {"mixing": mixing, "objective": objective, "runs": len(members), "status": _statuses(members)}
        for metric, heading in SUMMARY.items():
            row[heading] = _mean_and_spread([run.metrics.get(metric) for run in members])
        rows.append(row)
    return pandas.DataFrame(rows, columns=["mixing", "objective", "runs", "status", *SUMMARY.values()])


def by_setting(runs: Sequence[StoredRun]) -> dict[tuple[str, str], list[StoredRun]]:
    """Return the runs that differ in nothing but the seed together, by mixing and a label for the objective.

    The label is the objective's name; where settings share it, the fewest keys that tell them apart are added.
    """
    settings: dict[tuple[str, str], dict[str, list[StoredRun]]] = {}
    for run in runs:
        name = (run.spec.world.mixing.name, run.spec.objective.name)
        key = repr([leaf for leaf in flatten(run.spec.resolved()) if leaf[0] != "seed"])
        settings.setdefault(name, {}).setdefault(key, []).append(run)
    groups = {}
    for (mixing, objective), members in settings.items():
        for members_of_one, difference in zip(members.values(), _differences(list(members.values())), strict=True):
            groups[mixing, objective + difference] = members_of_one
    return groups


def _differences(settings: Sequence[Sequence[StoredRun]]) -> list[str]:
    """Return ` (steps=4000)` for each setting: keys are added until all settings are told apart."""
    leaves = [dict(flatten(members[0].spec.resolved())) for members in settings]
    labels = [""] * len(settings)
    for key in dict.fromkeys(key for leaf in leaves for key in leaf if key != "seed"):
        if len(set(labels)) == len(labels):
            break
        values = [leaf.get(key) for leaf in leaves]
        finer = [f"{label}, {key.split('.')[-1]}={value}" for label, value in zip(labels, values, strict=True)]
        if len(set(finer)) > len(set(labels)):
            labels = finer
    return [f" ({label.removeprefix(', ')})" if label else "" for label in labels]


def _statuses(runs: Sequence[StoredRun]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.metrics["status"]] = counts.get(run.metrics["status"], 0) + 1
    return ", ".join(status if len(counts) == 1 else f"{count} {status}" for status, count in counts.items())


def _mean_and_spread(values: Sequence[float | None]) -> str:
    """Return `mean +- standard deviation` of the values that exist, and how many do where some do not."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = sum(known) / len(known)
    text = f"{mean:.5f}"
    if len(known) > 1:
        spread = (sum((value - mean) ** 2 for value in known) / (len(known) - 1)) ** 0.5
        text += f" +- {spread:.5f}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def to_markdown(table: pd.DataFrame) -> str:
    """Return the table in Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines) + "\n"


def to_latex(table: pd.DataFrame) -> str:
    """Return the table in LaTeX, to be read with the package booktabs."""
    return str(table.rename(columns=_latex).map(lambda value: _latex(str(value))).to_latex(index=False))


LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "_#%&{}"},
    "R2": "$R^2$",
    "+-": r"$\pm$",
    "->": r"$\to$",
}
"""What has a meaning in LaTeX, or a sign there."""


def _latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda found: LATEX[found[0]], text)
