import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.recovery import recovery

SEEDS = st.integers(0, 2**31)
DIMS = st.integers(1, 9)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(seed, dim):
    return torch.linalg.qr(normal(seed, dim, dim))[0]


def exactly_white(z):
    centred = z - z.mean(dim=0)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(centred.T @ centred / len(z))).T


def latents_and_embedding(seed, n, dim, out_dim):
    """Latents and a noisy, bent, shifted map of them."""
    z = normal(seed, n, dim)
    h = z @ normal(seed + 1, dim, out_dim) + 0.3 * normal(seed + 2, n, out_dim) + 2
    return z, h + 0.2 * h.square()


def least_squares(source, target):
    design = np.column_stack([np.ones(len(source)), source])
    return np.linalg.lstsq(design, target, rcond=None)[0]


def held_out_r2(source, target, n_fit):
    coefficients = least_squares(source[:n_fit], target[:n_fit])
    residual = target[n_fit:] - np.column_stack([np.ones(len(source) - n_fit), source[n_fit:]]) @ coefficients
    scatter = target[n_fit:] - target[n_fit:].mean(axis=0)
    return 1 - (residual**2).sum(axis=0) / (scatter**2).sum(axis=0), 1 - (residual**2).sum() / (scatter**2).sum()


@given(seed=SEEDS, n=st.integers(40, 600), dim=DIMS, out_dim=DIMS)
def test_r2_is_that_of_least_squares_fitted_on_one_half_and_scored_on_the_other(seed, n, dim, out_dim):
    z, h = latents_and_embedding(seed, n, dim, out_dim)
    found = recovery(z, h, resamples=0)
    assert found.n_fit + found.n_score == found.n == n
    assert found.n_fit >= found.n_score >= n // 3  # whole groups of rows: the halves are not exactly equal
    hz, pooled = held_out_r2(h.numpy(), z.numpy(), found.n_fit)
    zh, _ = held_out_r2(z.numpy(), h.numpy(), found.n_fit)
    np.testing.assert_allclose(found.r2_hz_per_dim, hz, atol=1e-8)
    np.testing.assert_allclose(found.r2_zh_per_dim, zh, atol=1e-8)
    np.testing.assert_allclose([found.r2_hz, found.r2_zh], [hz.mean(), zh.mean()], atol=1e-8)
    assert found.r2_hz_pooled == pytest.approx(pooled, abs=1e-8)


@given(seed=SEEDS, n=st.integers(40, 600), dim=DIMS, out_dim=DIMS)
def test_orthogonality_error_is_that_of_the_least_squares_slope(seed, n, dim, out_dim):
    z, h = latents_and_embedding(seed, n, dim, out_dim)
    slope = least_squares(z.numpy(), h.numpy())[1:].T  # h = A z, so A is out_dim x dim
    expected = np.linalg.norm(slope.T @ slope - np.eye(dim)) / math.sqrt(dim)
    assert recovery(z, h, resamples=0).orth_err == pytest.approx(expected, rel=1e-8)


@given(seed=SEEDS, n=st.integers(40, 600), dim=DIMS, out_dim=DIMS)
def test_procrustes_is_that_of_scipy_for_the_padded_arrays(seed, n, dim, out_dim):
    z, h = latents_and_embedding(seed, n, dim, out_dim)
    padded = [
        np.pad(array - array.mean(axis=0), ((0, 0), (0, max(dim, out_dim) - array.shape[1])))
        for array in (z.numpy(), h.numpy())
    ]
    q, _ = scipy.linalg.orthogonal_procrustes(*padded)
    expected = ((padded[1] - padded[0] @ q) ** 2).sum(axis=1).mean()
    assert recovery(z, h, resamples=0).procrustes == pytest.approx(expected, rel=1e-8, abs=1e-10)


@given(seed=SEEDS, n=st.integers(40, 600), dim=st.integers(1, 5), out_dim=st.integers(1, 5))
def test_mcc_is_the_best_of_all_matchings(seed, n, dim, out_dim):
    z, h = latents_and_embedding(seed, n, dim, out_dim)
    correlation = np.abs(np.corrcoef(z.T.numpy(), h.T.numpy())[:dim, dim:])
    short, long = sorted(correlation.shape)
    table = correlation if dim <= out_dim else correlation.T
    expected = max(table[range(short), choice].mean() for choice in itertools.permutations(range(long), short))
    assert recovery(z, h, resamples=0).mcc == pytest.approx(expected, abs=1e-10)


