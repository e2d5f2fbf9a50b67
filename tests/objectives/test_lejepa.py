"""The weighted and the constrained objectives: their formulas, their optima, and what they prefer."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.infonce import infonce
from orthoworld.objectives.lejepa import (
    ConstrainedLeJEPA,
    InfoNCE,
    LeJEPA,
    WhitenedAlignment,
    WhitenedLeJEPA,
    Whitening,
)
from orthoworld.objectives.sigreg import sigreg, sigreg_null_level
from orthoworld.objectives.vicreg import VICReg
from orthoworld.objectives.whitening import whiten, whitening
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Identity
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World

OBJECTIVES = {
    "lejepa": LeJEPA(0.05, slices=8),
    "lejepa-pooled": LeJEPA(0.05, slices=8, pooled=True),
    "whitening": Whitening(0.5),
    "infonce": InfoNCE(0.7),
    "vicreg": VICReg(),
    "whitened-alignment": WhitenedAlignment(),
    "whitened-lejepa": WhitenedLeJEPA(shape=0.5, slices=8),
    "constrained-lejepa": ConstrainedLeJEPA(slices=8),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def latents(n, dim=2, rho=0.95, seed=0):
    """Both views of `n` pairs of a Gaussian world with direct pairs."""
    pairs = World(Gaussian(dim), OU(rho), Identity(dim)).sample_pairs(n, generator=gen(seed))
    return torch.stack([pairs.z, pairs.z_next]).double()


def exact_pairs(n, rho):
    """Two views whose pooled sample covariance and cross-covariance are exactly `I` and `diag(rho)`."""
    dim = len(rho)
    base = torch.linalg.qr(torch.cat([torch.ones(n, 1).double(), normal(n, 2 * dim)], dim=1)).Q[:, 1:]
    z, noise = (base * math.sqrt(n - 0.5)).split(dim, dim=1)  # n - 1/2: unbiased over 2 n rows
    rho = torch.tensor(rho, dtype=torch.float64)
    return torch.stack([z, rho * z + (1 - rho**2).sqrt() * noise])


@every_objective
def test_gradient_is_that_of_finite_differences(objective):
    h = normal(2, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: objective(h, generator=gen(7)).total, h)


@every_objective
def test_alignment_is_reported_in_norm_units(objective):
    h = 2 + 3 * normal(2, 16, 3)
    own = whiten(h) if objective.whitens else h
    torch.testing.assert_close(objective(h, generator=gen()).alignment, alignment(own))


@given(lam=st.floats(0, 1), views=st.integers(2, 4), pooled=st.booleans())
def test_lejepa_is_the_published_sum(lam, views, pooled):
    h = normal(views, 16, 3)
    losses = LeJEPA(lam, pooled=pooled, slices=8)(h, generator=gen(7))
    gaussianity = sigreg(h, generator=gen(7), slices=8, scaled=True, pooled=pooled)
    torch.testing.assert_close(losses.regulariser, gaussianity)
    torch.testing.assert_close(losses.total, lam * gaussianity + (1 - lam) * alignment(h, form="centroid"))


@given(lam=st.floats(0, 1), views=st.integers(2, 4))
def test_whitening_is_the_published_sum(lam, views):
    h = normal(views, 16, 3)
    losses = Whitening(lam)(h, generator=gen())
    torch.testing.assert_close(losses.regulariser, whitening(h, form="mean"))
    torch.testing.assert_close(losses.total, lam * whitening(h) + (1 - lam) * alignment(h, form="centroid"))


@pytest.mark.parametrize("objective", [InfoNCE(0.7), WhitenedAlignment()], ids=["infonce", "whitened-alignment"])
def test_absent_regulariser_is_none_and_touches_nothing(objective):
    h = normal(2, 16, 3).requires_grad_()
    losses = objective(h, generator=gen())
    assert losses.regulariser is None
    losses.total.backward()
    assert torch.isfinite(h.grad).all()


def test_infonce_objective_is_the_function():
    h = normal(2, 16, 3)
    torch.testing.assert_close(InfoNCE(0.7)(h, generator=gen()).total, infonce(h, sigma=0.7))


# The shrinkage of the soft form, arXiv:2605.26379, its code: pairs correlated at rho^2, 256 in a view, pooled.

SHRINKAGE = {0.3: 0.853, 0.5: 0.799, 0.7: 0.691, 0.8: 0.593, 0.9: 0.424, 0.95: 0.277, 0.99: 0.080}


@pytest.mark.parametrize(("rho", "error"), SHRINKAGE.items())
def test_predicted_scale_gives_the_published_orthogonality_errors(rho, error):
    scale = LeJEPA(lam=1e-3, pooled=True).predicted_scale(r=rho**2, batch=256)
    assert abs(scale**2 - 1) == pytest.approx(error, abs=0.002)


@pytest.mark.parametrize("rho", SHRINKAGE)
@pytest.mark.parametrize("lam", [1e-5, 1e-6, 0.0])
def test_small_weights_are_predicted_to_collapse(rho, lam):
    assert LeJEPA(lam=lam, pooled=True).predicted_scale(r=rho**2, batch=256) == 0.0


@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_one_ten_thousandth_collapses_up_to_rho_nine_tenths(rho):
    soft = LeJEPA(lam=1e-4, pooled=True)
    assert soft.predicted_scale(r=rho**2, batch=256) == 0.0
    assert soft.predicted_scale(r=0.95**2, batch=256) > 0.3


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("lam", "r", "batch"), [(1e-3, 0.9025, 256), (1e-2, 0.25, 64), (0.1, 0.9, 32), (1.0, 0.5, 8)])
def test_predicted_scale_minimises_the_expected_loss(pooled, lam, r, batch):
    t = np.linspace(0, 3, 17)
    phi, groups = np.exp(-(t**2) / 2), 2 if pooled else 1
    n = groups * batch

    def expected_loss(s):
        # E|mean exp(itx)|^2 over n normal samples of variance s^2, of which each has groups - 1 partners.
        mean = np.exp(-((s * t) ** 2) / 2)
        partners = (groups - 1) * np.exp(-((s * t) ** 2) * (1 - r))
        second_moment = (1 + partners + (n - groups) * mean**2) / n
        statistic = 2 * np.trapezoid((second_moment - 2 * mean * phi + phi**2) * phi, t)
        return lam * n * statistic + (1 - lam) * s**2 * (1 - r) / 2

    scales = np.linspace(0, 1.4, 14_001)
    best = scales[np.argmin([expected_loss(s) for s in scales])]
    assert LeJEPA(lam, pooled=pooled).predicted_scale(r=r, batch=batch) == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("pooled", [False, True])
def test_scaled_latents_of_a_world_do_best_at_the_predicted_scale(pooled):
    world, soft = World(Gaussian(2), SharedParent(OU(0.95)), Identity(2)), LeJEPA(lam=5e-3, pooled=pooled, slices=32)
    running = gen()
    batches = [world.sample_pairs(256, generator=running) for _ in range(60)]

    def mean_loss(s):
        views = (s * torch.stack([pairs.z, pairs.z_next]) for pairs in batches)
        return torch.stack([soft(h, generator=gen(i)).total for i, h in enumerate(views)]).mean()

    best = soft.predicted_scale(r=0.95**2, batch=256)
    assert mean_loss(best) < min(mean_loss(0.9 * best), mean_loss(1.1 * best))


@pytest.mark.parametrize("r", [-1.0, 1.0, 2.0, math.nan])
def test_prediction_needs_a_correlation(r):
    with pytest.raises(ArgumentError, match=rf"r={r}: expected a number in \(-1, 1\)"):
        LeJEPA(0.1).predicted_scale(r=r, batch=64)


def test_prediction_needs_a_batch():
    with pytest.raises(ArgumentError, match="batch=0: expected a whole number >= 1"):
        LeJEPA(0.1).predicted_scale(r=0.5, batch=0)


def test_knots_far_out_in_the_tail_do_not_predict_a_collapse():
    # exp(-t^2 / 2) is 0 in float64 beyond t = 38.6; the same spacing of knots, and so the same integral.
    near, far = (LeJEPA(0.1, t_max=t_max, knots=2 * t_max + 1).predicted_scale(r=0.5, batch=64) for t_max in (10, 50))
    assert far == pytest.approx(near, abs=1e-6)
    assert near > 0.5


# Whitened alignment.


def test_whitened_alignment_is_one_minus_the_mean_pair_correlation():
    rho = [0.9, 0.5, 0.1]
    h = exact_pairs(50, rho)
    losses = WhitenedAlignment()(h @ (normal(3, 3) + 2 * torch.eye(3)) - 4, generator=gen())
    # Exact up to the jitter; the covariance of 2 n rows is unbiased and the mean over n pairs is not.
    unbiased = (50 - 1 / 2) / 50
    assert losses.total.item() == pytest.approx(unbiased * (1 - sum(rho) / 3), rel=1e-4)
    assert losses.alignment.item() == pytest.approx(unbiased * 2 * sum(1 - r for r in rho), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_no_recombination_of_the_latents_beats_one_minus_rho(seed):
    rho, n = 0.8, 20_000
    h = torch.cat([latents(n, 3, rho), normal(2, n, 2, seed=9)], dim=2) @ normal(5, 3, seed=seed + 20)
    total = WhitenedAlignment()(h, generator=gen()).total.item()
    assert total > 1 - rho - 5 * math.sqrt((1 - rho) / n)
    assert WhitenedAlignment()(latents(n, 3, rho), generator=gen()).total.item() == pytest.approx(1 - rho, rel=0.03)


@pytest.mark.parametrize("objective", [WhitenedAlignment(), WhitenedLeJEPA(slices=16)], ids=["alignment", "lejepa"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_scale_and_shift_mean_nothing_to_whitened_objectives(objective, scale):
    h = normal(2, 64, 3)
    losses, moved = objective(h, generator=gen(7)), objective(scale * (h + 5), generator=gen(7))
    torch.testing.assert_close(moved.total, losses.total, rtol=1e-9, atol=0)


@given(shape=st.floats(0, 10))
def test_whitened_lejepa_adds_sigreg_of_the_whitened_embedding(shape):
    h = 2 + 3 * normal(2, 32, 3)
    losses = WhitenedLeJEPA(shape, slices=8)(h, generator=gen(7))
    torch.testing.assert_close(losses.regulariser, sigreg(whiten(h), generator=gen(7), slices=8))
    torch.testing.assert_close(losses.total, alignment(whiten(h)) / 6 + shape * losses.regulariser)


def test_only_whitened_objectives_speak_of_the_whitened_embedding():
    whitens = {name for name, objective in OBJECTIVES.items() if objective.whitens}
    assert whitens == {"whitened-alignment", "whitened-lejepa"}


# The harmonic: He_2 of one latent in the place of another latent.

RHO = 0.95


def hermite_features(z):
    """Orthonormal harmonics of two latents, without `z_1` itself; they decay as rho^degree: 1, 2, 3, 2, 2."""
    first, second = z.unbind(dim=-1)
    he2 = (first**2 - 1) / math.sqrt(2), (second**2 - 1) / math.sqrt(2)
    he3 = (first**3 - 3 * first) / math.sqrt(6)
    return torch.stack([first, he2[0], he3, he2[1], first * second], dim=-1)


def gradient_of_recombination(features, start):
    """Gradient of whitened alignment with respect to the matrix that combines the features."""
    combine = torch.tensor(start, dtype=torch.float64).requires_grad_()
    WhitenedAlignment()(features @ combine.T, generator=gen()).total.backward()
    return combine.grad


def test_features_are_orthonormal_and_decay_by_degree():
    n = 200_000
    features = hermite_features(latents(n, rho=RHO))
    gram = features.reshape(-1, 5).T @ features.reshape(-1, 5) / (2 * n)
    # He_3 squared has a standard deviation of about 10, and the two views are nearly the same sample.
    torch.testing.assert_close(gram, torch.eye(5).double(), atol=5 * 10 / math.sqrt(n), rtol=0)
    decay = (features[0] * features[1]).mean(dim=0)
    expected = torch.tensor([RHO, RHO**2, RHO**3, RHO**2, RHO**2], dtype=torch.float64)
    torch.testing.assert_close(decay, expected, atol=5 * 10 / math.sqrt(n), rtol=0)


def test_whitened_alignment_can_sit_on_a_harmonic():
    h = hermite_features(latents(100_000, rho=RHO))[..., :2]
    losses = WhitenedAlignment()(h, generator=gen())
    theory = 2 * (1 - RHO) + 2 * (1 - RHO**2)
    # Relative standard error of a mean of 10^5 squares with heavy tails: below one percent.
    assert losses.alignment.item() == pytest.approx(theory, rel=0.03)
    assert losses.total.item() == pytest.approx(theory / 4, rel=0.03)


def test_harmonic_is_a_stationary_point_of_whitened_alignment():
    features = hermite_features(latents(200_000, rho=RHO))
    at_harmonic = gradient_of_recombination(features, [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    elsewhere = gradient_of_recombination(features, [[1, 0, 0.7, 0, 0], [0, 1, 0, 0, 0]])
    slack = 5 * 0.55 / math.sqrt(200_000)  # the largest standard error, that of He_3, is .55 / sqrt n over seeds
    assert at_harmonic.abs().max() < slack
    assert elsewhere.abs().max() > 4 * slack


def test_latent_left_out_is_a_direction_of_descent_with_no_slope():
    z = latents(200_000, rho=RHO)
    features = torch.cat([hermite_features(z)[..., :2], z[..., 1:]], dim=-1)
    slope = gradient_of_recombination(features, [[1, 0, 0], [0, 1, 0]])
    assert slope.abs().max() < 5 * 0.2 / math.sqrt(200_000)  # standard error below .2 / sqrt n
    totals = [
        WhitenedAlignment()(features @ torch.tensor([[1, 0, 0], [0, 1, step]]).double().T, generator=gen()).total
        for step in (0.0, 0.5, 2.0)
    ]
    assert totals[0] > totals[1] > totals[2]


def test_shape_term_prefers_the_latents_to_the_harmonic_by_much_more():
    n = 10_000
    z = latents(n, rho=RHO)
    harmonic = hermite_features(z)[..., :2]
    null = sigreg_null_level(n)
    assert sigreg(whiten(harmonic), generator=gen(), slices=64).item() > 500 * null
    assert sigreg(whiten(z), generator=gen(), slices=64).item() < 3 * null
    gaps = [
        (objective(harmonic, generator=gen()).total - objective(z, generator=gen()).total).item()
        for objective in (WhitenedAlignment(), WhitenedLeJEPA(shape=1.0))
    ]
    assert gaps[0] == pytest.approx((RHO - RHO**2) / 2, rel=0.15)
    assert gaps[1] > 4 * gaps[0]


# The augmented Lagrangian.


def test_constrained_total_weighs_the_debiased_sigreg():
    h = normal(2, 16, 3)
    objective = ConstrainedLeJEPA(slices=8, penalty=20.0)
    objective.multiplier.fill_(3.0)
    for violation, weight in ((0.5, 13.0), (-0.1, 1.0), (-1.0, 0.0)):
        objective.violation.fill_(violation)
        losses = objective(h, generator=gen(7))
        distance = sigreg(h, generator=gen(7), slices=8, debiased=True)
        torch.testing.assert_close(losses.regulariser, distance)
        torch.testing.assert_close(losses.total, alignment(h) / 6 + weight * distance)


def test_multiplier_follows_the_running_violation_in_bounded_steps_and_is_not_negative():
    objective = ConstrainedLeJEPA(tolerance=0.25, rate=0.5, slices=8)
    h = normal(2, 16, 3).float()
    violation, multiplier, steps = 0.0, 1.0, []
    for scale in [5.0] * 40 + [1.0] * 80:
        losses = objective(scale * h, generator=gen())
        objective.after_step(losses)
        violation += 0.02 * (losses.regulariser.item() - 0.25 - violation)
        steps.append(0.5 * max(-1.0, min(1.0, violation / 0.25)))
        multiplier = max(0.0, multiplier + steps[-1])
        assert objective.violation.item() == pytest.approx(violation, rel=1e-4, abs=1e-6)
        assert objective.multiplier.item() == pytest.approx(multiplier, rel=1e-4, abs=1e-5)
    assert max(steps) == 0.5  # the bound was met on the way up,
    assert min(steps) < 0  # and the way down was gone
    objective.multiplier.fill_(0.1)
    objective.violation.fill_(-10.0)
    objective.after_step(losses)
    assert objective.multiplier.item() == 0.0


def test_multiplier_follows_embeddings_of_any_precision():
    objective = ConstrainedLeJEPA(slices=8)
    objective.after_step(objective(5 * normal(2, 16, 3), generator=gen()))
    assert objective.multiplier.item() > 1


def test_constraint_is_met_by_latents_in_the_mean():
    objective, draws = ConstrainedLeJEPA(slices=64), 100
    values = [objective(latents(256, seed=seed), generator=gen(seed)).regulariser for seed in range(draws)]
    error = torch.stack(values).std().item() / math.sqrt(draws)
    assert torch.stack(values).mean().item() == pytest.approx(0, abs=4 * error)


def test_multiplier_and_violation_travel_in_the_state_dict():
    objective, restored = ConstrainedLeJEPA(), ConstrainedLeJEPA()
    objective.multiplier.fill_(3.0)
    objective.violation.fill_(-0.5)
    restored.load_state_dict(objective.state_dict())
    assert (restored.multiplier.item(), restored.violation.item()) == (3.0, -0.5)


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"constrained-lejepa"}))
def test_other_objectives_keep_no_state(name):
    assert OBJECTIVES[name].state_dict() == {}


# Types, shapes, arguments.


def terms(losses):
    """The terms an objective has."""
    given = (losses.total, losses.alignment, losses.regulariser)
    return [term for term in given if term is not None]


@every_objective
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_under_autocast_is_computed_in_float32(objective, dtype):
    h = normal(2, 64, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        losses = objective(h, generator=gen(7))
    expected = objective(h.float(), generator=gen(7))
    for own, other in zip(terms(losses), terms(expected), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, atol=0, rtol=0)


@every_objective
def test_device_follows_the_embeddings_and_the_generator_stays_on_the_cpu(objective):
    h = torch.zeros(2, 16, 3, device="meta", requires_grad=True)
    losses = copy.deepcopy(objective).to("meta")(h, generator=gen())
    assert {term.device for term in terms(losses)} == {torch.device("meta")}
    losses.total.backward()
    assert h.grad.shape == h.shape


@every_objective
def test_embeddings_without_a_second_view_are_refused(objective):
    for shape in ((16, 3), (1, 16, 3)):
        with pytest.raises(ShapeError) as raised:
            objective(torch.zeros(shape), generator=gen())
        assert f"embeddings have shape {shape}: expected" in str(raised.value)


@every_objective
def test_integers_are_refused(objective):
    with pytest.raises(TypeError, match=r"dtype torch.int64: expected a floating-point type"):
        objective(torch.zeros(2, 16, 3, dtype=torch.int64), generator=gen())


@pytest.mark.parametrize("objective", [WhitenedAlignment(), WhitenedLeJEPA()], ids=["alignment", "lejepa"])
def test_exact_whitening_needs_more_samples_than_dimensions(objective):
    with pytest.raises(ShapeError, match=r"4 samples: expected more than 4, to whiten"):
        objective(torch.zeros(2, 2, 4), generator=gen())


@pytest.mark.parametrize("kind", [LeJEPA, Whitening])
@pytest.mark.parametrize("lam", [-0.1, 1.5, math.nan])
def test_weight_lies_between_zero_and_one(kind, lam):
    with pytest.raises(ArgumentError, match=rf"lam={lam}: expected a number in \[0, 1\]"):
        kind(lam)


@pytest.mark.parametrize("name", ["tolerance", "penalty", "rate"])
def test_parameters_of_the_constraint_are_positive(name):
    with pytest.raises(ArgumentError, match=rf"{name}=0.0: expected a number in \(0, inf\)"):
        ConstrainedLeJEPA(**{name: 0.0})


def test_other_parameters_lie_in_their_ranges():
    with pytest.raises(ArgumentError, match=r"shape=-1.0: expected a number in \[0, inf\)"):
        WhitenedLeJEPA(shape=-1.0)
    with pytest.raises(ArgumentError, match=r"sigma=0.0: expected a number in \(0, inf\)"):
        InfoNCE(sigma=0.0)
    with pytest.raises(ArgumentError, match=r"slices=0: expected a whole number >= 1"):
        WhitenedLeJEPA(slices=0)
