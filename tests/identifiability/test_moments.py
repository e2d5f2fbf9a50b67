import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.moments import (
    GroupedMoments,
    as_rows,
    estimates_and_intervals,
    finite_rows,
    group_starts,
    halves,
    inverse,
    resampling_weights,
    whitening_map,
)

SEEDS = st.integers(0, 2**31)
DIMS = st.integers(1, 9)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everything(grouped):
    return grouped.moments(torch.ones(len(grouped), dtype=torch.float64))


@given(seed=SEEDS, n=st.integers(1, 700), dims=st.tuples(DIMS, DIMS))
def test_moments_are_the_mean_and_covariance_of_the_rows(seed, n, dims):
    arrays = [normal(seed + i, n, dim) + i for i, dim in enumerate(dims)]
    moments = everything(GroupedMoments(*arrays))
    joined = torch.cat(arrays, dim=1).numpy()
    expected = np.cov(joined.T, ddof=0).reshape(sum(dims), sum(dims)) if n > 1 else np.zeros((sum(dims),) * 2)
    np.testing.assert_allclose(moments.cov, expected, atol=1e-12)
    for block, array in enumerate(arrays):
        np.testing.assert_allclose(moments.means(block), array.mean(dim=0), atol=1e-12)
    np.testing.assert_allclose(moments.covs(0, 1), expected[: dims[0], dims[0] :], atol=1e-12)


@given(seed=SEEDS, n=st.integers(2, 600))
def test_a_weight_repeats_the_rows_of_its_group(seed, n):
    rows = normal(seed, n, 3)
    grouped = GroupedMoments(rows)
    weights = torch.randint(0, 3, (len(grouped),), generator=torch.Generator().manual_seed(seed))
    weights[0] = 1
    parts = rows.tensor_split(group_starts(n, len(grouped))[1:])
    repeated = torch.cat([part.repeat(times, 1) for part, times in zip(parts, weights.tolist(), strict=True)])
    found, expected = grouped.moments(weights.double()), everything(GroupedMoments(repeated))
    assert found.n == len(repeated)
    torch.testing.assert_close(found.cov, expected.cov, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-12)


@given(n=st.integers(2, 2000), groups=st.integers(1, 256))
def test_halves_have_as_many_rows_and_no_group_is_empty(n, groups):
    groups = min(groups, n)
    sizes = np.diff([*group_starts(n, groups), n])
    assert sizes.min() >= 1
    if groups > 1:
        assert abs(int(halves(groups)[0].numpy() @ sizes) - n / 2) <= 0.5


def test_a_large_mean_costs_no_digits():
    rows = normal(0, 5000, 2)
    far = everything(GroupedMoments(rows + 2.0**20))
    torch.testing.assert_close(far.cov, everything(GroupedMoments(rows)).cov, rtol=0, atol=1e-9)


@given(groups=st.integers(1, 256))
def test_halves_share_no_group_and_miss_none(groups):
    fit, score = halves(groups)
    assert torch.equal(fit + score, torch.ones(groups, dtype=torch.float64))
    assert 0 <= fit.sum() - score.sum() <= 1
    assert torch.equal(fit, fit.sort(descending=True).values)


@given(seed=SEEDS, groups=st.integers(1, 256), resamples=st.integers(0, 20))
def test_each_half_is_resampled_to_its_own_size(seed, groups, resamples):
    weights = resampling_weights(groups, resamples, torch.Generator().manual_seed(seed))
    fit, score = halves(groups)
    assert weights.shape == (1 + resamples, groups)
    assert torch.equal(weights[0], torch.ones(groups, dtype=torch.float64))
    assert torch.equal(weights @ fit, fit.sum().expand(1 + resamples))
    assert torch.equal(weights @ score, score.sum().expand(1 + resamples))


@given(seed=SEEDS, dim=DIMS, rank=DIMS, units=st.sampled_from([1.0, 1e-7, 1e5]))
def test_covariance_is_inverted_and_whitened_on_its_range_in_any_units(seed, dim, rank, units):
    rank = min(rank, dim)
    factor = normal(seed, dim, rank)
    factor[0] *= units
    cov = factor @ factor.T
    scale = cov.diagonal().clamp(min=1e-300).sqrt()
    normalised = cov / torch.outer(scale, scale)
    restored = cov @ inverse(cov) @ cov / torch.outer(scale, scale)
    torch.testing.assert_close(restored, normalised, rtol=0, atol=1e-5)
    white = whitening_map(cov) @ cov @ whitening_map(cov).T
    torch.testing.assert_close(white @ white, white, rtol=0, atol=1e-5)
    assert float(white.trace()) == pytest.approx(rank, abs=1e-4)


