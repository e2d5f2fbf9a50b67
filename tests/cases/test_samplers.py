"""The cases S reported by users: samplers and mixings."""

import json
import math
import subprocess
import sys

import pytest
import torch
from scipy import stats

from orthoworld.encoders import InverseAffineCoupling, InverseCoupling
from orthoworld.identifiability.bound import bound
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal, Laplace
from orthoworld.worlds.mixings import AffineCoupling, Coupling, Identity
from orthoworld.worlds.transitions import OU, LaplaceAR, SharedParent
from orthoworld.worlds.world import World

PARTNERS = [(Coupling, InverseCoupling), (AffineCoupling, InverseAffineCoupling)]


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def correlation(z, z_next):
    return torch.corrcoef(torch.stack([z.flatten(), z_next.flatten()]).double())[0, 1].item()


@pytest.mark.parametrize("make", [Coupling, AffineCoupling])
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7])
def test_s1_odd_and_one_dimensional_coupling(make, dim):
    mixing, z = make(dim, generator=gen(1)), torch.randn(1000, dim, generator=gen(2))
    x = mixing(z)
    assert x.shape == z.shape
    assert (mixing.inverse(x) - z).abs().max() <= 1e-5
    assert torch.equal(x, z) == (dim == 1)


@pytest.mark.parametrize(("make", "encoder"), PARTNERS)
@pytest.mark.parametrize("dim", [6, 7])
def test_s5_matched_encoder(make, encoder, dim):
    mixing, z = make(dim, generator=gen(1)), torch.randn(1000, dim, generator=gen(2))
    h = encoder(dim).match(mixing)(mixing(z))
    assert (h - z).abs().max() <= 1e-5


FRESH = """
import json, random
import numpy as np
import torch
import orthoworld as ow

def global_states():
    return str((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), np.random.get_state()[2:]))

def gen(seed=0):
    return torch.Generator().manual_seed(seed)

torch.set_num_threads(1)
before = global_states(), random.getstate()
mixing = ow.AffineCoupling(7, generator=gen(3))
world = ow.World(ow.Laplace(7), ow.SharedParent(ow.LaplaceAR(0.9)), mixing)
encoder = ow.MLP(7, 7, width=8, depth=1)
ow.InverseCoupling(7, 2)
world.sample_trajectories(2, 3, generator=gen())
pairs = world.sample_pairs(200, generator=gen())
ow.recovery(pairs.z, encoder(pairs.x).detach())
ow.bound(pairs.z, pairs.z_next, rho=0.81)
ow.train(world, encoder, ow.WhitenedLeJEPA(slices=4), steps=2, batch=16, evaluation_samples=50, whitener_samples=100)
untouched = [old == new for old, new in zip(before, (global_states(), random.getstate()))]

try:
    ow.GeneralizedNormal(2, None)
    refusal = "none"
except ValueError as error:
    refusal = str(error)
weights = {name: weight.flatten().tolist() for name, weight in mixing.state_dict().items()}
print(json.dumps({"untouched": untouched, "weights": weights, "refusal": refusal}))
"""


@pytest.fixture(scope="module")
def fresh_process():
    """What a process finds without the annotations being checked: beartype draws from `random`, and refuses first."""
    answer = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def test_s6_global_random_state_untouched(fresh_process):
    assert fresh_process["untouched"] == [True, True]


def test_s7_same_seed_gives_the_same_mixing_in_another_process(fresh_process):
    weights = AffineCoupling(7, generator=gen(3)).state_dict()
    assert fresh_process["weights"] == {name: weight.flatten().tolist() for name, weight in weights.items()}
    assert all(weight.device.type == "cpu" for weight in weights.values())


@pytest.mark.parametrize(("transition", "r"), [(OU(0.95), 0.95), (SharedParent(OU(0.95)), 0.9025)], ids=repr)
def test_s8_pair_correlation_is_the_declared_one(transition, r):
    pairs = World(Gaussian(1), transition, Identity(1)).sample_pairs(200_000, generator=gen())
    assert correlation(pairs.z, pairs.z_next) == pytest.approx(r, abs=0.005)
    assert correlation(pairs.x, pairs.x_next) == pytest.approx(r, abs=0.005)
    assert pairs.r == pytest.approx(r, abs=1e-12)


@pytest.mark.parametrize("make", [OU, LaplaceAR])
@pytest.mark.parametrize("rho", [1, -1, 1.2, math.nan])
def test_s9_rho_domain(make, rho):
    with pytest.raises(ValueError, match=rf"rho={rho}: expected a number in \(-1, 1\)"):
        make(rho)


def test_s9_rho_zero_samples_fine_and_has_no_bound():
    pairs = World(Gaussian(2), OU(0), Identity(2)).sample_pairs(20_000, generator=gen())
    assert pairs.r == 0
    assert correlation(pairs.z, pairs.z_next) == pytest.approx(0, abs=5 / math.sqrt(40_000))
    result = bound(pairs.z, pairs.z_next, rho=0)
    assert math.isnan(result.bound)
    assert result.reasons["bound"]


KURTOSIS = {0.5: None, 1: (3.0, 0.2), 2: (0.0, 0.03), 8: (-1.07, 0.03), 32: (-1.19, 0.02)}


@pytest.mark.parametrize(("alpha", "kurtosis"), KURTOSIS.items())
def test_s10_generalised_normal_moments(alpha, kurtosis):
    z = GeneralizedNormal(1, alpha=alpha).sample(400_000, generator=gen()).double()
    assert torch.isfinite(z).all()
    assert z.var().item() == pytest.approx(1, abs=0.02)
    if kurtosis is not None:
        value, slack = kurtosis
        assert stats.kurtosis(z.flatten().numpy()) == pytest.approx(value, abs=slack)


def test_s10_generalised_normal_is_finite_at_one_eighth():
    assert torch.isfinite(GeneralizedNormal(1, alpha=0.125).sample(400_000, generator=gen())).all()


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf])
def test_s11_bad_alpha(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha}: expected a number in \(0, inf\)"):
        GeneralizedNormal(2, alpha=alpha)


def test_s11_missing_alpha(fresh_process):
    assert fresh_process["refusal"] == "alpha=None: expected a number in (0, inf)"


def test_s12_stationary_transitions():
    exact = World(Laplace(1), LaplaceAR(0.5), Identity(1))
    pairs = exact.sample_pairs(10**6, generator=gen())
    assert exact.stationarity.holds
    assert stats.kurtosis(pairs.z_next.double().flatten().numpy()) == pytest.approx(3.0, abs=0.2)
    assert correlation(pairs.z, pairs.z_next) == pytest.approx(0.5, abs=0.005)

    same_law_noise = World(Laplace(1), OU(0.5), Identity(1))
    pairs = same_law_noise.sample_pairs(10**6, generator=gen())
    assert not same_law_noise.stationarity.holds
    assert stats.kurtosis(pairs.z_next.double().flatten().numpy()) == pytest.approx(1.88, abs=0.12)
