import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import hermite_e

from orthoworld.errors import ArgumentError
from orthoworld.identifiability.spectrum import (
    hermite_products,
    hermite_spectrum,
    leading_modes,
    mode_name,
    multi_indices,
)

SEEDS = st.integers(0, 2**31)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("dim", "degree"), [(1, 5), (2, 8), (3, 4), (5, 2)])
def test_there_is_one_product_for_each_monomial(dim, degree):
    indices = multi_indices(dim, degree)
    assert len(indices) == len(set(indices)) == math.comb(dim + degree, degree) - 1
    assert {sum(index) for index in indices} == set(range(1, degree + 1))


def test_products_are_those_of_numpy():
    z = normal(0, 50, 2)
    indices = multi_indices(2, 6)
    for column, (a, b) in zip(hermite_products(z, indices).T, indices, strict=True):
        expected = hermite_e.hermeval(z[:, 0], [0] * a + [1]) * hermite_e.hermeval(z[:, 1], [0] * b + [1])
        np.testing.assert_allclose(column, expected / math.sqrt(math.factorial(a) * math.factorial(b)), atol=1e-10)


def test_products_are_orthonormal_under_the_gaussian():
    nodes, weights = hermite_e.hermegauss(20)
    z = torch.tensor([(x, y) for x in nodes for y in nodes])
    w = torch.tensor([u * v for u in weights for v in weights]) / (2 * math.pi)
    products = hermite_products(z, multi_indices(2, 6))
    gram = products.T @ (w[:, None] * products)
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-10, rtol=0)


@given(seed=SEEDS)
def test_a_polynomial_is_resolved_exactly(seed):
    z = normal(seed, 400, 2)
    indices = multi_indices(2, 4)
    coefficients = normal(seed + 1, len(indices), 3)
    found = hermite_spectrum(z, hermite_products(z, indices) @ coefficients + 7, degree=5, resamples=0)
    energy = coefficients.square().sum(dim=1)
    for index, share in zip(indices, (energy / energy.sum()).tolist(), strict=True):
        assert found.modes[index] == pytest.approx(share, abs=1e-9)
    assert sum(found.degrees) + found.rest == pytest.approx(1)
    assert found.rest == pytest.approx(0, abs=1e-9)


@given(seed=SEEDS)
def test_turning_the_embedding_changes_nothing(seed):
    z = normal(seed, 300, 2)
    h = torch.stack([z[:, 0] + z[:, 1] ** 2, torch.tanh(z[:, 1])], dim=1)
    turn = torch.linalg.qr(normal(seed + 1, 2, 2))[0]
    before, after = (hermite_spectrum(z, rows, degree=3, resamples=0) for rows in (h, h @ turn - 1))
    assert list(after.modes.values()) == pytest.approx(list(before.modes.values()), abs=1e-9)


def test_intervals_hold_the_truth():
    # sin(z) has He_k coefficient (-1)^((k-1)/2) exp(-1/2) / sqrt(k!) for odd k, and variance (1 - exp(-2)) / 2.
    z = normal(0, 40_000, 1)
    found = hermite_spectrum(z, torch.sin(z), degree=5)
    for degree in (1, 3, 5):
        truth = math.exp(-1) / math.factorial(degree) / ((1 - math.exp(-2)) / 2)
        low, high = found.ci[f"degree_{degree}"]
        assert low - 1e-4 <= truth <= high + 1e-4
        assert found.modes_ci[degree,] == (low, high)
    assert found.degrees[1] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("rho", "modes"),
    [
        ((0.95, 0.91), [(1, 0), (0, 1)]),
        ((0.95, 0.90), [(1, 0), (2, 0)]),
        ((0.8, 0.95), [(0, 1), (0, 2)]),
        ((0.95, 0.5, 0.9), [(1, 0, 0), (2, 0, 0), (0, 0, 1)]),
    ],
)
def test_the_second_harmonic_of_the_slow_latent_enters_at_the_square_of_its_rate(rho, modes):
    assert list(leading_modes(rho, len(rho))) == modes


def test_names_of_products():
    assert [mode_name(index) for index in ((1, 0), (0, 2), (1, 3))] == ["He1(z0)", "He2(z1)", "He1(z0)He3(z1)"]


def test_too_many_products_and_too_few_rows_are_refused():
    with pytest.raises(ArgumentError, match=r"degree=8 in 9 latents has 24309 products: expected at most 500"):
        hermite_spectrum(normal(0, 100, 9), normal(1, 100, 1))
    with pytest.raises(ArgumentError, match="20 rows for 44 Hermite products: expected more rows"):
        hermite_spectrum(normal(0, 20, 2), normal(1, 20, 1))
