import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.bound import bound, bound_of_batches
from orthoworld.identifiability.recovery import recovery

SEEDS = st.integers(0, 2**31)
RHOS = st.floats(0.05, 0.95)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(seed, dim):
    return torch.linalg.qr(normal(seed, dim, dim))[0]


def gaussian_pairs(seed, n, dim, rho):
    noise = normal(seed, 2, n, dim)
    return noise[0], rho * noise[0] + math.sqrt(1 - rho**2) * noise[1]


def exactly_white(z):
    centred = z - z.mean(dim=0)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(centred.T @ centred / len(z))).T


def he2(z):
    return (z.square() - 1) / math.sqrt(2)


def bent(z):
    return z + 0.3 * he2(z).flip(-1) + 2


def turned(z):
    """Rotation by an angle that grows with the distance from the origin."""
    angle = 0.5 * z.norm(dim=-1, keepdim=True)
    return angle.cos() * z + angle.sin() * torch.stack([-z[:, 1], z[:, 0]], dim=1)


def standard_error_of_energy(h, h_next, rho):
    """Return the standard error of `D` in the sample."""
    h, h_next = h - h.mean(dim=0), h_next - h_next.mean(dim=0)
    gaps = ((h_next - h).square() - 2 * (1 - rho) * h.square()).sum(dim=1)
    return gaps.std().item() / math.sqrt(len(h)) / (2 * rho * (1 - rho))


ENCODERS = {
    "perfect": lambda z: z,
    "scaled": lambda z: 0.7 * z,
    "stretched": lambda z: z * torch.tensor([0.5, 1.6]),
    "turned": turned,
    "turned-fast": lambda z: turned(turned(turned(z))),
    "bent": lambda z: z + 0.3 * he2(z),
    "harmonic": he2,
    "harmonic-of-one": lambda z: torch.stack([z[:, 0], he2(z[:, 0])], dim=1),
    "quadratic-form": lambda z: torch.stack([z[:, 0] * z[:, 1], z[:, 1]], dim=1),
    "squashed": lambda z: 1.2 * torch.tanh(z),
    "collapsed": lambda z: torch.stack([z[:, 0], torch.ones(len(z))], dim=1),
}


