"""InfoNCE against a double loop, and the width that makes it right."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.objectives.infonce import infonce, matched_sigma


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def gaussian_pairs(batch, dim, r, seed):
    z, noise = normal(2, batch, dim, seed=seed)
    return torch.stack([z, r * z + math.sqrt(1 - r**2) * noise])


def double_loop(h, sigma):
    first, second = h
    total = torch.zeros((), dtype=h.dtype)
    for own, other in ((first, second), (second, first)):
        for i, u in enumerate(own):
            similarities = [-(u - v).square().sum() / (2 * sigma**2) for v in other]
            total = total + torch.logsumexp(torch.stack(similarities), dim=0) - similarities[i]
    return total / (2 * len(first))


@given(batch=st.integers(1, 6), dim=st.integers(1, 9), sigma=st.floats(0.2, 5.0))
def test_infonce_is_the_double_loop_in_value_and_gradient(batch, dim, sigma):
    results = []
    for function in (lambda h: infonce(h, sigma=sigma), lambda h: double_loop(h, sigma)):
        h = normal(2, batch, dim).requires_grad_()
        value = function(h)
        value.backward()
        results.append((value.detach(), h.grad))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("sigma", [0.4, 1.0])
def test_gradient_is_that_of_finite_differences(sigma):
    assert torch.autograd.gradcheck(lambda h: infonce(h, sigma=sigma), normal(2, 4, 3).requires_grad_())


def large_batch_loss(scale, sigma, r):
    """InfoNCE of `h = scale z` in one dimension for infinitely many negatives, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    kernel = np.exp(-((scale * (nodes[:, None] - nodes)) ** 2) / (2 * sigma**2))
    return scale**2 * (1 - r) / sigma**2 + weights @ np.log(kernel @ weights)


@pytest.mark.parametrize("r", [0.3, 0.5, 0.9025])
def test_matched_width_makes_scale_one_optimal(r):
    best = minimize_scalar(lambda s: large_batch_loss(s, matched_sigma(r), r), bounds=(0.3, 3), method="bounded")
    assert best.x == pytest.approx(1, abs=1e-3)


def test_width_one_inflates_the_embedding_at_the_published_correlation():
    best = minimize_scalar(lambda s: large_batch_loss(s, 1.0, 0.9025), bounds=(0.3, 4), method="bounded")
    assert best.x == pytest.approx(1 / matched_sigma(0.9025), abs=1e-3)
    assert best.x**2 - 1 > 3.9  # the orthogonality error that follows


def mean_infonce(scale, sigma):
    """Mean over batches of a Gaussian world seen through `scale` times the identity, with common random numbers."""
    batches = [gaussian_pairs(512, 2, 0.9025, seed) for seed in range(6)]
    return torch.stack([infonce(scale * h, sigma=sigma) for h in batches]).mean()


def test_matched_width_keeps_the_scale_near_one_and_width_one_inflates_it():
    matched = matched_sigma(0.9025)
    assert mean_infonce(1.0, matched) < min(mean_infonce(0.95, matched), mean_infonce(1.05, matched))
    # The same optimum in units of the width: 1 / .453 = 2.2 times too large an embedding.
    assert mean_infonce(2.2, 1.0) < min(mean_infonce(2.0, 1.0), mean_infonce(2.4, 1.0))


def test_half_precision_is_computed_in_float32():
    h = normal(2, 16, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        value = infonce(h, sigma=0.5)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, infonce(h.float(), sigma=0.5), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3), (3, 4, 3)])
def test_exactly_two_views_are_needed(shape):
    with pytest.raises(ShapeError) as raised:
        infonce(torch.zeros(shape))
    assert str(raised.value) == f"embeddings have shape {shape}: expected (2, batch, dim)"


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"dtype torch.int64: expected a floating-point type"):
        infonce(torch.zeros(2, 4, 3, dtype=torch.int64))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_width_is_positive(sigma):
    with pytest.raises(ArgumentError, match=rf"sigma={sigma}: expected a number in \(0, inf\)"):
        infonce(torch.zeros(2, 4, 3), sigma=sigma)


@pytest.mark.parametrize("r", [0.0, 1.0, -0.5])
def test_matched_width_exists_for_positive_correlations_below_one(r):
    with pytest.raises(ArgumentError, match=rf"r={r}: expected a number in \(0, 1\)"):
        matched_sigma(r)