@given(seed=SEEDS, n=st.integers(40, 600), dim=DIMS, out_dim=DIMS)
def test_canonical_correlations_are_those_of_the_orthonormal_bases(seed, n, dim, out_dim):
    z, h = latents_and_embedding(seed, n, dim, out_dim)
    bases = [np.linalg.qr((array - array.mean(dim=0)).numpy())[0] for array in (z, h)]
    expected = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
    np.testing.assert_allclose(recovery(z, h, resamples=0).canonical_correlations, expected, atol=1e-7)


@given(seed=SEEDS, n=st.integers(40, 600), out_dim=DIMS)
def test_effective_rank_is_the_participation_ratio_of_the_spectrum(seed, n, out_dim):
    z, h = latents_and_embedding(seed, n, 2, out_dim)
    spectrum = np.linalg.svd((h - h.mean(dim=0)).numpy(), compute_uv=False) ** 2
    expected = spectrum.sum() ** 2 / (spectrum**2).sum()
    assert recovery(z, h, resamples=0).effective_rank == pytest.approx(expected, rel=1e-10)


@given(seed=SEEDS, dim=DIMS, out_dim=DIMS)
def test_a_rotation_and_a_shift_of_the_embedding_change_nothing(seed, dim, out_dim):
    z, h = latents_and_embedding(seed, 300, dim, out_dim)
    h = h / h.std()
    moved = h @ rotation(seed + 3, out_dim) + normal(seed + 4, out_dim)
    before, after = recovery(z, h, resamples=0), recovery(z, moved, resamples=0)
    for name in ("r2_hz", "r2_hz_pooled", "orth_err", "procrustes", "effective_rank"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-8, abs=1e-8), name
    np.testing.assert_allclose(after.r2_hz_per_dim, before.r2_hz_per_dim, atol=1e-8)
    np.testing.assert_allclose(after.canonical_correlations, before.canonical_correlations, atol=1e-7)


@given(seed=SEEDS, dim=DIMS, scale=st.floats(0.01, 100))
def test_scaling_a_perfect_embedding_changes_orthogonality_and_procrustes_only(seed, dim, scale):
    z = normal(seed, 300, dim)
    found = recovery(z, scale * z @ rotation(seed + 1, dim), resamples=0)
    assert found.r2_hz == pytest.approx(1, abs=1e-9)
    assert found.orth_err == pytest.approx(abs(scale**2 - 1), rel=1e-8, abs=1e-8)
    trace = z.var(dim=0, correction=0).sum().item()
    assert found.procrustes == pytest.approx((scale - 1) ** 2 * trace, rel=1e-8, abs=1e-8)


@given(seed=SEEDS, dim=DIMS, out_dim=DIMS)
def test_scaling_any_embedding_changes_orthogonality_to_the_closed_form(seed, dim, out_dim):
    z, h = latents_and_embedding(seed, 300, dim, out_dim)
    slope = least_squares(z.numpy(), h.numpy())[1:]
    gram = slope @ slope.T
    squared, trace = (gram**2).sum(), np.trace(gram)
    for s in (0.5, 2.0):
        expected = math.sqrt((s**4 * squared - 2 * s**2 * trace + dim) / dim)
        assert recovery(z, s * h, resamples=0).orth_err == pytest.approx(expected, rel=1e-8)


@given(seed=SEEDS, dim=DIMS, out_dim=DIMS)
def test_an_isometry_into_more_dimensions_is_perfect_and_into_fewer_it_loses_the_rest(seed, dim, out_dim):
    z = exactly_white(normal(seed, 400, dim))
    big = rotation(seed + 1, max(dim, out_dim))
    found = recovery(z, z @ big[:dim, :out_dim], resamples=0)
    lost = max(dim - out_dim, 0)
    assert found.r2_zh == pytest.approx(1, abs=1e-9)
    if out_dim >= dim:
        assert found.r2_hz == pytest.approx(1, abs=1e-9)
    assert found.orth_err == pytest.approx(math.sqrt(lost / dim), abs=1e-7)
    assert found.procrustes == pytest.approx(lost, abs=1e-7)