@given(seed=SEEDS, n=st.integers(10, 600), dim=st.integers(1, 9), rho=RHOS)
def test_every_term_is_its_formula(seed, n, dim, rho):
    z, z_next = gaussian_pairs(seed, n, dim, rho)
    h, h_next = bent(z), bent(z_next)
    found = bound(h, h_next, rho=rho, resamples=0)
    a, b = ((array - array.mean(dim=0)).numpy() for array in (h, h_next))
    cov = a.T @ a / n
    delta = ((b - a) ** 2).sum() / n - 2 * (1 - rho) * np.trace(cov)
    energy = max(delta, 0) / (2 * rho * (1 - rho))
    epsilon = np.linalg.norm(cov - np.eye(dim))
    gram = found.epsilon_debiased + energy
    expected = {
        "alignment": ((b - a) ** 2).sum() / n,
        "trace_cov": np.trace(cov),
        "delta": delta,
        "delta_clipped": max(delta, 0),
        "epsilon": epsilon,
        "epsilon_floor": math.sqrt(dim * (dim + 1) / n),
        "epsilon_debiased": math.sqrt(max(found.epsilon_squared_debiased, 0)),
        "nonlinear_energy": energy,
        "bound": energy + (epsilon + energy) ** 2,
        "bound_debiased": energy + (found.epsilon_debiased + energy) ** 2,
        "bound_sharp": energy + (gram / (1 + math.sqrt(max(0, 1 - gram)))) ** 2,
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (found.n, found.dropped, found.rho) == (n, 0, rho)


@pytest.mark.parametrize(("variances", "n"), [((1, 1), 20), ((4, 4, 4), 20), ((2, 0.5), 20)])
def test_the_debiased_epsilon_is_unbiased(variances, n):
    scale = torch.tensor(variances, dtype=torch.float64).sqrt()
    draws = [
        bound(h, h, rho=0.5, resamples=0).epsilon_squared_debiased
        for h in (normal(seed, n, len(variances)) * scale for seed in range(1000))
    ]
    error = np.std(draws) / math.sqrt(len(draws))
    assert np.mean(draws) == pytest.approx(sum((v - 1) ** 2 for v in variances), abs=4 * error)


@pytest.mark.parametrize("dim", [1, 2, 8])
def test_epsilon_of_a_perfect_encoder_is_its_floor(dim):
    found = [bound(h, h, rho=0.5, resamples=0) for h in (normal(seed, 500, dim) for seed in range(300))]
    squares = [result.epsilon**2 for result in found]
    # The standard deviation of the mean of 300 squares is below 9 % of the mean even in one dimension.
    assert math.sqrt(np.mean(squares)) == pytest.approx(found[0].epsilon_floor, rel=0.15)


@pytest.mark.parametrize(("dim", "rho"), [(1, 0.5), (2, 0.95), (5, 0.8)])
def test_delta_of_a_perfect_encoder_has_the_stated_noise(dim, rho):
    n = 1000
    deltas = [bound(*gaussian_pairs(seed, n, dim, rho), rho=rho, resamples=0).delta for seed in range(400)]
    expected = math.sqrt(8 * (1 - rho) * (1 - rho**2) * dim / n)
    assert np.std(deltas) == pytest.approx(expected, rel=0.15)  # 4 standard errors of a deviation from 400 draws
    assert np.mean(deltas) == pytest.approx(0, abs=4 * expected / math.sqrt(400))


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_theorem_3_holds(name, rho):
    z, z_next = gaussian_pairs(1, 100_000, 2, rho)
    h, h_next = ENCODERS[name](z), ENCODERS[name](z_next)
    found = bound(h, h_next, rho=rho, z=z, z_next=z_next, resamples=0)
    # For a pure harmonic the theorem is an equality, so the noise of D has to be allowed for.
    noise = 4 * standard_error_of_energy(h, h_next, rho)
    energy = found.nonlinear_energy + noise
    assert energy >= found.nonlinear_energy_true
    assert energy + (found.epsilon + energy) ** 2 >= found.true_error
    assert found.bound_controlled >= found.true_error - noise * (1 + 2 * (found.epsilon + energy))


@pytest.mark.parametrize("c", [0.2, 0.7])
def test_a_second_harmonic_costs_what_the_theory_says(c):
    n, dim, rho = 400_000, 2, 0.5
    z, z_next = gaussian_pairs(2, n, dim, rho)
    found = bound(z + c * he2(z), z_next + c * he2(z_next), rho=rho, z=z, z_next=z_next, resamples=0)
    energy, epsilon = dim * c**2, math.sqrt(dim) * c**2
    noise = 4 * standard_error_of_energy(z + c * he2(z), z_next + c * he2(z_next), rho)
    assert noise < 0.1
    # The harmonic decays with rho^2 where the theorem allows rho: D is the energy itself.
    assert found.nonlinear_energy == pytest.approx(energy, abs=noise)
    assert found.delta == pytest.approx(2 * rho * (1 - rho) * energy, abs=noise)
    assert found.epsilon == pytest.approx(epsilon, abs=0.02)
    assert found.true_error == pytest.approx(energy, rel=0.02)
    assert found.linear_error == pytest.approx(0, abs=1e-3)
    expected = energy + (epsilon + energy) ** 2
    assert found.bound_controlled == pytest.approx(expected, abs=noise * (1 + 2 * (epsilon + energy)))


@pytest.mark.parametrize("scale", [0.5, 0.9, 1.5])
def test_a_scaled_encoder_has_no_gap_and_the_exact_ratio_of_bound_to_error(scale):
    z, z_next = gaussian_pairs(3, 1000, 3, 0.9)
    h, h_next = scale * z @ rotation(4, 3), scale * z_next @ rotation(4, 3)
    found = bound(h, h_next, rho=0.9, z=z, z_next=z_next, resamples=0)
    assert found.true_error == pytest.approx(3 * (scale - 1) ** 2, rel=1e-9)
    assert found.nonlinear_energy_true == pytest.approx(0, abs=1e-9)
    assert found.bound_controlled == pytest.approx(3 * (scale**2 - 1) ** 2, rel=1e-6)
    assert found.bound_controlled / found.true_error == pytest.approx((1 + scale) ** 2, rel=1e-6)


@given(seed=SEEDS, dim=st.integers(1, 9), out_dim=st.integers(1, 9))
def test_the_exact_error_is_that_of_procrustes_where_the_latents_are_exactly_white(seed, dim, out_dim):
    z = exactly_white(normal(seed, 200, dim))
    h = z @ normal(seed + 1, dim, out_dim) + 0.3 * normal(seed + 2, 200, out_dim)
    h = h + 0.2 * h.square()
    found = bound(h, h, rho=0.5, z=z, resamples=0)
    assert found.true_error == pytest.approx(found.linear_error + found.nonlinear_energy_true, rel=1e-12)
    assert found.true_error == pytest.approx(recovery(z, h, resamples=0).procrustes, rel=1e-9)


def test_the_exact_error_is_near_that_of_procrustes_in_a_large_sample():
    z = normal(0, 200_000, 2)
    found = bound(bent(z), bent(z), rho=0.5, z=z, resamples=0)
    assert found.true_error == pytest.approx(recovery(z, bent(z), resamples=0).procrustes, rel=0.02)


def test_the_controlled_bound_has_less_noise_about_the_same_value():
    c, dim, rho = 0.1, 2, 0.9
    energy = dim * c**2
    population = energy + (math.sqrt(dim) * c**2 + energy) ** 2
    plain, controlled = [], []
    for seed in range(60):
        z, z_next = gaussian_pairs(seed, 2000, dim, rho)
        found = bound(z + c * he2(z), z_next + c * he2(z_next), rho=rho, z=z, z_next=z_next, resamples=0)
        plain.append(abs(found.bound - population))
        controlled.append(abs(found.bound_controlled - population))
    assert np.mean(controlled) < np.mean(plain) / 2


@given(seed=SEEDS, dim=st.integers(1, 9), rho=RHOS)
def test_rotations_and_shifts_of_the_embedding_change_nothing(seed, dim, rho):
    z, z_next = gaussian_pairs(seed, 300, dim, rho)
    h, h_next = bent(z), bent(z_next)
    turn, shift = rotation(seed + 1, dim), normal(seed + 2, dim)
    before = bound(h, h_next, rho=rho, z=z, z_next=z_next, resamples=0)
    after = bound(h @ turn + shift, h_next @ turn + shift, rho=rho, z=z, z_next=z_next, resamples=0)
    for name in vars(before):
        if isinstance(getattr(before, name), float):
            assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-7, abs=1e-7), name


