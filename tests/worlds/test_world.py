"""Worlds: what is seen is the mixing of what moves."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Gaussian, Laplace
from orthoworld.worlds.mixings import AffineCoupling, Coupling, Identity, Linear, Spiral
from orthoworld.worlds.transitions import OU, LaplaceAR, SharedParent, Stationarity, Transition
from orthoworld.worlds.world import World


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


class Counting(Transition):
    """Each step adds one, so that the order of states can be read off."""

    def step(self, z, source, *, generator):
        return z + 1

    def correlation(self, dim):
        return torch.ones(dim, dtype=torch.float64)

    def stationarity(self, source):
        return Stationarity(False, "it counts")


def correlation(z, z_next):
    return torch.corrcoef(torch.stack([z, z_next]).double())[0, 1].item()


@given(dim=st.integers(1, 9), n=st.integers(1, 6), extra=st.integers(0, 3))
def test_observations_are_the_mixing_of_the_latents(dim, n, extra):
    mixing = Linear(torch.eye(dim + extra)[:, :dim] * 2)
    pairs = World(Laplace(dim), OU(0.9), mixing).sample_pairs(n, generator=gen())
    assert pairs.z.shape == pairs.z_next.shape == (n, dim)
    assert pairs.x.shape == pairs.x_next.shape == (n, dim + extra)
    torch.testing.assert_close(pairs.x, mixing(pairs.z), atol=0, rtol=0)
    torch.testing.assert_close(pairs.x_next, mixing(pairs.z_next), atol=0, rtol=0)


@pytest.mark.parametrize("transition", [OU(0.6), LaplaceAR(0.6), SharedParent(OU(0.6))], ids=repr)
def test_pairs_are_those_of_the_transition(transition):
    source = Laplace(3)
    pairs = World(source, transition, Identity(3)).sample_pairs(7, generator=gen(2))
    z, z_next = transition.pair(7, source, generator=gen(2))
    assert torch.equal(pairs.z, z)
    assert torch.equal(pairs.z_next, z_next)


@given(episodes=st.integers(1, 4), length=st.integers(1, 6), dim=st.integers(1, 9))
def test_trajectory_states_follow_the_step_in_order(episodes, length, dim):
    mixing = Coupling(dim, generator=gen())
    chains = World(Gaussian(dim), Counting(), mixing).sample_trajectories(episodes, length, generator=gen())
    assert chains.z.shape == chains.x.shape == (episodes, length, dim)
    start = Gaussian(dim).sample(episodes, generator=gen())
    expected = start[:, None] + torch.arange(length)[:, None]
    torch.testing.assert_close(chains.z, expected)
    torch.testing.assert_close(chains.x, mixing(chains.z), atol=0, rtol=0)


@pytest.mark.parametrize("transition", [OU(0.8), SharedParent(OU(0.8))], ids=repr)
def test_recorded_states_correlate_at_powers_of_the_steps_rho(transition):
    chains = World(Gaussian(1), transition, Identity(1)).sample_trajectories(20_000, 4, generator=gen())
    z = chains.z[..., 0]
    for lag in (1, 2, 3):
        assert correlation(z[:, 0], z[:, lag]) == pytest.approx(0.8**lag, abs=5 / math.sqrt(20_000))


def test_r_is_the_correlation_of_the_pair():
    assert World(Gaussian(2), OU(0.95), Spiral()).r == 0.95
    assert World(Gaussian(2), SharedParent(OU(0.95)), Spiral()).r == pytest.approx(0.9025, abs=1e-15)
    assert World(Gaussian(2), OU([0.5, 0.5]), Spiral()).r == 0.5
    world = World(Gaussian(2), OU([0.5, 0.25]), Spiral())
    assert world.r == (0.5, 0.25)
    assert world.sample_pairs(1, generator=gen()).r == (0.5, 0.25)


def test_generator_decides_everything():
    world = World(Gaussian(3), OU(0.9), AffineCoupling(3, generator=gen()))
    first, same, other = (world.sample_pairs(5, generator=gen(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.x_next, same.x_next)
    assert not (first.x == other.x).any()


def test_samples_carry_no_gradient_and_do_not_change():
    world = World(Gaussian(2), OU(0.9), Linear(torch.eye(2).requires_grad_()))
    pairs = world.sample_pairs(2, generator=gen())
    chains = world.sample_trajectories(2, 3, generator=gen())
    assert not pairs.x.requires_grad
    assert not chains.x.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        pairs.z = pairs.x


def test_world_passes_on_dimension_and_stationarity():
    world = World(Laplace(4), OU(0.9), Identity(4))
    assert world.dim == 4
    assert world.stationarity == OU(0.9).stationarity(Laplace(4))
    assert repr(world) == "World(Laplace(dim=4), OU(rho=0.9), Identity(4))"


def test_parts_agree_about_the_number_of_latents():
    with pytest.raises(ArgumentError, match="mixing takes 2 latents and the source has 3: expected the same"):
        World(Gaussian(3), OU(0.9), Spiral())
    with pytest.raises(ArgumentError, match="rho has 3 entries: expected one number, or one for each of 2 latents"):
        World(Gaussian(2), OU([0.1, 0.2, 0.3]), Spiral())


def test_sizes_are_whole_numbers():
    world = World(Gaussian(2), OU(0.9), Spiral())
    with pytest.raises(ArgumentError, match="n=0: expected a whole number >= 1"):
        world.sample_pairs(0, generator=gen())
    with pytest.raises(ArgumentError, match="episodes=0: expected a whole number >= 1"):
        world.sample_trajectories(0, 2, generator=gen())
    with pytest.raises(ArgumentError, match="length=-1: expected a whole number >= 1"):
        world.sample_trajectories(2, -1, generator=gen())