@given(seed=SEEDS, dim=st.integers(2, 6))
def test_any_invertible_linear_map_keeps_r2_and_canonical_correlations_at_one(seed, dim):
    z = normal(seed, 300, dim)
    spread = torch.logspace(-2, 2, dim, dtype=torch.float64)
    found = recovery(z, z @ rotation(seed + 1, dim) * spread @ rotation(seed + 2, dim), resamples=0)
    assert found.r2_hz == pytest.approx(1, abs=1e-6)
    assert found.r2_zh == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(found.canonical_correlations, 1, atol=1e-6)
    assert found.orth_err > 1


def test_a_column_in_small_units_still_counts():
    z = normal(0, 1000, 2)
    found = recovery(z, z * torch.tensor([1, 1e-7]), resamples=0)
    np.testing.assert_allclose(found.r2_hz_per_dim, [1, 1], atol=1e-6)


def test_a_harmonic_of_the_latent_recovers_nothing_linearly():
    z = normal(0, 50_000, 2)
    found = recovery(z, (z.square() - 1) / math.sqrt(2), resamples=0)
    assert found.r2_hz == pytest.approx(0, abs=0.005)
    assert found.orth_err == pytest.approx(1, abs=0.005)
    assert found.procrustes == pytest.approx(4, abs=0.1)  # tr Cov(z) + tr Cov(h), less what the sample correlates


def test_a_permutation_with_signs_has_mcc_one_and_a_mixture_has_less():
    z = normal(0, 5000, 3)
    assert recovery(z, z[:, [2, 0, 1]] * torch.tensor([1, -1, 1]), resamples=0).mcc == pytest.approx(1, abs=1e-12)
    assert recovery(z, z @ rotation(4, 3), resamples=0).mcc < 0.95


def test_one_latent_may_be_given_as_a_vector():
    z = normal(0, 200, 1)
    found = recovery(z.flatten(), -z.flatten(), resamples=0)
    assert repr(found) == repr(recovery(z, -z, resamples=0))
    assert (found.r2_hz, found.mcc, found.effective_rank) == pytest.approx((1, 1, 1))


def test_numpy_arrays_and_tensors_are_the_same_to_it():
    z, h = latents_and_embedding(0, 300, 2, 3)
    assert repr(recovery(z.numpy(), h.numpy())) == repr(recovery(z, h))


def scalars_and_lists(found):
    names = "r2_hz r2_zh r2_hz_per_dim r2_zh_per_dim r2_hz_pooled orth_err procrustes mcc canonical_correlations"
    for name in [*names.split(), "effective_rank", "r2_hz_angles"]:
        value = getattr(found, name)
        yield name, value if isinstance(value, list) else [value]


@given(
    seed=SEEDS,
    n=st.integers(1, 14),
    dim=st.integers(1, 3),
    out_dim=st.integers(1, 3),
    constant_z=st.booleans(),
    constant_h=st.booleans(),
    angles=st.booleans(),
)
def test_every_number_is_finite_or_has_a_reason(seed, n, dim, out_dim, constant_z, constant_h, angles):
    z, h = normal(seed, n, dim), normal(seed + 1, n, out_dim)
    if constant_z:
        z[:, -1] = 0.1
    if constant_h:
        h[:, 0] = -0.3
    found = recovery(z, h, periodic=[0] if angles else [], resamples=20)
    for name, values in scalars_and_lists(found):
        assert all(math.isnan(v) for v in values) if name in found.reasons else np.isfinite(values).all(), name
    assert not set(found.ci) & set(found.reasons)


@pytest.mark.parametrize("level", [1.0, 0.1])
@pytest.mark.parametrize("swap", [False, True])
def test_a_column_that_is_constant_where_it_is_scored_has_no_r2(swap, level):
    moving, step = normal(0, 200, 1), torch.arange(200.0).ge(100).double()[:, None] * level
    z, h = (moving, step) if swap else (step, moving)
    found = recovery(z, h, resamples=0)
    for name in ("r2_zh", "r2_zh_per_dim") if swap else ("r2_hz", "r2_hz_per_dim", "r2_hz_pooled"):
        assert np.isnan(getattr(found, name)).all(), name
        assert "constant" in found.reasons[name]


