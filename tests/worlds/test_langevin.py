"""The Langevin chain: exactly stationary, reversible, with the declared correlation and the known eigenfunctions."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, stats

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.worlds.cells import Bins
from orthoworld.worlds.langevin import Langevin
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal, Laplace, StudentT, Uniform
from orthoworld.worlds.mixings import Identity
from orthoworld.worlds.transitions import SharedParent
from orthoworld.worlds.world import World

ALPHAS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SOURCES = [
    *(GeneralizedNormal(1, alpha) for alpha in ALPHAS),
    *(Gaussian(1), Laplace(1), Uniform(1), StudentT(1, df=2.5), StudentT(1, df=5)),
]
N = 10**6

every_source = pytest.mark.parametrize("source", SOURCES, ids=repr)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def is_drawn_from(z, source):
    # The law's own cdf is SciPy's; test_latents.py compares each source with it.
    return stats.kstest(z.flatten().numpy(), source._law().cdf).pvalue > 1e-3


def generator_of(cells, source):
    """`Q` written out from the two-point fluxes."""
    flux = source.log_density(cells.edges).exp() / cells.mean.diff()
    exchange = torch.diag(flux, 1) + torch.diag(flux, -1)
    exchange -= exchange.sum(dim=1).diag()
    return exchange / cells.mass.unsqueeze(1)


@every_source
def test_next_state_has_the_law_of_the_source(source):
    _, z_next = Langevin(0.95).pair(N, source, generator=gen())
    assert is_drawn_from(z_next, source)


@every_source
def test_long_chain_keeps_the_law_of_the_source(source):
    chain, running = Langevin(0.95), gen(1)
    z = source.sample(N // 10, generator=running)
    for _ in range(50):
        z = chain.step(z, source, generator=running)
    assert is_drawn_from(z, source)


@every_source
def test_every_cell_is_entered_with_its_mass_and_left_for_a_draw_of_the_law(source):
    chain = Langevin(0.95)
    cells = chain.cells_of(source)
    z = source.sample(N, generator=gen(2)).double()
    z_next = chain.step(z, source, generator=gen(3)).flatten()
    cell = torch.searchsorted(cells.edges, z_next)

    counts = cell.bincount(minlength=chain.cells)
    often = cells.mass * N > 5
    chi2 = ((counts - cells.mass * N).square() / (cells.mass * N))[often].sum()
    assert stats.chi2(int(often.sum())).sf(float(chi2)) > 1e-3

    # Where the draw lies in the mass of its cell, counted from the side away from 0: uniform if the draw is exact.
    size = z_next.abs()
    outer = torch.cat([source.survival(cells.edges[len(cells.edges) // 2 :]), torch.zeros(1, dtype=torch.float64)])
    half = torch.where(cell < chain.cells // 2, chain.cells // 2 - 1 - cell, cell - chain.cells // 2)
    place = (source.survival(size) - outer[half + 1]) / (outer[half] - outer[half + 1])
    assert stats.kstest(place.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("source", [Laplace(1), GeneralizedNormal(1, 0.125), StudentT(1, df=5)], ids=repr)
def test_draws_beyond_the_last_edge_have_the_law_of_the_tail(source):
    chain = Langevin(0.5, tail=1e-3)
    bins = Bins.of(chain.cells_of(source), source)
    last = torch.full((20_000,), len(bins.lower) - 1)
    for index, sign in ((last, 1), (last * 0, -1)):
        z = sign * bins.draw(index, source, generator=gen())
        assert (z >= chain.cells_of(source).edges[-1]).all()
        assert stats.kstest((source.survival(z) / 1e-3).numpy(), "uniform").pvalue > 1e-3


@every_source
def test_cells_hold_the_mean_and_all_but_little_of_the_variance(source):
    cells = Langevin(0.95).cells_of(source)
    assert len(cells.mass) == len(cells.edges) + 1 == 512
    assert float(cells.mass.sum()) == pytest.approx(1, abs=1e-13)
    assert float(cells.mass @ cells.mean) == pytest.approx(0, abs=1e-13)
    lost = 1 - float(cells.mass @ cells.mean.square())
    assert 0 < lost < {0.125: 0.005, 2.5: 0.02}.get(getattr(source, "alpha", getattr(source, "df", 2)), 2e-4)
    assert 1 - cells.correlation(0) == pytest.approx(lost, abs=1e-9)


@every_source
@pytest.mark.parametrize("rho", [0.05, 0.5, 0.95, 0.98])
def test_kernel_is_stochastic_reversible_and_correlates_at_rho(source, rho):
    chain = Langevin(rho)
    cells, (kernel,) = chain.cells_of(source), chain.kernel(source)
    assert (kernel >= 0).all()
    torch.testing.assert_close(kernel.sum(dim=1), torch.ones(512).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(cells.mass @ kernel, cells.mass, atol=1e-15, rtol=1e-9)
    joint = cells.mass.unsqueeze(1) * kernel
    torch.testing.assert_close(joint, joint.T, atol=1e-16, rtol=0)
    assert float(cells.mean @ joint @ cells.mean) == pytest.approx(rho, abs=1e-8)


@pytest.mark.parametrize("source", [Gaussian(1), GeneralizedNormal(1, 0.5), Uniform(1), StudentT(1, 5)], ids=repr)
def test_kernel_is_the_exponential_of_the_two_point_fluxes(source):
    chain = Langevin(0.7, cells=40)
    cells = chain.cells_of(source)
    generator = generator_of(cells, source)
    torch.testing.assert_close(generator @ cells.modes, -cells.modes * cells.decay, atol=1e-8, rtol=1e-8)
    time = -math.log(float(chain.spectrum(source, 1)[0, 0])) / float(cells.decay[1])
    expected = torch.as_tensor(linalg.expm(time * generator.numpy()))
    torch.testing.assert_close(chain.kernel(source)[0], expected, atol=1e-10, rtol=0)


@every_source
def test_eigenfunctions_are_orthonormal_and_oscillate_in_order(source):
    cells = Langevin(0.95).cells_of(source)
    gram = cells.modes.T @ (cells.mass.unsqueeze(1) * cells.modes)
    torch.testing.assert_close(gram, torch.eye(512).double(), atol=1e-10, rtol=0)
    for k in range(1, 6):
        assert (cells.modes[:, k].sign().diff() != 0).sum() == k
        assert cells.modes[-1, k] > 0
    assert (cells.decay[1:20].diff() > 0).all()


def test_pairs_look_the_same_in_both_directions_of_time():
    source, chain = GeneralizedNormal(1, 0.5), Langevin(0.9)
    z, z_next = (v.double() for v in chain.pair(N, source, generator=gen()))
    asymmetry = z.tanh() * (3 * z_next).sin() - z_next.tanh() * (3 * z).sin()
    assert asymmetry.std() > 0.05
    assert asymmetry.mean().abs() < 5 * asymmetry.std() / math.sqrt(N)


@pytest.mark.parametrize("source", [s for s in SOURCES if getattr(s, "alpha", 1) >= 0.5 and getattr(s, "df", 5) >= 5])
def test_pairs_correlate_as_declared(source):
    z, z_next = (v.double() for v in Langevin(0.9).pair(N, source, generator=gen()))
    product = z * z_next
    assert float(product.mean()) == pytest.approx(0.9, abs=5 * float(product.std()) / math.sqrt(N))


def test_gaussian_step_is_an_ornstein_uhlenbeck_step():
    source, chain = Gaussian(1), Langevin(0.95)
    powers = 0.95 ** torch.arange(1, 9).double()
    torch.testing.assert_close(chain.spectrum(source, 6)[0], powers[:6], atol=1e-4, rtol=0)
    finer = Langevin(0.95, cells=1024, tail=1e-12)  # higher Hermite polynomials reach further out
    torch.testing.assert_close(finer.spectrum(source, 8)[0], powers, atol=1e-4, rtol=0)
    start = chain.cells_of(source).mean[300]
    z_next = chain.step(start.expand(100_000, 1), source, generator=gen())
    expected = stats.norm(0.95 * float(start), math.sqrt(1 - 0.95**2))
    assert stats.kstest(z_next.flatten().numpy(), expected.cdf).pvalue > 1e-3


@pytest.mark.parametrize("count", [4, 50, 512])
def test_gaussian_latents_are_an_eigenfunction_on_any_cells(count):
    chain = Langevin(0.5, cells=count)
    cells = chain.cells_of(Gaussian(1))
    assert float(cells.decay[1]) == pytest.approx(1, abs=1e-12)
    assert chain.linear_recovery(Gaussian(1)) == pytest.approx(1, abs=1e-12)
    assert chain.linear_recovery(GeneralizedNormal(1, 2)) == pytest.approx(1, abs=1e-12)


@every_source
def test_only_the_gaussian_is_recovered_linearly(source):
    # The coordinate has Rayleigh quotient E[1] / Var z = 1, so l_1 <= 1, with equality where it is an eigenfunction.
    chain = Langevin(0.95)
    slowest, recovery = float(chain.cells_of(source).decay[1]), chain.linear_recovery(source)
    if source.is_gaussian:
        assert slowest == pytest.approx(1, abs=1e-12)
    else:
        assert slowest < 0.95
        assert recovery < 0.99


def test_uniform_latents_follow_the_reflected_diffusion():
    source, chain = Uniform(1), Langevin(0.95)
    assert chain.linear_recovery(source) == pytest.approx(96 / math.pi**4, abs=1e-5)
    mu = chain.spectrum(source, 5)[0]
    k = torch.arange(1, 6).double()
    torch.testing.assert_close(mu, mu[0] ** k.square(), atol=1e-4, rtol=0)
    z = source.sample(1000, generator=gen()).double()
    expected = math.sqrt(2) * torch.sin(math.pi * z / math.sqrt(12))
    torch.testing.assert_close(chain.eigenfunction(z, source), expected, atol=0.012, rtol=0)  # the width of a cell


def test_laplace_diffusion_has_a_gap_and_no_eigenfunction():
    # -L has the continuous spectrum [1/2, infinity): the chain's l_1 tends to it from above, its f_1 leaves z.
    chains = [Langevin(0.9, cells=1024, tail=tail) for tail in (1e-4, 1e-6, 1e-8, 1e-10)]
    slowest = [float(chain.cells_of(Laplace(1)).decay[1]) for chain in chains]
    recovery = [chain.linear_recovery(Laplace(1)) for chain in chains]
    assert slowest == sorted(slowest, reverse=True)
    assert 0.5 < slowest[-1] < 0.53
    assert recovery == sorted(recovery, reverse=True)


@pytest.mark.parametrize("alpha", [0.125, 0.25, 1.5, 4.0, 32.0])
def test_recovery_does_not_depend_on_the_number_of_cells(alpha):
    coarse, fine = (Langevin(0.9, cells=n).linear_recovery(GeneralizedNormal(1, alpha)) for n in (512, 1024))
    assert coarse == pytest.approx(fine, abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_eigenfunction_decays_by_its_eigenvalue(k):
    source, chain = GeneralizedNormal(1, 8), Langevin(0.9)
    z, z_next = chain.pair(N, source, generator=gen())
    now, later = (chain.eigenfunction(v, source, k).double() for v in (z, z_next))
    product = now * later
    mu = float(chain.spectrum(source, k)[0, -1])
    assert float(product.mean()) == pytest.approx(mu, abs=5 * float(product.std()) / math.sqrt(N))
    assert float(now.mean()) == pytest.approx(0, abs=5 / math.sqrt(N))


def test_each_latent_has_its_own_correlation():
    source, chain = Uniform(4), Langevin([0.9, 0.2, 0.6, 0.2])
    z, z_next = (v.double() for v in chain.pair(N // 5, source, generator=gen()))
    assert chain.correlation(4).tolist() == [0.9, 0.2, 0.6, 0.2]
    torch.testing.assert_close((z * z_next).mean(dim=0), chain.correlation(4), atol=5 / math.sqrt(N // 5), rtol=0)
    assert chain.spectrum(source, 2).shape == (4, 2)
    torch.testing.assert_close(chain.spectrum(source, 2)[1], Langevin(0.2).spectrum(source, 2)[0])
    for latent in range(4):
        assert is_drawn_from(z_next[:, latent], source)


def test_components_move_independently():
    z, z_next = Langevin(0.9).pair(N // 5, Uniform(3), generator=gen())
    joint = torch.corrcoef(torch.cat([z, z_next], dim=1).double().T)
    assert (joint[:3, 3:] - joint[:3, 3:].diagonal().diag()).abs().max() < 5 / math.sqrt(N // 5)


@given(leading=st.lists(st.integers(0, 3), max_size=3), dim=st.integers(1, 9), dtype=st.sampled_from(["32", "64"]))
def test_step_keeps_shape_and_type(leading, dim, dtype):
    z = torch.zeros(*leading, dim, dtype=getattr(torch, f"float{dtype}"))
    z_next = Langevin(0.5, cells=16).step(z, Laplace(dim), generator=gen())
    assert z_next.shape == z.shape
    assert z_next.dtype == z.dtype


def test_views_that_are_not_contiguous_step_too():
    z = torch.randn(3, 50, generator=gen()).T
    chain = Langevin(0.5)
    first, second = (chain.step(v, Gaussian(3), generator=gen(1)) for v in (z, z.contiguous()))
    assert torch.equal(first, second)


def test_generator_decides_the_draws_and_the_global_state_stays():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    chain, source = Langevin(0.9), GeneralizedNormal(2, 0.125)
    first, again, other = (chain.pair(500, source, generator=gen(seed))[1] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not (first == other).any()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda chain: pickle.loads(pickle.dumps(chain))])
def test_copies_draw_the_same_and_leave_the_tables(duplicate):
    chain, source = Langevin(0.9, cells=64, tail=1e-6), StudentT(2, 5)
    _, expected = chain.pair(50, source, generator=gen())
    assert len(pickle.dumps(chain)) < 500
    _, found = duplicate(chain).pair(50, source, generator=gen())
    assert torch.equal(found, expected)
    assert repr(duplicate(chain)) == repr(chain)


def test_world_takes_the_chain_and_says_that_it_is_stationary():
    world = World(Uniform(2), Langevin(0.9), Identity(2))
    assert world.r == 0.9
    assert world.stationarity.holds
    z = world.sample_trajectories(20_000, 4, generator=gen()).z.double()
    assert float((z[:, 2] * z[:, 3]).mean()) == pytest.approx(0.9, abs=5 / math.sqrt(40_000))
    assert is_drawn_from(z[:10_000, 3], Uniform(2))


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.5, 1.2, math.nan, [0.5, 0.0]])
def test_rho_lies_between_zero_and_one(rho):
    with pytest.raises(ArgumentError, match=r"rho=\S+: expected a number in \(0, 1\)"):
        Langevin(rho)


def test_rho_beyond_the_cells_is_refused():
    with pytest.raises(ArgumentError, match=r"rho=0.99999: expected less than 0.9999\d+, the most that 512 cells with"):
        Langevin(0.99999).pair(5, Gaussian(1), generator=gen())
    Langevin(0.9999).pair(5, Gaussian(1), generator=gen())


def test_law_that_float64_cannot_cut_is_refused():
    with pytest.raises(
        ArgumentError, match=r"GeneralizedNormal\(dim=1, alpha=0.003\): expected a law that float64 can"
    ):
        Langevin(0.5).pair(5, GeneralizedNormal(1, 0.003), generator=gen())


def test_arguments_lie_in_their_domains():
    with pytest.raises(ArgumentError, match="cells=7: expected an even number"):
        Langevin(0.5, cells=7)
    with pytest.raises(ArgumentError, match="cells=2: expected a whole number >= 4"):
        Langevin(0.5, cells=2)
    with pytest.raises(ArgumentError, match=r"tail=0: expected a number in \(0, 0.1\)"):
        Langevin(0.5, tail=0)
    with pytest.raises(ArgumentError, match="k=8: expected a whole number below the number of cells, 8"):
        Langevin(0.5, cells=8).spectrum(Gaussian(1), 8)
    with pytest.raises(ArgumentError, match="rho has 2 entries: expected one number, or one for each of 3 latents"):
        Langevin([0.5, 0.6]).pair(5, Gaussian(3), generator=gen())
    with pytest.raises(ShapeError, match=r"z has shape \(5, 2\)"):
        Langevin(0.5).step(torch.zeros(5, 2), Gaussian(3), generator=gen())


def test_shared_parent_refuses_it_since_its_views_would_not_correlate_at_rho_squared():
    with pytest.raises(ArgumentError, match=r"SharedParent\(Langevin\(rho=0.9\)\): expected a step with"):
        SharedParent(Langevin(0.9))


def test_repr_is_the_call():
    assert repr(Langevin(0.95)) == "Langevin(rho=0.95)"
    assert repr(Langevin([0.5, 0.25], tail=1e-6, cells=64)) == "Langevin(rho=(0.5, 0.25), cells=64, tail=1e-06)"
