"""Points of the figures: recovered latents centred and turned onto the true ones, never scaled."""

import math

import pytest
import torch

from orthoworld.experiments.config import load_experiment
from orthoworld.results.execute import execute
from orthoworld.results.points import sample_points, turned_onto
from orthoworld.training.run import encode


def rotation(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s], [s, c]])


@pytest.mark.parametrize(
    "turn", [rotation(0), rotation(37), rotation(180), rotation(90) @ torch.diag(torch.tensor([1.0, -1]))]
)
def test_turned_and_shifted_latents_come_back(turn, generator):
    z = torch.randn(500, 2, generator=generator)
    assert torch.allclose(turned_onto(z, z @ turn.T + 3), z - z.mean(dim=0), atol=1e-5)


def test_scale_is_left_as_it_is(generator):
    z = torch.randn(500, 2, generator=generator)
    assert torch.allclose(turned_onto(z, 0.5 * z @ rotation(50).T), 0.5 * (z - z.mean(dim=0)), atol=1e-5)


def test_turning_keeps_distances(generator):
    z, h = torch.randn(2, 200, 3, generator=generator)
    assert torch.allclose(torch.pdist(turned_onto(z, h)), torch.pdist(h), atol=1e-4)


def test_no_turn_comes_closer(generator):
    z = torch.randn(300, 2, generator=generator)
    h = z @ torch.tensor([[1.0, 0.6], [0.0, 0.4]])
    best = (turned_onto(z, h) - (z - z.mean(dim=0))).square().sum()
    for degrees in range(0, 360, 15):
        for flip in (1.0, -1.0):
            other = (h - h.mean(dim=0)) @ rotation(degrees) @ torch.diag(torch.tensor([1.0, flip]))
            assert best <= (other - (z - z.mean(dim=0))).square().sum() + 1e-4


def test_points_are_drawn_anew_and_always_the_same(tmp_path):
    assignments = ["mixings=spiral", "objectives=lejepa", "encoder.width=16", "encoder.depth=1", "train.steps=2"]
    sizes = ["train.batch=32", "train.whitener_samples=1000", "train.evaluation_samples=200"]
    (spec,) = load_experiment("two-d").overridden([*assignments, *sizes]).runs()
    run = execute(spec, tmp_path)
    points, again = sample_points(run, 50), sample_points(run, 50)
    assert points.z.shape == points.x.shape == points.h.shape == (50, 2)
    assert torch.equal(points.h, again.h)
    assert torch.equal(points.x, run.world().mixing(points.z))
    assert torch.equal(points.h, turned_onto(points.z, encode(run.representation(), points.x)))
