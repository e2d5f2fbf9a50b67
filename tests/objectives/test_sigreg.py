"""SIGReg against its textbook form, its null levels, and its limits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from orthoworld.errors import ArgumentError
from orthoworld.objectives.sigreg import SIGReg, knot_grid, random_directions, sigreg, sigreg_null_level
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Identity
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def textbook(h, *, generator, slices=256, knots=17, t_max=3.0, scaled=False, pooled=False, debiased=False):
    """SIGReg with the tensor of views x samples x slices x knots written out."""
    if h.ndim == 2:
        h = h[None]
    if pooled:
        h = h.reshape(1, -1, h.shape[-1])
    a = torch.randn(h.shape[-1], slices, generator=generator).to(h)
    a = a / a.norm(dim=0)
    t = torch.linspace(0, t_max, knots, dtype=torch.float64).to(h)
    phase = (h @ a)[..., None] * t
    phi = torch.exp(-t.square() / 2)
    squared = (phase.cos().mean(dim=1) - phi).square() + phase.sin().mean(dim=1).square()
    if debiased:
        # |mean exp(i t x)|^2 over pairs of different samples: what two independent draws would give.
        differences = (phase[:, :, None] - phase[:, None, :]).cos()
        n = h.shape[1]
        pairs = (differences.sum(dim=(1, 2)) - n) / (n * (n - 1))
        squared = pairs - 2 * phi * phase.cos().mean(dim=1) + phi.square()
    # The integral over [-t_max, t_max] of an even function, by the trapezoid rule.
    value = 2 * torch.trapezoid(squared * phi, t, dim=-1).mean()
    return value * h.shape[1] if scaled else value


settings = {
    "slices": st.integers(1, 9),
    "knots": st.integers(2, 20),
    "t_max": st.floats(0.5, 6.0),
    "scaled": st.booleans(),
    "pooled": st.booleans(),
}


shapes = st.tuples(st.integers(1, 3), st.integers(2, 8), st.integers(1, 9))


@pytest.mark.parametrize("debiased", [False, True])
@given(shape=shapes, options=st.fixed_dictionaries(settings), scale=st.sampled_from([0.01, 1.0, 5.0]))
def test_value_and_gradient_are_those_of_the_textbook(debiased, shape, options, scale):
    options |= {"debiased": debiased, "pooled": options["pooled"] and not debiased}
    results = []
    for function in (sigreg, textbook):
        h = (scale * normal(*shape)).requires_grad_()
        value = function(h, generator=gen(7), **options)
        value.backward()
        results.append((value.detach(), h.grad))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-13, rtol=1e-11)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-13, rtol=1e-9)


@pytest.mark.parametrize("form", [{}, {"pooled": True}, {"debiased": True}], ids=str)
def test_gradient_is_that_of_finite_differences(form):
    h = normal(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: sigreg(h, generator=gen(7), slices=5, knots=6, **form), h)


def test_module_is_the_function_with_its_settings():
    common = {"slices": 5, "knots": 9, "t_max": 2.0, "scaled": True}
    h = normal(2, 8, 3)
    for form in ({"pooled": True, "debiased": False}, {"pooled": False, "debiased": True}):
        module = SIGReg(**common, **form)
        assert torch.equal(module(h, generator=gen(7)), sigreg(h, generator=gen(7), **common, **form))
    assert repr(module) == "SIGReg(slices=5, knots=9, t_max=2.0, scaled=True, pooled=False, debiased=True)"


def test_scaled_form_multiplies_by_the_samples_of_one_statistic():
    h = normal(2, 8, 3)
    for pooled, n in ((False, 8), (True, 16)):
        value, scaled = (sigreg(h, generator=gen(7), pooled=pooled, scaled=scaled) for scaled in (False, True))
        torch.testing.assert_close(scaled, n * value)


def test_statistic_of_each_view_is_averaged_and_pooling_is_one_statistic():
    h = normal(3, 8, 2)
    apart = torch.stack([sigreg(view, generator=gen(7)) for view in h]).mean()
    torch.testing.assert_close(sigreg(h, generator=gen(7)), apart)
    together = sigreg(h.reshape(24, 2), generator=gen(7))
    torch.testing.assert_close(sigreg(h, generator=gen(7), pooled=True), together)


def test_one_dimension_has_one_direction_up_to_sign():
    h = normal(16, 1)
    value = sigreg(h, generator=gen(1), slices=1)
    torch.testing.assert_close(sigreg(h, generator=gen(2), slices=9), value)
    torch.testing.assert_close(sigreg(-h, generator=gen(3), slices=4), value)


def test_rotation_keeps_sigreg_up_to_the_draw_of_directions():
    h = normal(256, 2) * torch.tensor([1.0, 1.5], dtype=torch.float64)
    turn = torch.linalg.qr(normal(2, 2)).Q
    values = [sigreg(rows, generator=gen(seed), slices=20_000) for seed, rows in enumerate((h, h @ turn))]
    torch.testing.assert_close(values[0], values[1], rtol=0.05, atol=0)  # Monte Carlo error of 20 000 directions


def test_directions_are_uniform_on_the_sphere():
    slices = 20_000
    a = random_directions(4, slices, generator=gen(), like=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(a.norm(dim=0), torch.ones(slices, dtype=torch.float64))
    assert a.mean(dim=1).abs().max() < 5 / math.sqrt(4 * slices)
    torch.testing.assert_close(
        a @ a.T / slices, torch.eye(4, dtype=torch.float64) / 4, atol=5 / math.sqrt(8 * slices), rtol=0
    )
    # A coordinate of a uniform point on the 3-sphere has fourth moment 3 / (4 * 6).
    assert a[0].pow(4).mean().item() == pytest.approx(1 / 8, abs=5 / math.sqrt(8 * slices))


def test_every_call_draws_fresh_directions():
    h, running = normal(8, 3), gen(7)
    first, second = (sigreg(h, generator=running, slices=4) for _ in range(2))
    assert first != second
    assert first == sigreg(h, generator=gen(7), slices=4)


def test_knot_weights_are_the_doubled_trapezoid_rule_under_the_window():
    _, target, weights = knot_grid(4, 3.0)
    phi = [math.exp(-(t**2) / 2) for t in (0, 1, 2, 3)]
    torch.testing.assert_close(target, torch.tensor(phi, dtype=torch.float64))
    expected = [phi[0], 2 * phi[1], 2 * phi[2], phi[3]]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_many_knots_are_the_integral():
    _, target, weights = knot_grid(4001, 12.0)
    # Collapse at 0: the integral of (1 - phi)^2 phi over the line is sqrt(2 pi) (1 - 2 / sqrt 2 + 1 / sqrt 3).
    integral = math.sqrt(2 * math.pi) * (1 - math.sqrt(2) + 1 / math.sqrt(3))
    assert float(weights @ (1 - target).square()) == pytest.approx(integral, rel=1e-6)


@given(
    n=st.integers(1, 4096),
    knots=st.integers(2, 40),
    t_max=st.floats(0.5, 6.0),
    views=st.integers(1, 4),
    r=st.floats(-0.3, 0.999),
)
def test_null_level_is_the_variance_of_the_empirical_characteristic_function(n, knots, t_max, views, r):
    # E|mean exp(itx)|^2 - phi^2 over n samples in groups of `views`, term by term.
    t = np.linspace(0, t_max, knots)
    phi = np.exp(-(t**2) / 2)
    same, partners, strangers = n, n * (views - 1), n * (n - 1) - n * (views - 1)
    second_moment = (same + partners * np.exp(-(t**2) * (1 - r)) + strangers * phi**2) / n**2
    expected = 2 * np.trapezoid((second_moment - phi**2) * phi, t)
    level = sigreg_null_level(n, knots=knots, t_max=t_max, views=views, r=r)
    assert level == pytest.approx(expected, rel=1e-9, abs=1e-14)
    scaled = sigreg_null_level(n, knots=knots, t_max=t_max, views=views, r=r, scaled=True)
    assert scaled == pytest.approx(n * expected, rel=1e-9, abs=1e-11)


def test_golden_levels():
    assert sigreg_null_level(512, scaled=True) == pytest.approx(1.0525, abs=5e-5)
    assert sigreg_null_level(512, views=2, r=0.9025, scaled=True) == pytest.approx(1.896, abs=5e-4)
    assert sigreg(torch.zeros(512, 3), generator=gen(), scaled=True).item() == pytest.approx(205.85, abs=5e-3)


@pytest.mark.parametrize("r", [0.0, 0.9, 1.0])
def test_knots_far_out_in_the_tail_leave_the_null_level_finite(r):
    # exp(-t^2 / 2) is 0 in float64 beyond t = 38.6; the same spacing of knots, and so the same integral.
    near, far = (sigreg_null_level(64, knots=2 * t_max + 1, t_max=t_max, views=2, r=r) for t_max in (10, 50))
    assert far == pytest.approx(near, rel=1e-9)


def test_module_knows_its_null_level():
    assert SIGReg(scaled=True).null_level(512) == pytest.approx(1.0525, abs=5e-5)
    assert SIGReg(scaled=True).null_level(512, views=2, r=0.9025) == pytest.approx(1.0525, abs=5e-5)
    assert SIGReg(scaled=True, pooled=True).null_level(256, views=2, r=0.9025) == pytest.approx(1.896, abs=5e-4)
    assert SIGReg(pooled=True).null_level(256, views=2, r=0.9025) == pytest.approx(1.896 / 512, abs=1e-6)
    assert SIGReg(debiased=True).null_level(256) == 0


@pytest.mark.parametrize("pooled", [False, True])
def test_latents_of_a_world_lie_at_the_null_level(pooled):
    world = World(Gaussian(8), SharedParent(OU(0.95)), Identity(8))
    module, running, batch, draws = SIGReg(128, pooled=pooled, scaled=True), gen(), 256, 150
    values = []
    for _ in range(draws):
        pairs = world.sample_pairs(batch, generator=running)
        values.append(module(torch.stack([pairs.z, pairs.z_next]), generator=running))
    error = torch.stack(values).std().item() / math.sqrt(draws)
    level = module.null_level(batch, views=2, r=world.r)
    assert torch.stack(values).mean().item() == pytest.approx(level, abs=4 * error)
    assert 4 * error < 0.1 * level


@pytest.mark.parametrize("scale", [0.0, 0.5, 0.9, 1.0, 1.2, 3.0])
def test_scaled_gaussian_has_the_closed_form(scale):
    # Midpoint quantiles: a sample of 10^5 points whose variance is off by 1.3e-5 only.
    n = 100_000
    h = scale * torch.from_numpy(ndtri((np.arange(n) + 0.5) / n))[:, None]
    t = np.linspace(0, 3, 17)
    phi = np.exp(-(t**2) / 2)
    expected = 2 * np.trapezoid((np.exp(-((scale * t) ** 2) / 2) - phi) ** 2 * phi, t)
    assert sigreg(h, generator=gen(), slices=1).item() == pytest.approx(expected, abs=2e-7)


def test_near_the_minimum_it_grows_as_twelve_hundredths_of_the_squared_variance_error():
    n = 100_000
    quantiles = torch.from_numpy(ndtri((np.arange(n) + 0.5) / n))[:, None]
    excess = 0.01
    value = sigreg(math.sqrt(1 + excess) * quantiles, generator=gen(), slices=1).item()
    assert value / excess**2 == pytest.approx(0.1206, rel=0.02)  # the cubic term is of relative size `excess`


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("n", [2, 16])
def test_debiased_form_has_the_distance_of_the_law_as_its_mean_at_any_batch_size(n, scale):
    t = np.linspace(0, 3, 17)
    phi = np.exp(-(t**2) / 2)
    distance = 2 * np.trapezoid((np.exp(-((scale * t) ** 2) / 2) - phi) ** 2 * phi, t)
    # Views are averaged: 20 000 of them are as many independent batches.
    batches = scale * normal(20_000, n, 1)
    values = sigreg(batches, generator=gen(), slices=1, debiased=True)
    spread = torch.stack([sigreg(batch, generator=gen(), slices=1, debiased=True) for batch in batches[:200]]).std()
    error = spread.item() / math.sqrt(20_000)
    assert values.item() == pytest.approx(distance, abs=4 * error)
    assert 4 * error < 0.1 * sigreg_null_level(n)


@pytest.mark.parametrize(("shape", "pooled"), [((2, 4, 3), True), ((4, 3), True), ((2, 1, 3), False)])
def test_only_independent_samples_can_be_debiased(shape, pooled):
    with pytest.raises(ArgumentError, match=r"debiased=True with (pooled=True|1 sample): expected"):
        sigreg(torch.zeros(shape), generator=gen(), pooled=pooled, debiased=True)


def test_pooled_and_debiased_are_refused_when_the_module_is_built():
    with pytest.raises(ArgumentError, match=r"debiased=True with pooled=True"):
        SIGReg(pooled=True, debiased=True)


@pytest.mark.parametrize("shift", [0.2, 2.0])
def test_a_shift_is_seen(shift):
    h = normal(4096, 2)
    level = sigreg_null_level(4096)
    assert sigreg(h, generator=gen()) < 3 * level
    assert sigreg(h + shift, generator=gen()) > 10 * level


def test_settings_are_checked_at_the_call_too():
    with pytest.raises(ArgumentError, match="slices=0: expected a whole number >= 1"):
        sigreg(torch.zeros(4, 2), generator=gen(), slices=0)
    with pytest.raises(ArgumentError, match="n=0: expected a whole number >= 1"):
        sigreg_null_level(0)
