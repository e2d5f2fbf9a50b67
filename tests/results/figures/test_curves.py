"""The figure of training curves."""

import io
import math
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex

from orthoworld.errors import MissingExtraError
from orthoworld.results.figures.curves import COLOURS, PANELS, curves_figure


def curve(r2=(0.5, 0.9), steps=(10, 20), **columns):
    return [
        {"step": step, "r2_hz": value, "orth_err": 0.1, "bound_controlled": 0.3, "true_error": 0.2} | columns
        for step, value in zip(steps, r2, strict=True)
    ]


def rendered(figure):
    figure.savefig(io.BytesIO(), format="png", dpi=20)


@pytest.mark.parametrize(
    "curves",
    [
        {"spiral": {"a": [curve()]}},
        {"spiral": {"a": [curve()], "b": [curve()]}, "banana": {"a": [curve()]}},
        {f"mixing {i}": {f"objective {j}": [curve()] for j in range(9)} for i in range(4)},
    ],
)
def test_figure_has_a_column_for_each_mixing(curves):
    figure = curves_figure(curves)
    assert len(figure.axes) == len(PANELS) * len(curves)
    assert [axis.get_title() for axis in figure.axes[: len(curves)]] == list(curves)
    objectives = list(dict.fromkeys(name for row in curves.values() for name in row))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == objectives
    rendered(figure)


def test_line_is_the_median_and_the_band_the_range_over_seeds():
    seeds = [curve((0.5, 0.9)), curve((0.6, 0.8)), curve((0.9, 0.5))]
    axis = curves_figure({"spiral": {"a": seeds}}).axes[0]
    line = axis.lines[0]
    assert line.get_xdata().tolist() == [10, 20]
    assert line.get_ydata() == pytest.approx([0.4, 0.2])
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.1, 0.5))


def test_one_seed_has_no_band():
    assert not curves_figure({"spiral": {"a": [curve()]}}).axes[0].collections


def test_truth_is_dotted_below_the_bound():
    axis = curves_figure({"spiral": {"a": [curve()]}}).axes[2]
    assert [(line.get_linestyle(), line.get_ydata().tolist()) for line in axis.lines] == [
        ("-", [0.3, 0.3]),
        (":", [0.2, 0.2]),
    ]


def test_objective_has_one_colour_everywhere():
    figure = curves_figure({"spiral": {"a": [curve()], "b": [curve()]}, "banana": {"b": [curve()]}})
    spiral, banana = figure.axes[2], figure.axes[3]
    assert to_hex(spiral.lines[1].get_color()) == to_hex(banana.lines[0].get_color()) == COLOURS[1]


@pytest.mark.parametrize("missing", [math.nan, -0.1, 0.0])
def test_value_that_a_logarithm_does_not_have_leaves_a_gap(missing):
    rows = curve((0.5, 0.6, 0.9), (1, 2, 3))
    rows[1]["orth_err"] = missing
    axis = curves_figure({"spiral": {"a": [rows]}}).axes[1]
    assert axis.lines[0].get_xdata().tolist() == [1, 3]


@pytest.mark.parametrize(
    "curves",
    [
        {"spiral": {"a": [[]]}},
        {"spiral": {"a": [[{"step": 1.0}]]}},
        {"spiral": {"a": [curve((math.nan,) * 2, orth_err=math.nan, bound_controlled=math.nan, true_error=math.nan)]}},
        {"spiral": {"a": [[], curve()]}},
        {"spiral": {"a": [curve(), curve((0.5,), (15,))]}},
    ],
)
def test_missing_values_and_empty_curves_are_drawn_without_a_warning(curves):
    rendered(curves_figure(curves))


def test_evaluations_at_different_steps_are_all_drawn():
    axis = curves_figure({"spiral": {"a": [curve(), curve((0.7,), (15,))]}}).axes[0]
    assert axis.lines[0].get_xdata().tolist() == [10, 15, 20]
    assert np.all(np.isfinite(axis.lines[0].get_ydata()))


def test_figure_of_no_run_says_so():
    figure = curves_figure({})
    assert figure.axes == []
    assert [text.get_text() for text in figure.texts] == ["no finished run"]


def test_figure_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install orthoworld\[report\]"):
        curves_figure({})
