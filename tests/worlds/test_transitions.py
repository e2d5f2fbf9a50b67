"""Transitions: correlations as declared, and stationary laws where they are claimed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal, Laplace, StudentT, Uniform
from orthoworld.worlds.transitions import OU, LaplaceAR, SharedParent

LAPLACE = stats.laplace(scale=1 / math.sqrt(2))
N = 200_000


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def correlations(z, z_next):
    """Pearson correlation of each column."""
    z, z_next = (v.double() - v.double().mean(dim=0) for v in (z, z_next))
    return (z * z_next).mean(dim=0) / (z.square().mean(dim=0) * z_next.square().mean(dim=0)).sqrt()


def excess_kurtosis(z):
    return float(stats.kurtosis(z.double().flatten().numpy()))


def is_drawn_from(z, law):
    return stats.kstest(z.flatten().numpy(), law.cdf).pvalue > 1e-3


rhos = st.floats(-0.999, 0.999)
steps = st.sampled_from([OU, LaplaceAR, lambda rho: SharedParent(OU(rho)), lambda rho: SharedParent(LaplaceAR(rho))])


@given(make=steps, rho=rhos, n=st.integers(1, 5), dim=st.integers(1, 9))
def test_pairs_have_one_row_a_state(make, rho, n, dim):
    z, z_next = make(rho).pair(n, Laplace(dim), generator=gen())
    assert z.shape == z_next.shape == (n, dim)
    assert z.dtype == z_next.dtype == torch.float32


@given(make=steps, rho=rhos, leading=st.lists(st.integers(1, 3), max_size=3), dim=st.integers(1, 9))
def test_step_keeps_shape_and_type(make, rho, leading, dim):
    z = torch.randn(*leading, dim, dtype=torch.float64, generator=gen())
    stepped = make(rho).step(z, Gaussian(dim), generator=gen())
    assert stepped.shape == z.shape
    assert stepped.dtype == torch.float64


@given(rho=rhos, dim=st.integers(1, 9))
def test_shared_parent_squares_the_correlation(rho, dim):
    torch.testing.assert_close(OU(rho).correlation(dim), torch.full((dim,), rho, dtype=torch.float64))
    torch.testing.assert_close(
        SharedParent(OU(rho)).correlation(dim), torch.full((dim,), rho**2, dtype=torch.float64), atol=1e-15, rtol=0
    )


@given(rho=rhos, dim=st.integers(1, 9))
def test_ou_step_is_its_formula(rho, dim):
    source = Uniform(dim)
    z = source.sample(6, generator=gen(1))
    eta = source.sample(6, generator=gen(2))
    expected = rho * z.double() + math.sqrt(1 - rho**2) * eta.double()
    torch.testing.assert_close(OU(rho).step(z, source, generator=gen(2)).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("source", [Gaussian(2), Laplace(2), Uniform(2), StudentT(2, df=9)], ids=repr)
@pytest.mark.parametrize("make", [OU, lambda rho: SharedParent(OU(rho))], ids=["ou", "shared-parent"])
def test_ou_pairs_have_the_declared_correlation_and_unit_variance_for_every_source(make, source):
    transition = make(0.8)
    z, z_next = transition.pair(N, source, generator=gen())
    # Standard errors: about 1 / sqrt n for the correlation, sqrt((kurtosis + 2) / n) for the variance.
    torch.testing.assert_close(correlations(z, z_next), transition.correlation(2), atol=5 / math.sqrt(N), rtol=0)
    for view in (z, z_next):
        torch.testing.assert_close(view.var(dim=0), torch.ones(2), atol=5 * math.sqrt(5 / N), rtol=0)


@pytest.mark.parametrize("kind", [OU, LaplaceAR])
def test_each_latent_has_its_own_correlation(kind):
    rho = [0.9, 0.0, -0.5, 0.3]
    transition = kind(rho)
    z, z_next = transition.pair(N, Laplace(4), generator=gen())
    assert transition.correlation(4).tolist() == rho
    torch.testing.assert_close(
        correlations(z, z_next), torch.tensor(rho, dtype=torch.float64), atol=5 / math.sqrt(N), rtol=0
    )


@pytest.mark.parametrize("transition", [OU(0.9), LaplaceAR(0.9), SharedParent(OU(0.9))], ids=repr)
def test_components_move_independently(transition):
    z, z_next = transition.pair(N, Laplace(3), generator=gen())
    joint = torch.corrcoef(torch.cat([z, z_next], dim=1).double().T)
    across = joint[:3, 3:] - joint[:3, 3:].diagonal().diag()
    assert across.abs().max() < 5 / math.sqrt(N)


@pytest.mark.parametrize("transition", [OU(0.95), OU([0.5, -0.7]), SharedParent(OU(0.95))], ids=repr)
def test_ornstein_uhlenbeck_keeps_the_normal_law(transition):
    source = Gaussian(2)
    z, z_next = transition.pair(10_000, source, generator=gen())
    assert is_drawn_from(z, stats.norm)
    assert is_drawn_from(z_next, stats.norm)
    assert transition.stationarity(source).holds


def test_ornstein_uhlenbeck_does_not_keep_the_laplace_law_and_says_so():
    transition, source = OU(0.5), Laplace(1)
    _, z_next = transition.pair(10**6, source, generator=gen())
    # Cumulants of independent terms add: kurtosis 3 (rho^4 + (1 - rho^2)^2) = 1.875. Standard error about .03.
    assert excess_kurtosis(z_next) == pytest.approx(3 * (0.5**4 + 0.75**2), abs=0.12)
    assert not is_drawn_from(z_next[:100_000], LAPLACE)
    assert not transition.stationarity(source).holds
    assert "Laplace" in transition.stationarity(source).reason


@pytest.mark.parametrize("rho", [0.5, 0.95, -0.7, 0.0])
def test_laplace_autoregression_keeps_the_laplace_law(rho):
    source, transition = Laplace(1), LaplaceAR(rho)
    _, z_next = transition.pair(10_000, source, generator=gen())
    assert is_drawn_from(z_next, LAPLACE)
    assert transition.stationarity(source).holds


@pytest.mark.parametrize("rho", [0.5, 0.95, -0.7])
def test_long_laplace_chain_stays_laplace_with_geometric_correlations(rho):
    source, transition = Laplace(1), LaplaceAR(rho)
    running = gen()
    chain = [source.sample(40_000, generator=running)]
    for _ in range(60):
        chain.append(transition.step(chain[-1], source, generator=running))
    assert is_drawn_from(chain[-1][:10_000], LAPLACE)
    assert chain[-1].var().item() == pytest.approx(1, abs=5 * math.sqrt(5 / 40_000))
    for lag in (1, 2, 3):
        assert correlations(chain[20], chain[20 + lag]).item() == pytest.approx(rho**lag, abs=5 / math.sqrt(40_000))


@pytest.mark.parametrize("rho", [0.5, -0.7])
def test_laplace_noise_is_additive_and_independent_with_the_stated_atom(rho):
    source, transition = Laplace(1), LaplaceAR(rho)
    z, z_next = transition.pair(N, source, generator=gen())
    noise = z_next.double() - rho * z.double()
    stays = noise.abs() < 1e-5  # float32 rounding is below, and one move in 10^5 only
    assert stays.double().mean().item() == pytest.approx(rho**2, abs=5 * math.sqrt(0.25 / N))
    assert is_drawn_from(noise[~stays][:10_000], LAPLACE)
    assert torch.corrcoef(torch.cat([noise.abs(), z.double().abs()], dim=1).T)[0, 1].abs() < 5 / math.sqrt(N)


@pytest.mark.parametrize("inner", [OU(0.6), LaplaceAR(0.6)], ids=repr)
def test_shared_parent_views_are_two_steps_from_one_state(inner):
    source = Laplace(2)
    first, second = SharedParent(inner).pair(5, source, generator=gen(4))
    again = gen(4)
    parent = source.sample(5, generator=again)
    torch.testing.assert_close(first, inner.step(parent, source, generator=again), atol=0, rtol=0)
    torch.testing.assert_close(second, inner.step(parent, source, generator=again), atol=0, rtol=0)


def test_shared_parent_trajectory_steps_correlate_at_rho():
    source, transition = Gaussian(1), SharedParent(OU(0.6))
    z = source.sample(N, generator=gen(1))
    z_next = transition.step(z, source, generator=gen(2))
    assert correlations(z, z_next).item() == pytest.approx(0.6, abs=5 / math.sqrt(N))


@pytest.mark.parametrize(
    ("transition", "source", "holds"),
    [
        (OU(0.9), Gaussian(2), True),
        (OU(0.9), GeneralizedNormal(2, alpha=2), True),
        (OU(0.9), Uniform(2), False),
        (OU(0.0), Uniform(2), True),
        (OU([0.0, 0.1]), Uniform(2), False),
        (LaplaceAR(0.9), Laplace(2), True),
        (LaplaceAR(0.9), GeneralizedNormal(2, alpha=1), True),
        (LaplaceAR(0.9), Gaussian(2), False),
        (SharedParent(LaplaceAR(0.9)), Laplace(2), True),
        (SharedParent(OU(0.9)), Laplace(2), False),
    ],
    ids=repr,
)
def test_stationarity_is_claimed_where_it_holds(transition, source, holds):
    claim = transition.stationarity(source)
    assert claim.holds is holds
    assert claim.reason


@pytest.mark.parametrize("make", [OU, LaplaceAR])
@pytest.mark.parametrize("rho", [[0.5, 1.0], [-1.0, 0.5], [0.1, math.nan]])
def test_every_rho_lies_inside_the_interval(make, rho):
    with pytest.raises(ArgumentError, match=r"rho=(1.0|-1.0|nan): expected a number in \(-1, 1\)"):
        make(rho)


def test_rho_is_not_empty():
    with pytest.raises(ArgumentError, match=r"rho=\[\]: expected a number in \(-1, 1\), or one for each latent"):
        OU([])


@pytest.mark.parametrize("make", [OU, LaplaceAR, lambda rho: SharedParent(OU(rho))])
def test_one_rho_a_latent(make):
    with pytest.raises(ArgumentError, match="rho has 2 entries: expected one number, or one for each of 3 latents"):
        make([0.5, 0.6]).correlation(3)


def test_shared_parents_do_not_nest():
    with pytest.raises(
        ArgumentError, match=r"SharedParent\(SharedParent\(OU\(rho=0.5\)\)\): expected a step such as OU"
    ):
        SharedParent(SharedParent(OU(0.5)))


def test_changing_the_correlation_does_not_change_the_transition():
    transition = OU([0.5, 0.6])
    transition.correlation(2).zero_()
    assert transition.correlation(2).tolist() == [0.5, 0.6]


def test_repr_is_the_call():
    assert repr(SharedParent(LaplaceAR(0.5))) == "SharedParent(LaplaceAR(rho=0.5))"
    assert repr(OU([0.5, 0.25])) == "OU(rho=(0.5, 0.25))"