@pytest.mark.parametrize("rho", [-0.5, 0.0, 1.0])
def test_the_bound_is_undefined_outside_the_theorem_and_the_error_is_not(rho):
    z = normal(0, 500, 2)
    found = bound(z, z, rho=rho, z=z)
    for name in ("nonlinear_energy", "bound", "bound_debiased", "bound_sharp"):
        assert math.isnan(getattr(found, name))
        assert found.reasons[name] == f"rho = {rho:g}: the theorem needs 0 < rho < 1"
        assert name not in found.ci
    assert found.true_error == pytest.approx(0, abs=1e-12)
    assert math.isfinite(found.delta)


@pytest.mark.parametrize("rho", [1.2, -1.01, math.nan, math.inf])
def test_no_correlation_lies_beyond_one(rho):
    with pytest.raises(ArgumentError, match=r"rho=\S+: expected a number in \[-1, 1\]"):
        bound(normal(0, 50, 2), normal(1, 50, 2), rho=rho)


def test_the_theorem_needs_as_many_dimensions_as_latents():
    z, z_next = gaussian_pairs(0, 500, 3, 0.9)
    found = bound(z[:, :2], z_next[:, :2], rho=0.9, z=z)
    assert found.reasons["bound"] == "2 embedding dimensions for 3 latents: need as many"
    assert math.isnan(found.bound)
    assert found.true_error == pytest.approx(1, abs=1e-9)  # the third latent is missed