def test_an_angle_that_does_not_vary_has_no_r2():
    found = recovery(torch.full((200, 1), 0.1), normal(0, 200, 2), periodic=[0], resamples=0)
    assert math.isnan(found.r2_hz_angles)
    assert "constant" in found.reasons["r2_hz_angles"]


def test_a_constant_latent_takes_only_the_measures_that_need_it():
    z, h = latents_and_embedding(0, 300, 2, 2)
    z[:, 1] = 5
    found = recovery(z, h, periodic=[0])
    assert "1 columns of z are constant" in found.reasons["r2_hz"]
    assert set(found.reasons) == {"r2_hz", "r2_hz_per_dim", "r2_hz_pooled", "orth_err", "canonical_correlations"}
    assert math.isfinite(found.r2_zh)


def test_a_collapsed_embedding_scores_nothing_and_says_why():
    found = recovery(normal(0, 300, 2), torch.full((300, 2), 0.7))
    assert found.dead_columns == [0, 1]
    assert found.r2_hz == pytest.approx(0, abs=0.02)
    assert found.orth_err == pytest.approx(1)
    for name in ("r2_zh", "effective_rank", "mcc", "canonical_correlations"):
        assert "constant" in found.reasons[name], name


def test_without_periodic_latents_their_r2_is_missing_for_that_reason():
    found = recovery(normal(0, 50, 2), normal(1, 50, 2), resamples=0)
    assert math.isnan(found.r2_hz_angles)
    assert found.reasons == {"r2_hz_angles": "no latent was declared periodic"}


def test_periodic_latents_must_exist():
    with pytest.raises(ArgumentError, match=r"periodic=\[2\]: expected columns of z, 0 to 1"):
        recovery(normal(0, 50, 2), normal(1, 50, 2), periodic=[2])


def test_arrays_of_different_length_are_refused():
    with pytest.raises(ShapeError, match=r"z \(50, 2\), h \(49, 2\)"):
        recovery(normal(0, 50, 2), normal(1, 49, 2))


def test_the_printed_result_says_how_it_was_fitted_and_why_numbers_are_missing():
    z, h = latents_and_embedding(0, 301, 2, 2)
    z[:, 1], h[7] = 5, torch.nan
    found = recovery(z, h, drop=True, periodic=[0])
    text = str(found)
    assert f"300 rows (fitted on {found.n_fit}, scored on {found.n_score})" in text
    assert "(1 columns of z are constant)" in text
    assert "1 rows were not finite and are left out" in text
    assert "latents [0] are periodic" in text


def test_no_resamples_give_no_intervals():
    z, h = latents_and_embedding(0, 300, 2, 2)
    assert recovery(z, h, resamples=0).ci == {}
    assert {"r2_hz", "r2_zh", "orth_err", "procrustes", "mcc", "effective_rank"} <= set(recovery(z, h).ci)


def test_the_same_generator_gives_the_same_intervals():
    z, h = latents_and_embedding(0, 300, 2, 2)
    by_seed = [recovery(z, h, generator=torch.Generator().manual_seed(seed)).ci for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] == recovery(z, h).ci
    assert by_seed[0] != by_seed[2]


def test_intervals_cover_the_population():
    # h = z A + noise: everything below is a function of Cov(z) = I, A and Cov(h) = C.
    slope, noise, n, sets = torch.tensor([[1.0, 0.5], [0.0, 0.8]]).double(), 0.3, 1000, 100
    cov = slope.T @ slope + noise**2 * torch.eye(2)
    truth = {
        "r2_hz": (slope @ torch.linalg.inv(cov) @ slope.T).diagonal().mean().item(),
        "orth_err": torch.linalg.matrix_norm(slope @ slope.T - torch.eye(2)).item() / math.sqrt(2),
        "procrustes": 2 + cov.trace().item() - 2 * torch.linalg.svdvals(slope).sum().item(),
    }
    covered = dict.fromkeys(truth, 0)
    for seed in range(sets):
        z = normal(2 * seed, n, 2)
        found = recovery(z, z @ slope + noise * normal(2 * seed + 1, n, 2))
        for name, value in truth.items():
            covered[name] += found.ci[name][0] <= value <= found.ci[name][1]
    assert all(85 <= hits <= 100 for hits in covered.values()), covered
