"""The report on an experiment: tables, figures, and a page that shows them."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import orthoworld
from orthoworld.errors import ArgumentError
from orthoworld.experiments.config import experiment_description
from orthoworld.extras import require
from orthoworld.results.figures.curves import curves_figure
from orthoworld.results.figures.recovered import recovered_figure
from orthoworld.results.points import Points, sample_points
from orthoworld.results.store import REPORT, StoredRun, collect, write_atomically
from orthoworld.results.tables import by_setting, runs_table, summary_table, to_latex, to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """What was written, and what lies in the folder that is no finished run of the experiment."""

    experiment: str
    folder: Path
    summary: str
    runs: int
    skipped: dict[str, str]


def write_reports(root: Path) -> list[Report]:
    """Write a report beside the runs of each experiment found below `root`.

    Raises:
        ArgumentError: `root` is no folder, or holds no finished run.
        MissingExtraError: the extra `report` is not installed.
    """
    for module in ("pandas", "matplotlib", "jinja2"):
        require(module, "report")
    found = collect(root)
    by_folder: dict[Path, list[StoredRun]] = {}
    for run in found.runs:
        by_folder.setdefault(run.path.parent, []).append(run)
    if not by_folder:
        entries = "; ".join(f"{name}: {why}" for name, why in found.skipped.items())
        raise ArgumentError(f"{root} holds no finished run: expected a folder of runs ({entries or 'it is empty'})")
    reports: list[Report] = []
    for folder, runs in by_folder.items():
        # A stray run of another experiment is listed, not mixed in.
        (experiment, _), *_ = Counter(run.spec.experiment for run in runs).most_common(1)
        own = [run for run in runs if run.spec.experiment == experiment]
        strays = {
            str(run.path.relative_to(root)): f"belongs to the experiment {run.spec.experiment}"
            for run in runs
            if run.spec.experiment != experiment
        }
        below = {name: why for name, why in found.skipped.items() if (root / name).parent == folder}
        elsewhere = {name: why for name, why in found.skipped.items() if (root / name).parent not in by_folder}
        first = elsewhere if not reports else {}  # what lies beside the experiments is told once
        reports.append(_write(root, folder, own, first | below | strays))
    return reports


def _write(root: Path, folder: Path, runs: Sequence[StoredRun], skipped: Mapping[str, str]) -> Report:
    target = folder / REPORT
    target.mkdir(exist_ok=True)
    experiment = runs[0].spec.experiment
    summary = summary_table(runs)
    markdown = to_markdown(summary)
    figures = _figures(runs)
    texts = {
        "runs.csv": runs_table(runs).to_csv(index=False),
        "summary.csv": summary.to_csv(index=False),
        "summary.md": markdown,
        "summary.tex": to_latex(summary),
        "index.html": _page(root, experiment, runs, skipped, summary.to_html(index=False, border=0), figures),
    }
    for name, text in texts.items():
        write_atomically(target / name, text.encode())
    for figure in figures:
        for kind in ("pdf", "png"):
            write_atomically(target / f"{figure.name}.{kind}", _rendered(figure.figure, kind))
    return Report(experiment, target, markdown, len(runs), dict(skipped))


@dataclass(frozen=True)
class _NamedFigure:
    name: str
    heading: str
    caption: str
    figure: Figure


def _figures(runs: Sequence[StoredRun]) -> list[_NamedFigure]:
    rows: dict[str, dict[str, Points]] = {}
    captions: dict[tuple[str, str], str] = {}
    curves: dict[str, dict[str, list[list[dict[str, float]]]]] = {}
    for (mixing, objective), members in by_setting(runs).items():
        curves.setdefault(mixing, {})[objective] = [run.curve for run in members]
        best = min(members, key=_loss)
        if best.spec.world.dim == 2 and best.spec.out_dim in (None, 2):
            rows.setdefault(mixing, {})[objective] = sample_points(best)
            captions[mixing, objective] = _caption(best)
    return [
        _NamedFigure(
            "recovered",
            "Latents, observations, recovered latents",
            "Recovered latents are centred and turned onto the true ones, not scaled; colour is the angle and the "
            "radius of the true latents. Of several seeds the one with the least held-out loss is shown.",
            recovered_figure(rows, captions),
        ),
        _NamedFigure(
            "curves",
            "Training curves",
            "All three are 0 for a perfect encoder. Median and range over seeds; held-out, the bound with the latents "
            "as control variates.",
            curves_figure(curves),
        ),
    ]


def _loss(run: StoredRun) -> float:
    loss = run.metrics.get("loss")
    return math.inf if loss is None else loss


def _caption(run: StoredRun) -> str:
    if run.metrics["status"] != "finished":
        return str(run.metrics["status"])
    r2, error = run.metrics["r2_hz"], run.metrics["orth_err"]
    return "" if r2 is None or error is None else f"$R^2$ {r2:.4f}, orth. error {error:.3f}"


def _rendered(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Without dates the same runs give the same bytes.
    metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _page(
    root: Path,
    experiment: str,
    runs: Sequence[StoredRun],
    skipped: Mapping[str, str],
    summary: str,
    figures: Sequence[_NamedFigure],
) -> str:
    jinja2 = require("jinja2", "report")
    source = resources.files("orthoworld.results").joinpath("templates/report.html").read_text(encoding="utf-8")
    return str(
        jinja2.Template(source, autoescape=True).render(
            title=f"orthoworld: {experiment}",
            description=experiment_description(experiment),
            command=f"orthoworld report {root}",
            version=orthoworld.__version__,
            count=len(runs),
            skipped=skipped,
            summary=summary,
            figures=figures,
        )
    )
