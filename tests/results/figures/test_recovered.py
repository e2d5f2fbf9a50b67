"""The figure of latents, observations and recovered latents."""

import colorsys
import sys

import numpy as np
import pytest
import torch

from orthoworld.errors import MissingExtraError
from orthoworld.results.figures.recovered import polar_colours, recovered_figure
from orthoworld.results.points import Points


@pytest.fixture
def points(generator):
    return Points(*torch.randn(3, 40, 2, generator=generator))


def drawn(axis):
    return axis.collections[0].get_offsets()


def test_hue_is_the_angle():
    colours = polar_colours(np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
    hues = [colorsys.rgb_to_hls(*colour)[0] * 360 for colour in colours]
    assert hues == pytest.approx([0, 90, 180, 270])


def test_lightness_grows_with_the_radius_from_three_to_seven_tenths():
    radii = np.linspace(0, 5, 6)
    colours = polar_colours(np.stack([radii, radii], axis=1))
    lightness = [colorsys.rgb_to_hls(*colour)[1] for colour in colours]
    assert lightness == pytest.approx([0.3, 0.38, 0.46, 0.54, 0.62, 0.7])


def test_saturation_is_the_same_everywhere(generator):
    colours = polar_colours(torch.randn(200, 2, generator=generator).numpy())
    assert [colorsys.rgb_to_hls(*colour)[2] for colour in colours] == pytest.approx([0.85] * 200)


@pytest.mark.parametrize("z", [np.zeros((3, 2)), 1e-30 * np.ones((2, 2))])
def test_colours_of_degenerate_points_are_colours(z):
    colours = polar_colours(z)
    assert colours.shape == (len(z), 3)
    assert np.all((colours >= 0) & (colours <= 1))


@pytest.mark.parametrize(
    ("rows", "panels"),
    [
        ({"spiral": ["a"]}, (1, 3)),
        ({"spiral": ["a", "b"]}, (1, 4)),
        ({"spiral": ["a", "b"], "banana": ["a", "b"]}, (2, 4)),
        ({"spiral": ["a"], "banana": ["b"], "coupling": ["c", "a"]}, (3, 5)),
    ],
)
def test_figure_has_a_row_for_each_mixing_and_a_panel_for_each_objective(points, rows, panels):
    data = {mixing: dict.fromkeys(objectives, points) for mixing, objectives in rows.items()}
    figure = recovered_figure(data, {})
    lines, columns = panels
    assert len(figure.axes) == lines * columns
    shown = [axis for axis in figure.axes if axis.axison]
    assert len(shown) == 2 * lines + sum(len(objectives) for objectives in rows.values())
    assert [figure.axes[columns * line].get_ylabel() for line in range(lines)] == list(rows)


def test_titles_and_captions_say_what_is_drawn(points):
    figure = recovered_figure({"spiral": {"a": points, "b": points}}, {("spiral", "b"): "R2 0.9"})
    assert [axis.get_title() for axis in figure.axes] == ["latents $z$", "observation $x$", "a", "b"]
    assert [axis.get_xlabel() for axis in figure.axes[2:]] == ["", "R2 0.9"]


def test_panels_show_latents_observations_and_embedding_in_the_colours_of_the_latents(points):
    axes = recovered_figure({"spiral": {"a": points}}, {}).axes
    for axis, expected in zip(axes, (points.z, points.x, points.h), strict=True):
        assert np.allclose(drawn(axis), expected)
        assert np.allclose(axis.collections[0].get_facecolors()[:, :3], polar_colours(points.z.numpy()))


def test_latents_and_embeddings_share_their_scale(points):
    axes = recovered_figure({"spiral": {"a": points}}, {}).axes
    assert axes[0].get_xlim() == axes[0].get_ylim() == axes[2].get_xlim() == axes[2].get_ylim() == (-4, 4)


def test_points_that_are_not_finite_are_left_out(points):
    h = points.h.clone()
    h[:7] = torch.nan
    axes = recovered_figure({"spiral": {"a": Points(points.z, points.x, h)}}, {}).axes
    assert [len(drawn(axis)) for axis in axes] == [40, 40, 33]


def test_figure_of_no_run_says_so():
    figure = recovered_figure({}, {})
    assert figure.axes == []
    assert [text.get_text() for text in figure.texts] == ["no finished run of two latents"]


def test_figure_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install orthoworld\[report\]"):
        recovered_figure({}, {})
