"""The figure of the two-dimensional worlds: latents, observation, and what each objective recovers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from orthoworld.extras import require
from orthoworld.results.points import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 1.75
LATENT_LIMIT = 4.0


def polar_colours(z: np.ndarray) -> np.ndarray:
    """Return one RGB colour a point: hue from the polar angle, lightness .3 to .7 from the radius, saturation .85."""
    radius = np.linalg.norm(z, axis=1)
    hue = np.degrees(np.arctan2(z[:, 1], z[:, 0])) % 360
    lightness = 0.3 + 0.4 * radius / max(radius.max(), 1e-12)
    chroma = 0.85 * np.minimum(lightness, 1 - lightness)
    # The standard conversion from hue, lightness and saturation: one piecewise linear wave, shifted for each channel.
    phase = (np.array([0, 8, 4]) + hue[:, None] / 30) % 12
    wave = np.clip(np.minimum(phase - 3, 9 - phase), -1, 1)
    return lightness[:, None] - chroma[:, None] * wave


def recovered_figure(rows: Mapping[str, Mapping[str, Points]], captions: Mapping[tuple[str, str], str]) -> Figure:
    """Draw one row a mixing: latents, observation, and one panel for each objective.

    Args:
        rows: mixing to objective to points; the latents and observations of a row's first objective are drawn.
        captions: text below the title of a recovered panel, by mixing and objective.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "report")
    objectives = list(dict.fromkeys(name for row in rows.values() for name in row))
    columns = 2 + max(1, len(objectives))
    figure: Figure = figure_module.Figure(
        figsize=(PANEL_INCHES * columns + 0.4, PANEL_INCHES * max(1, len(rows)) * 1.13 + 0.35), layout="constrained"
    )
    if not rows:
        figure.text(0.5, 0.5, "no finished run of two latents", ha="center", va="center")
        return figure
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (mixing, row) in zip(axes, rows.items(), strict=True):
        first = next(iter(row.values()))
        colours = polar_colours(first.z.numpy())
        _scatter(line[0], first.z.numpy(), colours, LATENT_LIMIT)
        _scatter(line[1], first.x.numpy(), colours, None)
        line[0].set_ylabel(mixing, fontsize=9)
        for axis, objective in zip(line[2:], objectives, strict=True):
            if objective in row:
                _scatter(axis, row[objective].h.numpy(), polar_colours(row[objective].z.numpy()), LATENT_LIMIT)
                axis.set_xlabel(captions.get((mixing, objective), ""), fontsize=7)
            else:
                axis.set_axis_off()
    for axis, title in zip(axes[0], ["latents $z$", "observation $x$", *objectives], strict=True):
        axis.set_title(title, fontsize=9)
    return figure


def _scatter(axis: Axes, points: np.ndarray, colours: np.ndarray, limit: float | None) -> None:
    finite = np.isfinite(points).all(axis=1)
    # Rasterised, so that ten thousand points do not make a vector file of megabytes.
    axis.scatter(points[finite, 0], points[finite, 1], c=colours[finite], s=1.2, linewidths=0, rasterized=True)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_box_aspect(1)
    if limit is not None:
        axis.set_xlim(-limit, limit)
        axis.set_ylim(-limit, limit)
