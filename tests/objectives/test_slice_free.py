"""SIGReg over all directions against exact averages, its closed forms, and its limits."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import gamma, jv

from orthoworld.errors import ArgumentError
from orthoworld.experiments.config import load_experiment
from orthoworld.objectives import slice_free
from orthoworld.objectives.lejepa import ConstrainedLeJEPA, LeJEPA, WhitenedLeJEPA
from orthoworld.objectives.sigreg import SIGReg, knot_grid, sigreg, sigreg_null_level
from orthoworld.objectives.slice_free import RadialKernel, radial_kernel, sphere_cf

FORMS = [{}, {"pooled": True}, {"debiased": True}, {"scaled": True, "knots": 6, "t_max": 4.0}]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def value_and_gradient(function, h):
    h = h.clone().requires_grad_()
    value = function(h)
    value.backward()
    return value.detach(), h.grad


def all_directions(h, **form):
    return value_and_gradient(lambda h: sigreg(h, slices=None, **form), h)


def sphere_rule(dim, count):
    """Directions in one to three dimensions, and weights, whose averages of smooth functions are exact."""
    if dim == 1:
        return torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    turn = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    circle = torch.stack([turn.cos(), turn.sin()])
    if dim == 2:
        return circle, torch.full((count,), 1 / count, dtype=torch.float64)
    height, weight = map(torch.from_numpy, np.polynomial.legendre.leggauss(count))
    ring = (1 - height.square()).sqrt()
    points = torch.cat([ring[:, None] * circle[:, None], height.expand(1, count)[..., None].expand(1, -1, count)])
    return points.flatten(1), (weight / 2 / count).repeat_interleave(count)


def averaged(h, count=96, knots=17, t_max=3.0, scaled=False, pooled=False, debiased=False):
    """The statistic written out, its average taken over the directions of `sphere_rule`."""
    h = h.reshape(1, -1, h.shape[-1]) if pooled or h.ndim == 2 else h
    directions, shares = sphere_rule(h.shape[-1], count)
    t, phi, weights = knot_grid(knots, t_max)
    phase = (h @ directions)[..., None] * t
    n = h.shape[1]
    cos = phase.cos().mean(dim=1)
    squared = cos.square() + phase.sin().mean(dim=1).square()
    if debiased:
        squared = (n * squared - 1) / (n - 1)
    statistic = (squared - 2 * phi * cos + phi.square()) @ weights
    return (statistic @ shares).mean() * (n if scaled else 1)


@pytest.mark.parametrize(
    ("dim", "closed_form"),
    [(1, np.cos), (2, lambda s: jv(0, s)), (3, lambda s: np.sinc(s / np.pi)), (4, lambda s: 2 * jv(1, s) / s)],
)
def test_sphere_has_its_closed_form_in_low_dimensions(dim, closed_form):
    s = torch.cat([torch.linspace(1e-6, 200, 4001), torch.logspace(2, 6, 50)]).double()
    np.testing.assert_allclose(sphere_cf(dim, s), closed_form(s.numpy()), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dim", [2, 5, 8, 17, 32, 33, 64, 171, 512, 1026])
def test_sphere_is_the_hypergeometric_function(dim):
    edge = 64 + 7 * math.sqrt(dim)
    s = [0.0, 1e-9, 0.1, 1.0, 5.0, 20.0, 50.0, edge - 1e-6, edge + 1e-6, 400.0]
    with mpmath.workdps(30):
        expected = [float(mpmath.hyp0f1(mpmath.mpf(dim) / 2, -(mpmath.mpf(x) ** 2) / 4)) for x in s]
    np.testing.assert_allclose(sphere_cf(dim, torch.tensor(s, dtype=torch.float64)), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dim", [6, 11, 20])
def test_sphere_far_out_is_the_bessel_function(dim):
    s, order = np.logspace(2.3, 5, 40), dim / 2 - 1
    expected = gamma(dim / 2) * (2 / s) ** order * jv(order, s)
    # Relative to the envelope, or nothing would be left to see.
    envelope = gamma(dim / 2) * (2 / s) ** (order + 1 / 2)
    error = np.abs(sphere_cf(dim, torch.from_numpy(s)).numpy() - expected) / envelope
    assert error.max() < 1e-9


@pytest.mark.parametrize(("knots", "t_max"), [(17, 3.0), (2, 50.0), (40, 6.0)])
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 1024])
def test_tables_hold_the_kernel_and_its_slope(dim, knots, t_max):
    t, _, weights = knot_grid(knots, t_max)
    kernel = RadialKernel(dim, tuple(t.tolist()), tuple(weights.tolist()), 16.0, torch.device("cpu"))
    d = 16 * torch.rand(2000, dtype=torch.float64, generator=gen())
    for order in (0, 1):
        error = (kernel(d, order) - kernel.exact(d, order)).abs().max() / weights.sum()
        assert error < 1.1e-10


def test_slope_is_the_derivative_over_the_distance():
    t, _, weights = knot_grid(17, 3.0)
    kernel = RadialKernel(5, tuple(t.tolist()), tuple(weights.tolist()), 32.0, torch.device("cpu"))
    d, step = torch.tensor([1e-3, 0.5, 4.0, 20.0], dtype=torch.float64), 1e-5
    difference = (kernel.exact(d + step, 0) - kernel.exact(d - step, 0)) / (2 * step)
    torch.testing.assert_close(d * kernel.exact(d, 1), difference, atol=1e-9, rtol=0)


@every_form
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_value_and_gradient_are_those_of_the_exact_average(dim, scale, form):
    h = scale * normal(2, 7, dim) + 0.3
    value, gradient = all_directions(h, **form)
    expected, expected_gradient = value_and_gradient(lambda h: averaged(h, **form), h)
    torch.testing.assert_close(value, expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=0)


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@pytest.mark.parametrize("dim", [4, 32, 300])
def test_slices_converge_to_it(dim, form):
    h, running = 1.2 * normal(2, 12, dim), gen(3)
    draws = [
        value_and_gradient(lambda h: sigreg(h, slices=5000, generator=running, **form), h.float()) for _ in range(20)
    ]
    for exact, drawn in zip(all_directions(h, **form), zip(*draws, strict=True), strict=True):
        drawn = torch.stack(drawn).double()
        error = drawn.std(dim=0) / math.sqrt(20)
        # Student's t with 19 degrees of freedom: 6 is exceeded once in 10^5 entries.
        assert ((drawn.mean(dim=0) - exact).abs() < 6 * error + 1e-8).all()
        assert error.norm() < 0.2 * exact.norm()


@every_form
def test_gradient_is_that_of_finite_differences(form):
    h = normal(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: sigreg(h, slices=None, **form), h, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 3, 100])
def test_rotation_leaves_the_value_and_turns_the_gradient(dim):
    h = normal(2, 9, dim) * torch.linspace(0.5, 2, dim, dtype=torch.float64)
    turn = torch.linalg.qr(normal(dim, dim)).Q
    value, gradient = all_directions(h)
    turned_value, turned_gradient = all_directions(h @ turn)
    torch.testing.assert_close(turned_value, value, atol=1e-13, rtol=0)
    torch.testing.assert_close(turned_gradient, gradient @ turn, atol=1e-13, rtol=0)


def test_golden_values():
    assert sigreg(torch.tensor([[1.0], [-1.0]]), slices=None, scaled=True).item() == pytest.approx(0.205659, abs=1e-6)
    assert sigreg(torch.tensor([[0.5]]), slices=None).item() == pytest.approx(0.616737, abs=1e-6)
    for dim in (1, 2, 7, 200):
        assert sigreg(torch.zeros(16, dim), slices=None).item() == pytest.approx(0.40205, abs=5e-6)


@pytest.mark.parametrize(("n", "dim"), [(32, 2), (64, 16)])
def test_mean_over_normal_batches_is_the_null_level(n, dim):
    # Views are averaged: 2000 of them are as many independent batches.
    batches = normal(2000, n, dim)
    level = sigreg_null_level(n)
    plain, debiased = (sigreg(batches, slices=None, debiased=debiased).item() for debiased in (False, True))
    spread = torch.stack([sigreg(batch, slices=None) for batch in batches[:200]]).std().item() / math.sqrt(2000)
    assert plain == pytest.approx(level, abs=4 * spread)
    assert debiased == pytest.approx(0, abs=4 * spread * n / (n - 1))
    assert 4 * spread < 0.1 * level


@pytest.mark.parametrize("point", [0.0, 0.7])
def test_collapse_has_a_finite_gradient(point):
    h = torch.full((2, 8, 3), point, dtype=torch.float64)
    value, gradient = all_directions(h)
    assert value == pytest.approx(averaged(h).item(), abs=1e-9)
    torch.testing.assert_close(gradient, value_and_gradient(averaged, h)[1], atol=1e-9, rtol=0)
    if point == 0:
        assert (gradient == 0).all()


def test_a_batch_with_every_row_twice_is_the_same_law():
    h = normal(10, 4)
    value, gradient = all_directions(h)
    twice, halves = all_directions(torch.cat([h, h]))
    torch.testing.assert_close(twice, value, atol=1e-14, rtol=0)
    torch.testing.assert_close(halves, torch.cat([gradient, gradient]) / 2, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_lose_no_more_than_their_rounding(dtype):
    h = (1.3 * normal(2, 64, 8)).to(dtype)
    exact, exact_gradient = all_directions(h.double())
    with torch.autocast("cpu", torch.bfloat16):
        value, gradient = all_directions(h)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, exact.float(), atol=0, rtol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=eps * exact_gradient.abs().max(), rtol=eps)


@every_form
def test_blocks_do_not_change_the_result(monkeypatch, form):
    h = normal(2, 33, 5)
    value, gradient = all_directions(h, **form)
    for elements in (1, 500, 10**9):
        monkeypatch.setattr(slice_free, "BLOCK_ELEMENTS", elements)
        torch.testing.assert_close(all_directions(h, **form), (value, gradient), atol=1e-13, rtol=0)


@pytest.mark.parametrize(("dim", "scale", "count"), [(1, 2e3, 1), (1, 1e7, 1), (2, 1e3, 16_000), (2, 5e3, 80_000)])
def test_large_distances_are_exact_too(dim, scale, count):
    h = torch.cat([scale * normal(4, dim), normal(3, dim)])
    assert h.norm(dim=1).max() > slice_free.TABLE_REACH > h.norm(dim=1).min()
    value, gradient = all_directions(h)
    expected, expected_gradient = value_and_gradient(lambda h: averaged(h, count), h)
    torch.testing.assert_close(value, expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=0)


def test_the_end_of_the_table_is_no_seam(monkeypatch):
    h = 3 * normal(20, 3)
    looked_up = all_directions(h)
    monkeypatch.setattr(slice_free, "TABLE_REACH", 4.0)
    radial_kernel.cache_clear()
    torch.testing.assert_close(all_directions(h), looked_up, atol=1e-9, rtol=0)
    radial_kernel.cache_clear()


def test_an_exploding_embedding_needs_no_larger_table():
    t, _, weights = (tuple(values.tolist()) for values in knot_grid(17, 3.0))
    largest = RadialKernel(64, t, weights, slice_free.TABLE_REACH, torch.device("cpu"))
    endless = RadialKernel(64, t, weights, math.inf, torch.device("cpu"))
    assert endless.tables[0].shape == largest.tables[0].shape
    value, gradient = all_directions(1e30 * normal(8, 64))
    # Nothing is left of the kernels but the knot at 0: w_0 (1 - 1)^2 and the pairs of a row with itself.
    _, phi, weights = knot_grid(17, 3.0)
    expected = weights[1:] @ (phi[1:].square() + 1 / 8)
    torch.testing.assert_close(value, expected, atol=1e-9, rtol=0)
    assert (gradient.abs() < 1e-9).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_give_nan(wrong):
    h = normal(4, 2)
    h[1, 0] = wrong
    value, gradient = all_directions(h)
    assert value.isnan()
    assert gradient.isnan().all()


def test_no_gradient_is_made_where_none_is_asked_for():
    h = normal(6, 2)
    value = sigreg(h, slices=None)
    assert not value.requires_grad
    torch.testing.assert_close(value, all_directions(h)[0], atol=0, rtol=0)


def test_directions_that_are_drawn_need_a_generator():
    with pytest.raises(ArgumentError, match=r"generator=None: expected a torch.Generator"):
        sigreg(torch.zeros(4, 2))
    with pytest.raises(ArgumentError, match=r"generator=None: expected a torch.Generator"):
        SIGReg()(torch.zeros(4, 2))


@every_form
def test_module_is_the_function(form):
    h, module = normal(2, 8, 3), SIGReg(None, **form)
    assert torch.equal(module(h), sigreg(h, slices=None, **form))
    assert repr(module).startswith("SIGReg(slices=None")


@pytest.mark.parametrize("objective", [LeJEPA, WhitenedLeJEPA, ConstrainedLeJEPA])
def test_objectives_take_all_directions_and_draw_nothing(objective):
    h, running = normal(2, 16, 3), gen(7)
    before = running.get_state()
    settings = {"lam": 0.1} if objective is LeJEPA else {}
    exact = objective(slices=None, **settings)(h, generator=running).regulariser
    assert torch.equal(running.get_state(), before)
    drawn = objective(slices=20_000, **settings)(h, generator=running).regulariser
    torch.testing.assert_close(drawn, exact, atol=1e-3, rtol=0.03)


def test_a_run_can_be_configured_with_all_directions():
    experiment = load_experiment("two-d").overridden(["objectives=whitened-lejepa", "objective.slices=null"])
    specs = experiment.runs()
    assert {spec.objective.slices for spec in specs} == {None}
    assert specs[0].objective.build().sigreg.slices is None
