"""Mixings: exact inverses, the published formulas, and what they do to volume."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.worlds.mixings import AffineCoupling, Banana, Coupling, Identity, Linear, Sinusoid, Spiral


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def log_volume(mixing, z):
    """Return log|det J| at each row of `z`, by autograd."""
    jacobian = torch.autograd.functional.jacobian(lambda rows: mixing(rows).sum(dim=0), z)
    return torch.linalg.slogdet(jacobian.transpose(0, 1)).logabsdet


FAMILY = {
    "identity": Identity(3),
    "linear-square": Linear(normal(4, 4)),
    "linear-tall": Linear(normal(7, 3)),
    "linear-column": Linear(normal(5, 1)),
    "spiral": Spiral(),
    "spiral-backwards": Spiral(rate=-0.3),
    "banana": Banana(),
    "banana-curved": Banana(curvature=-2.5),
    "sinusoid": Sinusoid(),
    "sinusoid-fast": Sinusoid(frequency=7.0),
    **{f"coupling-{dim}": Coupling(dim, generator=gen(dim)).double() for dim in range(1, 10)},
    **{f"affine-coupling-{dim}": AffineCoupling(dim, generator=gen(dim)).double() for dim in range(1, 10)},
    "coupling-deep": Coupling(2, layers=8, generator=gen()).double(),
    "affine-coupling-one-layer": AffineCoupling(3, layers=1, generator=gen()).double(),
}
COUPLINGS = [Coupling, AffineCoupling]


@pytest.mark.parametrize("name", FAMILY)
def test_inverse_undoes_the_mixing(name):
    mixing = FAMILY[name]
    z = normal(5, 200, mixing.dim)
    x = mixing(z)
    assert x.shape == (5, 200, mixing.obs_dim)
    # Each coupling layer may amplify rounding by about three; eight layers stay below 1e-11.
    torch.testing.assert_close(mixing.inverse(x), z, atol=1e-11, rtol=0)


@given(dim=st.integers(1, 9), leading=st.lists(st.integers(1, 3), max_size=3), layers=st.integers(1, 6))
@pytest.mark.parametrize("make", COUPLINGS)
def test_coupling_keeps_any_shape(make, dim, leading, layers):
    mixing = make(dim, layers, generator=gen(dim))
    z = torch.randn(*leading, dim, generator=gen())
    assert mixing(z).shape == mixing.inverse(z).shape == z.shape
    assert mixing(z).dtype == torch.float32


def test_spiral_multiplies_by_a_phase_that_grows_with_the_distance():
    z = normal(100, 2)
    complex_z = torch.view_as_complex(z)
    expected = torch.view_as_real(complex_z * torch.exp(1j * math.pi * complex_z.abs()))
    torch.testing.assert_close(Spiral()(z), expected, atol=1e-13, rtol=0)


def test_spiral_fixes_the_origin_and_is_smooth_there():
    origin = torch.zeros(2, dtype=torch.float64)
    assert Spiral()(origin).tolist() == [0, 0]
    jacobian = torch.autograd.functional.jacobian(Spiral(), origin)
    torch.testing.assert_close(jacobian, torch.eye(2, dtype=torch.float64), atol=0, rtol=0)


def test_spiral_keeps_the_standard_normal_law():
    x = Spiral()(normal(10_000, 2))
    directions = torch.tensor([[1, 0], [0, 1], [0.6, 0.8]], dtype=torch.float64)
    for projection in (x @ directions.T).unbind(dim=1):
        assert stats.kstest(projection.numpy(), stats.norm.cdf).pvalue > 1e-3


def test_banana_and_sinusoid_are_the_published_shears():
    z = torch.tensor([[2.0, 3.0], [-1.0, 0.5]], dtype=torch.float64)
    banana = [[2.0, 7.0], [-1.0, 1.5]]
    sinusoid = [[2 + math.sin(4.5), 3.0], [-1 + math.sin(0.75), 0.5]]
    torch.testing.assert_close(Banana()(z), torch.tensor(banana, dtype=torch.float64))
    torch.testing.assert_close(Sinusoid()(z), torch.tensor(sinusoid, dtype=torch.float64))


@pytest.mark.parametrize("dim", range(1, 10))
def test_coupling_is_its_formula(dim):
    mixing = Coupling(dim, generator=gen(dim)).double()
    for z in normal(3, dim):
        first, second = z[: math.ceil(dim / 2)].clone(), z[math.ceil(dim / 2) :].clone()
        for layer, (weight,) in enumerate(mixing.weights):
            if layer % 2 == 0:
                second += torch.tanh(first @ weight)
            else:
                first += torch.tanh(second @ weight)
        torch.testing.assert_close(mixing(z), torch.cat([first, second]), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dim", range(1, 10))
def test_affine_coupling_is_its_formula_and_its_volume_the_sum_of_the_stretches(dim):
    mixing = AffineCoupling(dim, generator=gen(dim)).double()
    points = normal(3, dim)
    for z, volume in zip(points, log_volume(mixing, points), strict=True):
        parts = [z[: math.ceil(dim / 2)], z[math.ceil(dim / 2) :]]
        total = torch.zeros((), dtype=torch.float64)
        for layer, (shift, scale) in enumerate(mixing.weights):
            fixed, moved = parts[layer % 2], parts[1 - layer % 2]
            stretch = torch.tanh(fixed @ scale) / 2
            parts[1 - layer % 2] = moved * torch.exp(stretch) + torch.tanh(fixed @ shift)
            total = total + stretch.sum()
        torch.testing.assert_close(mixing(z), torch.cat(parts), atol=1e-13, rtol=0)
        torch.testing.assert_close(volume, total, atol=1e-11, rtol=0)


PRESERVING = ["spiral", "spiral-backwards", "banana", "sinusoid", *(f"coupling-{dim}" for dim in range(1, 10))]


@pytest.mark.parametrize("name", PRESERVING)
def test_additive_mixings_preserve_volume(name):
    mixing = FAMILY[name]
    volumes = log_volume(mixing, normal(20, mixing.dim))
    torch.testing.assert_close(volumes, torch.zeros(20, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dim", range(2, 10))
def test_affine_coupling_changes_volume(dim):
    volumes = log_volume(FAMILY[f"affine-coupling-{dim}"], normal(200, dim))
    assert volumes.std() > 0.1
    assert volumes.min() < 0 < volumes.max()


@pytest.mark.parametrize("make", COUPLINGS)
def test_one_dimensional_coupling_is_the_identity(make):
    z = normal(10, 1)
    mixing = make(1, generator=gen()).double()
    assert torch.equal(mixing(z), z)
    assert torch.equal(mixing.inverse(z), z)


@given(dim=st.integers(2, 9), seed=st.integers(0, 99))
def test_coupling_weights_are_twice_orthonormal(dim, seed):
    for (weight,) in Coupling(dim, generator=gen(seed)).double().weights:
        rows, columns = weight.shape
        gram = weight.T @ weight if rows >= columns else weight @ weight.T
        torch.testing.assert_close(gram, 4 * torch.eye(len(gram), dtype=torch.float64), atol=1e-5, rtol=0)


def test_orthonormal_weights_have_no_preferred_sign():
    signs = torch.tensor([Coupling(2, layers=1, generator=gen(seed)).weights[0][0].item() / 2 for seed in range(200)])
    torch.testing.assert_close(signs.abs(), torch.ones(200))
    assert signs.mean().abs() < 4 / math.sqrt(200)


@pytest.mark.parametrize("make", COUPLINGS)
def test_weights_come_from_the_generator_and_are_not_trained(make):
    mixing, same, other = (make(5, generator=gen(seed)) for seed in (3, 3, 4))
    z = torch.randn(10, 5, generator=gen())
    assert torch.equal(mixing(z), same(z))
    assert not torch.allclose(mixing(z), other(z))
    assert list(mixing.parameters()) == []
    other.load_state_dict(mixing.state_dict())
    assert torch.equal(mixing(z), other(z))


def test_linear_copies_its_matrix_and_ignores_what_is_orthogonal_to_its_columns():
    matrix = normal(4, 2)
    mixing = Linear(matrix)
    z = normal(6, 2, seed=2)
    expected = z @ matrix.T
    orthogonal = torch.linalg.qr(matrix, mode="complete").Q[:, 2:]
    matrix.zero_()
    torch.testing.assert_close(mixing(z), expected)
    torch.testing.assert_close(mixing.inverse(expected + normal(6, 2, seed=3) @ orthogonal.T), z)


@pytest.mark.parametrize("name", FAMILY)
def test_wrong_last_dimension_is_an_error_that_repeats_the_shape(name):
    mixing = FAMILY[name]
    wrong = max(mixing.dim, mixing.obs_dim) + 1
    points = torch.zeros(4, wrong, dtype=torch.float64)
    with pytest.raises(ShapeError, match=rf"z has shape \(4, {wrong}\): expected \(..., {mixing.dim}\)"):
        mixing(points)
    with pytest.raises(ShapeError, match=rf"x has shape \(4, {wrong}\): expected \(..., {mixing.obs_dim}\)"):
        mixing.inverse(points)


@pytest.mark.parametrize(
    ("matrix", "rank"),
    [(torch.ones(3, 2), 1), (torch.zeros(2, 1), 0), (torch.eye(3)[:2], 2)],
    ids=["same", "0", "wide"],
)
def test_linear_needs_independent_columns(matrix, rank):
    obs_dim, dim = matrix.shape
    message = rf"matrix of shape \({obs_dim}, {dim}\) has rank {rank}: expected full column rank {dim}"
    with pytest.raises(ArgumentError, match=message):
        Linear(matrix)


def test_linear_needs_a_matrix():
    with pytest.raises(ShapeError, match=r"matrix has shape \(3,\): expected \(obs_dim, dim\)"):
        Linear(torch.ones(3))


@pytest.mark.parametrize("make", COUPLINGS)
def test_coupling_sizes_are_whole_numbers(make):
    with pytest.raises(ArgumentError, match="dim=0: expected a whole number >= 1"):
        make(0, generator=gen())
    with pytest.raises(ArgumentError, match="layers=0: expected a whole number >= 1"):
        make(3, layers=0, generator=gen())


@pytest.mark.parametrize(("make", "name"), [(Spiral, "rate"), (Banana, "curvature"), (Sinusoid, "frequency")])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_coefficients_are_finite(make, name, value):
    with pytest.raises(ArgumentError, match=rf"{name}={value}: expected a number in \(-inf, inf\)"):
        make(value)
