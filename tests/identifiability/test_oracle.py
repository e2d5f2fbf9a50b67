import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.oracle import linear_oracle
from orthoworld.identifiability.recovery import recovery

SEEDS = st.integers(0, 2**31)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian_pairs(seed, n, rho):
    rho = torch.as_tensor(rho, dtype=torch.float64)
    noise = normal(seed, 2, n, len(rho))
    return noise[0], rho * noise[0] + (1 - rho**2).sqrt() * noise[1]


def observed_pairs(seed, n, dim, out_dim):
    """Bent, mixed observations of latents that decay at different rates."""
    z, z_next = gaussian_pairs(seed, n, np.linspace(0.9, 0.1, dim))
    mixing = normal(seed + 1, dim, out_dim)
    return [torch.tanh(array @ mixing) + 0.1 * normal(seed + i, n, out_dim) for i, array in ((2, z), (3, z_next))]


def pooled_moments(x, x_next):
    mean = torch.cat([x, x_next]).mean(dim=0)
    a, b = (x - mean).numpy(), (x_next - mean).numpy()
    return (a.T @ a + b.T @ b) / (2 * len(a)), (a.T @ b + b.T @ a) / (2 * len(a))


def alignment(h, h_next):
    return (h - h_next).square().sum(dim=1).mean().item()


@given(seed=SEEDS, dim=st.integers(1, 5), out_dim=st.integers(1, 9))
def test_it_solves_the_generalised_eigenproblem(seed, dim, out_dim):
    x, x_next = observed_pairs(seed, 300, dim, out_dim)
    instant, lagged = pooled_moments(x, x_next)
    expected = scipy.linalg.eigh(lagged, instant, eigvals_only=True)[::-1]
    kept = min(dim, out_dim)
    oracle = linear_oracle(x, x_next, kept)
    np.testing.assert_allclose(oracle.correlations, expected[:kept], atol=1e-8)
    assert oracle.loss == pytest.approx(2 * (1 - expected[:kept]).sum(), abs=1e-8)


@given(seed=SEEDS, dim=st.integers(1, 5), out_dim=st.integers(5, 9))
def test_its_embedding_is_white_and_has_the_stated_loss_and_correlations(seed, dim, out_dim):
    x, x_next = observed_pairs(seed, 300, 5, out_dim)
    oracle = linear_oracle(x, x_next, dim)
    h, h_next = oracle.transform(x), oracle.transform(x_next)
    instant, lagged = pooled_moments(h, h_next)
    np.testing.assert_allclose(instant, np.eye(dim), atol=1e-8)
    np.testing.assert_allclose(lagged, np.diag(oracle.correlations), atol=1e-8)
    np.testing.assert_allclose(torch.cat([h, h_next]).mean(dim=0), 0, atol=1e-8)
    assert alignment(h, h_next) == pytest.approx(oracle.loss, abs=1e-8)


@given(seed=SEEDS, dim=st.integers(1, 4), out_dim=st.integers(4, 9))
def test_no_whitened_linear_encoder_of_the_same_pairs_has_less_alignment(seed, dim, out_dim):
    x, x_next = observed_pairs(seed, 200, 4, out_dim)
    h, h_next = (array @ normal(seed + 4, out_dim, dim) for array in (x, x_next))
    instant, _ = pooled_moments(h, h_next)
    white = torch.linalg.inv(torch.linalg.cholesky(torch.from_numpy(instant))).T
    assert alignment(h @ white, h_next @ white) >= linear_oracle(x, x_next, dim).loss - 1e-9


@given(seed=SEEDS, out_dim=st.integers(2, 9))
def test_an_invertible_map_and_a_shift_of_the_observations_change_nothing(seed, out_dim):
    x, x_next = observed_pairs(seed, 300, 3, out_dim)
    mixing, shift = normal(seed + 4, out_dim, out_dim) + 3 * torch.eye(out_dim), normal(seed + 5, out_dim)
    before, after = linear_oracle(x, x_next, 2), linear_oracle(x @ mixing + shift, x_next @ mixing + shift, 2)
    np.testing.assert_allclose(after.correlations, before.correlations, atol=1e-6)