def test_what_does_not_vary_is_mapped_to_zero():
    nothing = torch.zeros(3, 3, dtype=torch.float64)
    assert torch.equal(inverse(nothing), nothing)
    assert torch.equal(whitening_map(nothing), nothing)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_rows_are_float64_whatever_came_in(dtype):
    rows = as_rows("h", torch.arange(6).reshape(3, 2).to(dtype))
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_vector_is_one_column():
    assert as_rows("h", np.arange(3.0)).tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_numbers_that_are_not_real_are_refused(dtype):
    with pytest.raises(TypeError, match=r"h has dtype torch\.(complex64|bool): expected real numbers"):
        as_rows("h", torch.zeros(3, 2, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3), (3, 0), ()])
def test_other_shapes_are_refused_and_repeated(shape):
    with pytest.raises(ShapeError) as caught:
        as_rows("h_next", torch.zeros(shape))
    assert f"h_next has shape {shape}: expected (n, dim)" in str(caught.value)


def test_a_row_is_dropped_everywhere():
    z, h = torch.arange(5.0), torch.arange(10.0).reshape(5, 2)
    z[1], h[3, 0], h[3, 1] = torch.nan, torch.inf, torch.nan
    (kept_z, kept_h), dropped = finite_rows({"z": z, "h": h}, drop=True)
    assert dropped == 2
    assert kept_z.flatten().tolist() == [0, 2, 4]
    assert kept_h.tolist() == [[0, 1], [4, 5], [8, 9]]


def test_rows_that_are_not_finite_are_refused_with_name_and_count():
    h = torch.zeros(5, 2)
    h[[1, 4]] = torch.nan
    with pytest.raises(ArgumentError, match="h has 2 non-finite rows of 5"):
        finite_rows({"z": torch.zeros(5, 2), "h": h})


def test_nothing_left_after_dropping_is_an_error():
    with pytest.raises(ArgumentError, match="none of 2 rows is finite in all of z, h"):
        finite_rows({"z": torch.tensor([torch.nan, 0]), "h": torch.tensor([0, torch.nan])}, drop=True)


def test_arrays_of_different_length_are_refused_with_their_shapes():
    with pytest.raises(ShapeError, match=r"z \(3, 1\), h \(4, 1\): expected the same number of rows"):
        finite_rows({"z": torch.zeros(3), "h": torch.zeros(4)})


def mean_and_interval(rows, *, resamples=200, seed=0):
    grouped = GroupedMoments(rows)
    return estimates_and_intervals(
        grouped,
        lambda weights: {"mean": grouped.moments(weights).mean[:, 0], "per_dim": grouped.moments(weights).mean},
        resamples=resamples,
        generator=torch.Generator().manual_seed(seed),
    )


def test_the_interval_of_a_mean_is_two_standard_errors():
    rows = 3 + 2 * normal(0, 4000, 2)
    values, intervals = mean_and_interval(rows, resamples=2000)
    low, high = intervals["mean"]
    # The quantiles of 2000 draws wander by 4 %, the standard error from 256 groups by 4 %.
    assert high - low == pytest.approx(2 * 1.96 * 2 / 4000**0.5, rel=0.15)
    assert (low + high) / 2 == pytest.approx(values["mean"].item(), abs=0.01)


def test_vectors_have_no_interval():
    assert list(mean_and_interval(normal(0, 100, 2))[1]) == ["mean"]


def test_no_resamples_give_no_interval():
    assert mean_and_interval(normal(0, 100, 2), resamples=0)[1] == {}


def test_the_same_generator_gives_the_same_interval():
    rows = normal(0, 300, 2)
    assert mean_and_interval(rows)[1] == mean_and_interval(rows)[1]
    assert mean_and_interval(rows)[1] != mean_and_interval(rows, seed=1)[1]


def test_a_statistic_that_fails_in_some_draw_has_no_interval():
    grouped = GroupedMoments(normal(0, 100, 1))
    _, intervals = estimates_and_intervals(
        grouped,
        lambda weights: {"odd": torch.where(weights[:, 0] == 1, 0.0, torch.nan)},
        resamples=50,
        generator=torch.Generator().manual_seed(0),
    )
    assert intervals == {}
