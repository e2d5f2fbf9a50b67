"""The empirical characteristic function: one sine and cosine give what every knot's own would."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.objectives.empirical_cf import empirical_cf

BLOCK = "orthoworld.objectives.empirical_cf.BLOCK_ELEMENTS"


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def textbook(x, knots):
    angles = x[:, :, None] * torch.arange(knots, dtype=x.dtype)[:, None]
    return angles.cos().mean(dim=1), angles.sin().mean(dim=1)


def value_and_gradient(function, x, knots, weights):
    x = x.clone().requires_grad_()
    cos, sin = function(x, knots)
    (weights * torch.stack([cos, sin])).sum().backward()
    return torch.stack([cos, sin]).detach(), x.grad


@given(
    views=st.integers(1, 3),
    rows=st.integers(1, 7),
    slices=st.integers(1, 5),
    knots=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 10.0]),
)
def test_recurrence_equals_the_textbook_in_value_and_gradient(views, rows, slices, knots, scale):
    x = scale * normal(views, rows, slices)
    weights = normal(2, views, knots, slices, seed=2)
    ours, expected = (value_and_gradient(f, x, knots, weights) for f in (empirical_cf, textbook))
    torch.testing.assert_close(ours[0], expected[0], atol=1e-12, rtol=0)
    # The gradient of knot k is k times as large, and so is its rounding.
    torch.testing.assert_close(ours[1], expected[1], atol=1e-11, rtol=1e-10)


def test_gradient_is_that_of_finite_differences():
    x = normal(2, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: empirical_cf(x, 6), x)


@pytest.mark.parametrize("part", [0, 1])
def test_each_part_has_its_own_gradient(part):
    x = normal(1, 4, 3).requires_grad_()
    (ours,) = torch.autograd.grad(empirical_cf(x, 5)[part].sum(), x)
    (expected,) = torch.autograd.grad(textbook(x, 5)[part].sum(), x)
    torch.testing.assert_close(ours, expected)


def test_first_knot_is_one_and_has_no_gradient():
    x = normal(2, 5, 3).requires_grad_()
    cos, sin = empirical_cf(x, 1)
    assert (cos == 1).all()
    assert (sin == 0).all()
    (cos + sin).sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("block", [1, 7, 40, 10**9])  # of ten rows: one slice at a time, four, all
def test_blocks_do_not_change_the_result(monkeypatch, block):
    x, weights = normal(2, 5, 11), normal(2, 2, 17, 11, seed=2)
    expected = value_and_gradient(empirical_cf, x, 17, weights)
    monkeypatch.setattr(BLOCK, block)
    ours = value_and_gradient(empirical_cf, x, 17, weights)
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-14, rtol=0)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 3.0])
def test_float32_keeps_its_digits_at_small_angles(scale):
    # A collapsing embedding ends at small angles, where the plain recurrence loses the gradient's digits.
    x = scale * normal(1, 64, 8)
    weights = torch.zeros(2, 1, 17, 8, dtype=torch.float64)
    weights[0] = 1
    exact = value_and_gradient(textbook, x.float().double(), 17, weights)[1]
    ours = value_and_gradient(empirical_cf, x.float(), 17, weights.float())[1]
    # Seventeen additions at float32's 6e-8, relative to the largest entry.
    assert (ours - exact).abs().max() < 2e-6 * exact.abs().max()


def test_views_and_strided_input_are_kept_apart():
    x = normal(4, 3, 2).transpose(0, 1)
    cos, sin = empirical_cf(x, 4)
    assert cos.shape == sin.shape == (3, 4, 2)
    for view in range(3):
        own_cos, own_sin = textbook(x[view : view + 1].contiguous(), 4)
        torch.testing.assert_close(cos[view], own_cos[0])
        torch.testing.assert_close(sin[view], own_sin[0])


def test_second_derivatives_are_refused_rather_than_wrong():
    x = normal(1, 3, 2).requires_grad_()
    (grad,) = torch.autograd.grad(empirical_cf(x, 4)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_dtype_and_device_follow_the_input():
    cos, sin = empirical_cf(torch.zeros(2, 4, 3, device="meta"), 5)
    assert cos.device == sin.device == torch.device("meta")
    assert cos.dtype == sin.dtype == torch.float32
