"""Alignment: both forms, their factor, and the value at the optimum."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Identity
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def rotation(dim, seed=2):
    return torch.linalg.qr(normal(dim, dim, seed=seed)).Q


def exact_pairs(n, dim, r):
    """Two views whose sample moments are exactly those of a Gaussian world with correlation `r`."""
    base = torch.linalg.qr(normal(n, 2 * dim)).Q * math.sqrt(n)
    z, noise = base.split(dim, dim=1)
    return torch.stack([z, r * z + math.sqrt(1 - r**2) * noise])


shapes = {"views": st.integers(2, 4), "batch": st.integers(1, 6), "dim": st.integers(1, 9)}


@given(**shapes)
def test_norm_is_the_mean_squared_distance_of_all_pairs_of_views(views, batch, dim):
    h = normal(views, batch, dim)
    distances = [(u - v).norm() ** 2 for a, b in combinations(h, 2) for u, v in zip(a, b, strict=True)]
    torch.testing.assert_close(alignment(h), torch.stack(distances).mean())


@given(**shapes)
def test_centroid_is_the_mean_squared_distance_from_the_mean_of_the_views(views, batch, dim):
    h = normal(views, batch, dim)
    squares = [
        (h[v, i, d] - sum(h[w, i, d] for w in range(views)) / views) ** 2
        for v in range(views)
        for i in range(batch)
        for d in range(dim)
    ]
    torch.testing.assert_close(alignment(h, form="centroid"), torch.stack(squares).mean())


@given(**shapes)
def test_norm_is_the_stated_multiple_of_the_centroid_form(views, batch, dim):
    h = normal(views, batch, dim)
    torch.testing.assert_close(alignment(h), alignment(h, form="centroid") * 2 * dim * views / (views - 1))


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_orthogonal_map_has_the_optimal_alignment(dim):
    r = 0.95**2
    h = exact_pairs(64, dim, r) @ rotation(dim)
    assert alignment(h).item() == pytest.approx(2 * (1 - r) * dim, rel=1e-12)
    assert alignment(h, form="centroid").item() == pytest.approx(0.04875, rel=1e-12)


def test_latents_of_the_published_world_have_alignment_04875():
    n, dim = 200_000, 2
    pairs = World(Gaussian(dim), SharedParent(OU(0.95)), Identity(dim)).sample_pairs(n, generator=gen())
    value = alignment(torch.stack([pairs.z, pairs.z_next]), form="centroid").item()
    # A mean of n dim squares of normal variables: relative standard error sqrt(2 / (n dim)).
    assert value == pytest.approx(0.04875, rel=4 * math.sqrt(2 / (n * dim)))


@pytest.mark.parametrize("form", ["norm", "centroid"])
def test_rotation_and_shift_keep_alignment_and_scale_squares_it(form):
    h = normal(3, 10, 4)
    value = alignment(h, form=form)
    torch.testing.assert_close(alignment(h @ rotation(4) + 7, form=form), value)
    torch.testing.assert_close(alignment(-3 * h, form=form), 9 * value)
    torch.testing.assert_close(alignment(h.flip(0), form=form), value)


@pytest.mark.parametrize("form", ["norm", "centroid"])
def test_gradient_is_that_of_finite_differences(form):
    h = normal(3, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: alignment(h, form=form), h)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    h = normal(2, 64, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        value = alignment(h)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, alignment(h.float()), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (1, 4, 3), (2, 1, 4, 3), (1, 2, 2, 4, 3)])
def test_two_views_are_needed(shape):
    with pytest.raises(ShapeError) as raised:
        alignment(torch.zeros(shape))
    assert str(shape) in str(raised.value)
    assert "expected (views, batch, dim) with two views or more" in str(raised.value)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"dtype torch.int64: expected a floating-point type"):
        alignment(torch.zeros(2, 4, 3, dtype=torch.int64))
