import json
import math

import numpy as np
import pytest
import torch

from orthoworld.encoders import MLP
from orthoworld.identifiability.bound import bound
from orthoworld.identifiability.oracle import linear_oracle
from orthoworld.identifiability.recovery import recovery
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.lejepa import WhitenedAlignment
from orthoworld.objectives.whitening import whiten
from orthoworld.results.store import strict_json, with_reasons
from orthoworld.training.trainer import train
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Linear
from orthoworld.worlds.transitions import OU
from orthoworld.worlds.world import World


def gaussian_pairs(seed, n, dim, rho):
    noise = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(seed))
    return noise[0], rho * noise[0] + math.sqrt(1 - rho**2) * noise[1]


def test_b1_purely_quadratic_encoder():
    z, z_next = gaussian_pairs(0, 400_000, 2, 0.5)
    h, h_next = ((array.square() - 1) / math.sqrt(2) for array in (z, z_next))
    found = bound(h, h_next, rho=0.5, z=z, resamples=0)
    assert found.delta == pytest.approx(1, abs=0.03)
    assert found.nonlinear_energy == pytest.approx(2, abs=0.05)
    assert recovery(z, h, resamples=0).r2_hz == pytest.approx(0, abs=0.01)
    assert found.bound >= found.true_error
    assert found.true_error == pytest.approx(4, abs=0.05)


def test_b4_uncentred_encoder():
    z, z_next = gaussian_pairs(0, 5000, 2, 0.9)
    ones = torch.ones(5000, 2)
    collapsed = bound(ones, ones, rho=0.9, z=z, resamples=0)
    assert collapsed.bound >= collapsed.true_error - 1e-9
    assert collapsed.true_error == pytest.approx(2, abs=1e-9)
    centred = ((ones - ones.mean(dim=0)) - (z - z.mean(dim=0))).square().sum(dim=1).mean()
    assert collapsed.bound >= centred - 0.1  # the error over the sample, whose latents have a trace of 2 up to .06
    shifted = bound(z + 1, z_next + 1, rho=0.9, z=z, resamples=0)
    assert shifted.bound == pytest.approx(bound(z, z_next, rho=0.9, z=z, resamples=0).bound, abs=1e-6)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_b5_undefined_bound(rho):
    z, z_next = gaussian_pairs(0, 500, 2, rho)
    found = bound(z, z_next, rho=rho, z=z)
    assert math.isnan(found.bound)
    assert "the theorem needs 0 < rho < 1" in found.reasons["bound"]
    read = json.loads(strict_json(with_reasons(vars(found))), parse_constant=pytest.fail)
    assert read["bound"] is None
    assert read["reasons"]["bound"] == found.reasons["bound"]
    assert read["delta"] == found.delta


def test_b6_signed_delta():
    found = [bound(*gaussian_pairs(seed, 200, 2, 0.9), rho=0.9, resamples=0) for seed in range(20)]
    assert 3 <= sum(result.delta < 0 for result in found) <= 17  # half of them, as for a fair coin
    for result in found:
        assert result.delta_clipped == max(result.delta, 0)
        assert result.nonlinear_energy == pytest.approx(result.delta_clipped / (2 * 0.9 * 0.1))


def test_b7_linear_oracle():
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    world = World(Gaussian(4), OU(0.9), Linear(matrix))
    pairs = world.sample_pairs(50_000, generator=torch.Generator().manual_seed(0))
    oracle = linear_oracle(pairs.x, pairs.x_next, 4)
    np.testing.assert_allclose(oracle.correlations, 0.9, atol=0.01)

    encoder = MLP(4, 4, width=32, depth=1)
    run = train(world, encoder, WhitenedAlignment(), steps=200, batch=128, whitener_samples=50_000)
    white = whiten(torch.stack([run.encode(pairs.x), run.encode(pairs.x_next)]).double())  # on the oracle's own pairs
    trained = alignment(white).item()
    assert oracle.loss <= trained < 4  # twice 4 is the level of views without correlation
