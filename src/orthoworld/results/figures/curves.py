"""Training curves: recovery, orthogonality and bound against the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orthoworld.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[Mapping[str, float]]

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")

PANELS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "1 - R2(h->z)": lambda row: 1 - row.get("r2_hz", np.nan),
    "orthogonality error": lambda row: row.get("orth_err", np.nan),
    "bound (line), true error (dots)": lambda row: row.get("bound_controlled", np.nan),
}
"""Heading of a row of panels to the value drawn; all are 0 for a perfect encoder, and drawn on a logarithmic axis."""


def curves_figure(curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> Figure:
    """Draw one column a mixing, one line an objective: the median over seeds, with all seeds shaded.

    Args:
        curves: mixing to objective to the curves of its seeds, rows with `step`, `r2_hz`, `orth_err`,
            `bound_controlled`, `true_error`; a value that is missing leaves a gap.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "report")
    columns = max(1, len(curves))
    figure: Figure = figure_module.Figure(figsize=(2.3 * columns + 0.6, 6.0), layout="constrained")
    if not curves:
        figure.text(0.5, 0.5, "no finished run", ha="center", va="center")
        return figure
    axes = figure.subplots(len(PANELS), columns, squeeze=False, sharex="col", sharey="row")
    objectives = list(dict.fromkeys(name for row in curves.values() for name in row))
    colours = dict(zip(objectives, COLOURS * (1 + len(objectives) // len(COLOURS)), strict=False))
    for column, (mixing, by_objective) in enumerate(curves.items()):
        for axis, (heading, value) in zip(axes[:, column], PANELS.items(), strict=True):
            for objective, seeds in by_objective.items():
                _band(axis, [[(row["step"], value(row)) for row in curve] for curve in seeds], colours[objective])
            if heading.startswith("bound"):
                for objective, seeds in by_objective.items():
                    truth = [[(row["step"], row.get("true_error", np.nan)) for row in curve] for curve in seeds]
                    _band(axis, truth, colours[objective], style=":", shade=False)
            axis.set_yscale("log")
            axis.grid(alpha=0.25, linewidth=0.5)
            axis.tick_params(labelsize=7)
            if column == 0:
                axis.set_ylabel(heading, fontsize=8)
        axes[0, column].set_title(mixing, fontsize=9)
        axes[-1, column].set_xlabel("step", fontsize=8)
    handles = [axes[0, 0].plot([], [], color=colours[name], label=name)[0] for name in objectives]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(objectives), fontsize=8, frameon=False)
    return figure


def _band(
    axis: Axes, curves: Sequence[Sequence[tuple[float, float]]], colour: str, *, style: str = "-", shade: bool = True
) -> None:
    """Draw the median over curves and, where there are several, the range; on a log axis only what is above 0."""
    steps = sorted({step for curve in curves for step, _ in curve})
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        for step, value in curve:
            row[steps.index(step)] = value if value > 0 else np.nan
    known = np.isfinite(values).any(axis=0)
    if not known.any():
        return
    at = np.array(steps)[known]
    shown = values[:, known]
    axis.plot(at, np.nanmedian(shown, axis=0), style, color=colour, linewidth=1.2)
    if shade and len(curves) > 1:
        axis.fill_between(at, np.nanmin(shown, axis=0), np.nanmax(shown, axis=0), color=colour, alpha=0.2, linewidth=0)