def test_what_needs_latents_says_so_without_them():
    found = bound(normal(0, 50, 2), normal(1, 50, 2), rho=0.5)
    assert all(math.isnan(side) for step in ("gram", "polar") for side in found.proof_steps()[step])
    for name in ("true_error", "linear_error", "nonlinear_energy_true", "gram_error", "procrustes"):
        assert math.isnan(getattr(found, name))
        assert found.reasons[name] == "no latents were given"
    assert math.isnan(found.bound_controlled)
    assert found.reasons["bound_controlled"] == "the latents of both states were not given"


def test_every_nan_has_a_reason():
    z = normal(0, 50, 2)
    for latents in ({}, {"z": z}, {"z": z, "z_next": z}):
        found = bound(z, z, rho=0.5, **latents)
        numbers = {name: value for name, value in vars(found).items() if isinstance(value, float)}
        assert {name for name, value in numbers.items() if math.isnan(value)} == set(found.reasons)


def test_embeddings_of_different_shape_are_refused():
    with pytest.raises(ShapeError, match=r"h has shape \(50, 2\) and h_next \(50, 3\): expected the same"):
        bound(normal(0, 50, 2), normal(0, 50, 3), rho=0.5)


def test_latents_of_different_shape_are_refused():
    with pytest.raises(ShapeError, match=r"z has shape \(50, 2\) and z_next \(50, 3\): expected the same"):
        bound(normal(0, 50, 2), normal(1, 50, 2), rho=0.5, z=normal(2, 50, 2), z_next=normal(3, 50, 3))


def test_the_second_latents_alone_are_refused():
    with pytest.raises(ArgumentError, match="z_next is given without z"):
        bound(normal(0, 50, 2), normal(1, 50, 2), rho=0.5, z_next=normal(2, 50, 2))


def test_pairs_that_are_not_finite_are_refused_or_dropped():
    h, h_next = normal(0, 50, 2), normal(1, 50, 2)
    h_next[[3, 4], 0] = torch.nan
    with pytest.raises(ArgumentError, match="h_next has 2 non-finite rows of 50"):
        bound(h, h_next, rho=0.5)
    found = bound(h, h_next, rho=0.5, drop=True)
    assert (found.n, found.dropped) == (48, 2)


def test_no_resamples_give_no_intervals_and_one_generator_the_same_ones():
    h, h_next = gaussian_pairs(0, 300, 2, 0.9)
    assert bound(h, h_next, rho=0.9, resamples=0).ci == {}
    by_seed = [bound(h, h_next, rho=0.9, generator=torch.Generator().manual_seed(seed)).ci for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] == bound(h, h_next, rho=0.9).ci
    assert by_seed[0] != by_seed[2]


def test_intervals_cover_the_population():
    # h = z A + noise, h' likewise: all of it follows from A, the noise and rho.
    slope, noise, rho, n = torch.tensor([[1.0, 0.5], [0.0, 0.8]]).double(), 0.3, 0.8, 1000
    cov = slope.T @ slope + noise**2 * torch.eye(2)
    sigma, trace = torch.linalg.svdvals(slope), cov.trace().item()
    alignment = 2 * trace - 2 * rho * slope.square().sum().item()
    truth = {
        "delta": alignment - 2 * (1 - rho) * trace,
        "epsilon": torch.linalg.matrix_norm(cov - torch.eye(2)).item(),
        "true_error": (sigma - 1).square().sum().item() + 2 * noise**2,
    }
    covered = dict.fromkeys(truth, 0)
    for seed in range(100):
        z, z_next = gaussian_pairs(3 * seed, n, 2, rho)
        noises = noise * normal(3 * seed + 1, 2, n, 2)
        found = bound(z @ slope + noises[0], z_next @ slope + noises[1], rho=rho, z=z)
        for name, value in truth.items():
            covered[name] += found.ci[name][0] <= value <= found.ci[name][1]
    assert all(85 <= hits <= 100 for hits in covered.values()), covered


