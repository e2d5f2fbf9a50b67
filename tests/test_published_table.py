"""The published scaling table, as far as it can be computed without training: worlds, losses and null levels agree.

The columns of the trained embedding at N >= 64 are, to the digits printed, those of a perfect encoder; the columns of
the mixing are in-sample R2 of 10,000 points. Numbers: appendix tables of arXiv:2605.26379v1.
"""

import math

import pytest
import torch

from orthoworld.functional import alignment, sigreg, sigreg_null_level, whitening, whitening_null_level
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Coupling
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World

BATCH = 256
R = 0.95**2
"""Correlation of two children of one parent at rho = .95."""

# N: R2(z->x), R2(x->z), their standard deviation over seeds, alignment, SIGReg and its deviation, whitening
TABLE = {
    64: (0.854, 0.737, 1.5e-3, 0.0484, 2.03, 0.14, 0.0035),
    128: (0.853, 0.739, 6.1e-4, 0.0486, 1.80, 0.09, 0.0035),
    256: (0.855, 0.742, 4.9e-4, 0.0486, 1.88, 0.17, 0.0035),
    512: (0.859, 0.749, 3.0e-4, 0.0489, 1.93, 0.08, 0.0035),
    1024: (0.866, 0.763, 1.7e-4, 0.0488, 1.93, 0.06, 0.0035),
}
PRINTED = 6e-4
"""Half a unit of the last printed digit, and as much again since the published means are floored, not rounded."""

dims = pytest.mark.parametrize("dim", TABLE)


def world(dim, seed):
    mixing = Coupling(dim, layers=4, generator=torch.Generator().manual_seed(seed))
    return World(Gaussian(dim), SharedParent(OU(0.95)), mixing)


def in_sample_r2(source, target):
    """Pooled R2 of least squares with intercept, fitted and scored on the same rows, as published."""
    source, target = (array.double() - array.double().mean(dim=0) for array in (source, target))
    slope = torch.linalg.solve(source.T @ source, source.T @ target)
    return 1 - float((target - source @ slope).square().sum() / target.square().sum())


def perfect_batches(dim, count):
    """The two views of latents, as a perfect encoder returns them."""
    generator = torch.Generator().manual_seed(dim)
    for _ in range(count):
        pairs = world(dim, 0).sample_pairs(BATCH, generator=generator)
        yield torch.stack([pairs.z, pairs.z_next]).double()


@dims
def test_linear_maps_explain_as_much_of_our_worlds_as_of_the_published_ones(dim):
    z_to_x, x_to_z, spread, *_ = TABLE[dim]
    pairs = world(dim, seed=0).sample_pairs(10_000, generator=torch.Generator().manual_seed(1))
    assert in_sample_r2(pairs.x, pairs.z) == pytest.approx(x_to_z, abs=3 * spread + PRINTED)
    assert in_sample_r2(pairs.z, pairs.x) == pytest.approx(z_to_x, abs=3 * spread + PRINTED)


@dims
def test_the_rise_with_n_is_in_sample_optimism_of_one_and_the_same_r2(dim):
    assert 1 - (1 - 0.7365) * (1 - (dim + 1) / 10_000) == pytest.approx(TABLE[dim][1], abs=2e-3)


@dims
def test_alignment_column_is_that_of_views_correlated_at_rho_squared(dim):
    found = torch.stack([alignment(h, form="centroid") for h in perfect_batches(dim, 20)]).mean().item()
    exact = (1 - R) / 2
    noise = exact * math.sqrt(2 / (BATCH * dim))  # of the one batch that was logged
    assert exact == pytest.approx(0.04875)
    assert found == pytest.approx(exact, abs=4 * noise / math.sqrt(20))
    assert TABLE[dim][3] == pytest.approx(exact, abs=3 * noise / math.sqrt(5) + 1e-4)


@dims
def test_sigreg_column_is_the_sampling_floor(dim):
    *_, published, spread, _ = TABLE[dim]
    generator = torch.Generator().manual_seed(2)
    batches = perfect_batches(dim, 20)
    found = torch.stack([sigreg(h, generator=generator, pooled=True, scaled=True) for h in batches])
    floor = sigreg_null_level(2 * BATCH, views=2, r=R, scaled=True)
    assert floor == pytest.approx(1.896, abs=5e-4)
    assert found.mean().item() == pytest.approx(floor, abs=4 * found.std().item() / math.sqrt(20))
    assert published == pytest.approx(floor, abs=3 * spread / math.sqrt(5) + 0.01)


@dims
def test_whitening_column_is_the_sampling_floor(dim):
    floor = whitening_null_level(2 * BATCH, dim, views=2, r=R)
    found = torch.stack([whitening(h) for h in perfect_batches(dim, 20)]).mean().item()
    assert found == pytest.approx(floor, rel=0.03)
    assert math.floor(floor * 1e4) / 1e4 == pytest.approx(TABLE[dim][-1], abs=1.01e-4)