def test_linear_observations_give_the_latents_back_up_to_a_rotation():
    z, z_next = gaussian_pairs(0, 50_000, [0.9] * 3)
    mixing = normal(1, 3, 5)
    oracle = linear_oracle(z @ mixing, z_next @ mixing, 3)
    found = recovery(z, oracle.transform(z @ mixing), resamples=0)
    assert found.r2_hz == pytest.approx(1, abs=1e-6)
    assert found.orth_err < 0.03  # sqrt(3 * 4 / 100_000) = .011 from whitening the sample


def test_the_slowest_latents_come_first():
    rho = [0.2, 0.9, 0.6]
    z, z_next = gaussian_pairs(0, 50_000, rho)
    oracle = linear_oracle(z, z_next, 2)
    np.testing.assert_allclose(oracle.correlations, [0.9, 0.6], atol=0.01)
    np.testing.assert_allclose(recovery(z, oracle.transform(z), resamples=0).r2_hz_per_dim, [0, 1, 1], atol=0.01)


def test_a_harmonic_beats_a_fast_latent_only_among_the_observations():
    # With He_2 of the slow latent observed, its correlation .81 beats that of the fast latent: not interleaved.
    z, z_next = gaussian_pairs(0, 50_000, [0.9, 0.5])
    x, x_next = (torch.column_stack([a, (a[:, 0] ** 2 - 1) / math.sqrt(2)]) for a in (z, z_next))
    np.testing.assert_allclose(linear_oracle(x, x_next, 2).correlations, [0.9, 0.81], atol=0.02)


def test_directions_without_variance_are_never_taken():
    # All correlations are negative, so a constant direction, of correlation 0, would look better than they do.
    z, z_next = gaussian_pairs(0, 5000, [-0.5, -0.8])
    x, x_next = (torch.column_stack([a, a.sum(dim=1), torch.full((len(a),), 3.0)]) for a in (z, z_next))
    oracle = linear_oracle(x, x_next, 2)
    np.testing.assert_allclose(oracle.correlations, [-0.5, -0.8], atol=0.03)
    np.testing.assert_allclose(torch.cov(oracle.transform(x).T), np.eye(2), atol=0.05)


def test_more_components_than_the_observations_have_directions_are_refused():
    x, x_next = gaussian_pairs(0, 100, [0.5, 0.5])
    doubled = [torch.cat([array, array], dim=1) for array in (x, x_next)]
    assert len(linear_oracle(*doubled, 2).correlations) == 2
    with pytest.raises(ArgumentError, match="dim=3: expected at most 2, the rank of the observations"):
        linear_oracle(*doubled, 3)


@pytest.mark.parametrize("dim", [0, -1])
def test_it_has_at_least_one_component(dim):
    with pytest.raises(ArgumentError, match=f"dim={dim}: expected a whole number >= 1"):
        linear_oracle(normal(0, 50, 2), normal(1, 50, 2), dim)


def test_observations_of_different_shape_are_refused():
    with pytest.raises(ShapeError, match=r"x \(50, 2\), x_next \(49, 2\): expected the same number of rows"):
        linear_oracle(normal(0, 50, 2), normal(1, 49, 2), 1)
    with pytest.raises(ShapeError, match=r"x has shape \(50, 2\) and x_next \(50, 3\): expected the same"):
        linear_oracle(normal(0, 50, 2), normal(1, 50, 3), 1)


def test_observations_that_are_not_finite_are_refused():
    x = normal(0, 50, 2)
    x[3, 1] = torch.nan
    with pytest.raises(ArgumentError, match="x has 1 non-finite rows of 50"):
        linear_oracle(x, normal(1, 50, 2), 1)


def test_single_precision_is_widened():
    x, x_next = (array.float() for array in observed_pairs(0, 300, 3, 4))
    oracle = linear_oracle(x, x_next, 2)
    assert oracle.matrix.dtype == oracle.transform(x).dtype == torch.float64