def test_the_printed_result_shows_what_there_is():
    z, z_next = gaussian_pairs(0, 300, 2, 0.9)
    assert "true_error" not in str(bound(z, z_next, rho=0.9))
    text = str(bound(z, z_next, rho=0.9, z=z))
    assert text.startswith("bound from 300 pairs at rho = 0.9\n")
    assert "true_error" in text
    assert "(rho = 0: the theorem needs 0 < rho < 1)" in str(bound(z, z_next, rho=0.0))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_every_inequality_of_the_proof_holds_by_itself(encoder, rho):
    z, z_next = gaussian_pairs(3, 200_000, 2, rho)
    h, h_next = ENCODERS[encoder](z), ENCODERS[encoder](z_next)
    found = bound(h, h_next, rho=rho, z=z, z_next=z_next, resamples=0)
    noise = 5 * standard_error_of_energy(h, h_next, rho) + 0.03  # of D, and of the other moments
    for name, (left, right) in found.proof_steps().items():
        if name == "pythagoras":
            assert left == pytest.approx(right, abs=0.03), name
        else:
            assert left <= right + noise, name
    assert found.true_error <= found.bound_sharp + noise
    assert found.bound_sharp <= found.bound_debiased + 1e-12


def test_the_gram_step_is_an_equality_for_a_linear_encoder():
    z, z_next = (exactly_white(part) for part in gaussian_pairs(0, 1000, 2, 0.9))
    h = z * torch.tensor([0.5, 1.6])
    steps = bound(h, h, rho=0.9, z=z, z_next=z_next, resamples=0).proof_steps()
    assert steps["gram"][0] == pytest.approx(math.hypot(0.75, 1.56))
    assert steps["polar"] == pytest.approx((math.hypot(0.5, 0.6), math.hypot(0.75, 1.56) / 1.5))
    assert steps["pythagoras"] == pytest.approx((0.61, 0.61))


@given(seed=SEEDS, sizes=st.lists(st.integers(2, 60), min_size=1, max_size=25), dim=st.integers(1, 4), rho=RHOS)
def test_batches_give_what_the_whole_gives(seed, sizes, dim, rho):
    z, z_next = gaussian_pairs(seed, sum(sizes), dim, rho)
    rows = (bent(z) + 5, bent(z_next) + 5, z, z_next)
    together = bound(*rows[:2], rho=rho, z=z, z_next=z_next, resamples=0)
    found = bound_of_batches(zip(*(row.split(sizes) for row in rows), strict=True), rho=rho, resamples=0)
    for name, value in vars(together).items():
        if isinstance(value, (int, float)):
            assert getattr(found, name) == pytest.approx(value, rel=1e-7, abs=1e-7, nan_ok=True), name
    assert found.reasons == together.reasons


def test_batches_give_intervals_of_the_same_width():
    z, z_next = gaussian_pairs(0, 5120, 2, 0.9)
    together = bound(z, z_next, rho=0.9)
    found = bound_of_batches(zip(z.split(20), z_next.split(20), strict=True), rho=0.9)
    for name, (low, high) in together.ci.items():
        assert found.ci[name] == pytest.approx((low, high), rel=1e-6, abs=1e-9), name


def test_no_batch_is_refused():
    with pytest.raises(ArgumentError, match="expected one batch or more"):
        bound_of_batches([], rho=0.9)
    with pytest.raises(ArgumentError, match="h has 1 non-finite rows of 2"):
        bound_of_batches([(torch.tensor([[math.nan], [0.0]]), torch.zeros(2, 1))], rho=0.9)
