"""Whitening: covariances near the identity, or exactly there."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.whitening import Whitener, covariance, whiten, whitening, whitening_null_level


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def identity(dim):
    return torch.eye(dim, dtype=torch.float64)


def explicitly_whitened(h):
    """Whiten all rows of `h` by the eigenvectors of `torch.cov`."""
    rows = h.reshape(-1, h.shape[-1])
    values, vectors = torch.linalg.eigh(torch.atleast_2d(torch.cov(rows.T)))
    return (h - rows.mean(dim=0)) @ vectors / values.sqrt()


def skewed(dim, seed=3):
    """An invertible map with singular values from 1/2 to 2."""
    left, right = (torch.linalg.qr(normal(dim, dim, seed=seed + i)).Q for i in (0, 1))
    return left * torch.logspace(-1, 1, dim, base=2, dtype=torch.float64) @ right


@given(views=st.integers(1, 3), batch=st.integers(2, 8), dim=st.integers(1, 9))
def test_whitening_is_the_distance_of_the_pooled_covariance_from_the_identity(views, batch, dim):
    h = 3 + 2 * normal(views, batch, dim)
    error = torch.atleast_2d(torch.cov(h.reshape(-1, dim).T)) - identity(dim)
    torch.testing.assert_close(whitening(h, form="frobenius"), error.norm() ** 2)
    torch.testing.assert_close(whitening(h, form="mean"), error.norm() ** 2 / dim**2)
    torch.testing.assert_close(whitening(h), whitening(h, form="mean"))


def test_covariance_is_unbiased():
    rows = normal(10, 3)
    torch.testing.assert_close(covariance(rows), torch.cov(rows.T))


def test_mean_of_the_embedding_is_free():
    h = normal(2, 10, 3)
    torch.testing.assert_close(whitening(h + 100), whitening(h))


def test_rotation_keeps_whitening():
    h = normal(2, 10, 3)
    torch.testing.assert_close(whitening(h @ torch.linalg.qr(normal(3, 3)).Q), whitening(h))


@pytest.mark.parametrize("form", ["mean", "frobenius"])
def test_gradient_of_whitening_is_that_of_finite_differences(form):
    assert torch.autograd.gradcheck(lambda h: whitening(h, form=form), normal(2, 4, 3).requires_grad_())


def test_gradient_of_whiten_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(whiten, (normal(2, 4, 3) @ skewed(3)).requires_grad_())


def test_published_whitening_floor_is_00355():
    assert whitening_null_level(512, 1024, views=2, r=0.9025) == pytest.approx(0.00355, abs=5e-6)


@pytest.mark.parametrize(("views", "r"), [(1, 0.0), (2, 0.9), (3, 0.5)])
@pytest.mark.parametrize("form", ["mean", "frobenius"])
def test_latents_lie_at_the_null_level(views, r, form):
    batch, dim, draws = 64, 4, 1000
    shared, own, running = math.sqrt(r), math.sqrt(1 - r), gen()
    values = []
    for _ in range(draws):
        parent = torch.randn(batch, dim, dtype=torch.float64, generator=running)
        noise = torch.randn(views, batch, dim, dtype=torch.float64, generator=running)
        values.append(whitening(shared * parent + own * noise, form=form))
    error = torch.stack(values).std().item() / math.sqrt(draws)
    level = whitening_null_level(views * batch, dim, views=views, r=r, form=form)
    # The level is exact for one view, and of leading order in 1/n for correlated ones.
    leading_order = 0 if views == 1 else 1 / batch
    assert torch.stack(values).mean().item() == pytest.approx(level, abs=4 * error + leading_order * level)
    assert 4 * error < 0.1 * level


@given(views=st.integers(1, 3), dim=st.integers(1, 9))
def test_whitened_embedding_has_mean_zero_and_identity_covariance(views, dim):
    h = 5 + normal(views, 40, dim) @ skewed(dim)
    white = whiten(h)
    assert white.shape == h.shape
    rows = white.reshape(-1, dim)
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(dim).double(), atol=1e-12, rtol=0)
    # The jitter is 1e-6 of the mean variance, which is below 16 times the smallest one here.
    torch.testing.assert_close(covariance(rows), identity(dim), atol=2e-5, rtol=0)


@given(dim=st.integers(1, 9), shift=st.floats(-10, 10), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_whitened_alignment_does_not_change_under_affine_maps(dim, shift, scale):
    h = normal(2, 40, dim)
    torch.testing.assert_close(
        alignment(whiten(shift + scale * h @ skewed(dim))), alignment(whiten(h)), rtol=1e-4, atol=0
    )


@given(views=st.integers(2, 3), dim=st.integers(1, 9))
def test_whitened_alignment_is_that_of_explicit_whitening(views, dim):
    h = normal(views, 40, dim) @ skewed(dim)
    torch.testing.assert_close(alignment(whiten(h)), alignment(explicitly_whitened(h)), rtol=2e-5, atol=0)


@given(dim=st.integers(1, 9))
def test_whitened_alignment_is_the_trace_of_the_covariance_ratio(dim):
    h = normal(2, 40, dim) @ skewed(dim)
    between = h[0] - h[1]
    ratio = torch.linalg.solve(covariance(h.reshape(-1, dim)), between.T @ between / len(between))
    torch.testing.assert_close(alignment(whiten(h)), ratio.trace(), rtol=2e-5, atol=0)


def test_collapsed_embedding_whitens_to_nan():
    assert torch.isnan(whiten(torch.ones(2, 10, 3))).all()


def test_repeated_coordinate_whitens_to_finite_numbers():
    column = torch.randn(100, 1, generator=gen())
    assert torch.isfinite(whiten(column.expand(100, 2))).all()


@pytest.mark.parametrize("function", [whitening, whiten])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(function, dtype):
    h = normal(64, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        value = function(h)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, function(h.float()), atol=0, rtol=0)


@pytest.mark.parametrize("function", [whitening, whiten])
def test_integers_are_refused(function):
    with pytest.raises(TypeError, match=r"dtype torch.int64: expected a floating-point type"):
        function(torch.zeros(8, 3, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 3)])
def test_one_sample_has_no_covariance(shape):
    with pytest.raises(ShapeError, match=r"expected two samples or more, to have a covariance") as raised:
        whitening(torch.zeros(shape))
    assert str(shape) in str(raised.value)


@pytest.mark.parametrize(("shape", "samples"), [((3, 3), 3), ((2, 2, 4), 4)])
def test_whitening_exactly_needs_more_samples_than_dimensions(shape, samples):
    with pytest.raises(ShapeError) as raised:
        whiten(torch.zeros(shape))
    assert str(raised.value) == (
        f"embeddings have shape {shape}, {samples} samples: expected more than {shape[-1]}, to whiten"
    )


def test_null_level_needs_two_samples():
    with pytest.raises(ArgumentError, match="n=1: expected a whole number >= 2"):
        whitening_null_level(1, 3)


def test_new_whitener_is_the_identity():
    h = torch.randn(5, 3, generator=gen())
    assert torch.equal(Whitener(3)(h), h)


@given(dim=st.integers(1, 9))
def test_whitener_whitens_what_it_was_fitted_to_and_maps_the_rest_alike(dim):
    h = 5 + normal(200, dim) @ skewed(dim)
    whitener = Whitener(dim).double().fit(h)
    torch.testing.assert_close(whitener(h).mean(dim=0), torch.zeros(dim).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(covariance(whitener(h)), identity(dim), atol=1e-10, rtol=0)
    torch.testing.assert_close(whitener.matrix, whitener.matrix.T)
    assert torch.linalg.eigvalsh(whitener.matrix).min() > 0
    other = normal(4, 5, dim, seed=9)
    torch.testing.assert_close(whitener(other), (other - h.mean(dim=0)) @ whitener.matrix)


def test_whitener_maps_constant_and_repeated_directions_to_zero():
    h = normal(200, 2).float()
    repeated = torch.cat([h, torch.full((200, 1), 0.1), h[:, :1]], dim=1)
    white = Whitener(4).fit(repeated)(repeated)
    assert white[:, 2].abs().max() < 1e-5
    variances = torch.linalg.eigvalsh(covariance(white.double()))
    torch.testing.assert_close(variances, torch.tensor([0.0, 0, 1, 1]).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("scale", "variance"), [(1e-5, 0.0), (1e-3, 1.0)])
def test_directions_of_a_hundred_millionth_of_the_largest_variance_are_constant(scale, variance):
    h = normal(200, 2) * torch.tensor([1.0, scale], dtype=torch.float64)
    white = Whitener(2).double().fit(h)(h)
    assert white[:, 1].var().item() == pytest.approx(variance, abs=0.01)


def test_whitener_of_a_collapse_up_to_float32_rounding_is_zero():
    h = (1000 + 1e-4 * normal(50, 3)).float()
    assert h.std() > 0
    assert (Whitener(3).fit(h)(h) == 0).all()


def test_whitener_travels_in_a_state_dict_and_takes_no_gradient():
    h = torch.randn(50, 3, generator=gen(), requires_grad=True)
    fitted, restored = Whitener(3).fit(h), Whitener(3)
    restored.load_state_dict(fitted.state_dict())
    assert torch.equal(restored(h), fitted(h))
    assert not any(buffer.requires_grad for buffer in fitted.buffers())


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=5), dim=st.integers(1, 4))
def test_whitener_fitted_in_parts_is_the_whitener_of_the_whole(sizes, dim):
    h = 1000 + normal(sum(sizes), dim) @ skewed(dim)
    whole, parts = Whitener(dim).double().fit(h), Whitener(dim).double().fit(iter(h.split(sizes)))
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.matrix, whole.matrix, rtol=1e-6, atol=1e-6)


def test_whitener_needs_a_sample():
    with pytest.raises(ShapeError, match="0 embeddings of 3 dimensions: expected two samples or more, to whiten"):
        Whitener(3).fit([])


def test_whitener_needs_two_samples():
    with pytest.raises(ShapeError, match="1 embeddings of 3 dimensions: expected two samples or more, to whiten"):
        Whitener(3).fit(torch.zeros(1, 3))


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_whitener_refuses_embeddings_of_another_size_instead_of_broadcasting(dim):
    h = torch.randn(50, dim, generator=gen())
    with pytest.raises(ShapeError, match=rf"\(50, {dim}\)"):
        Whitener(3).fit(h)
