"""VICReg against its definition, entry by entry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.vicreg import VICReg


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def entry_by_entry(h, invariance, variance, covariance):
    """The published loss of two views, with plain loops."""
    _, n, dim = h.shape
    h = h.numpy()
    distance = sum((h[0, i, d] - h[1, i, d]) ** 2 for i in range(n) for d in range(dim)) / (n * dim)
    hinge, off_diagonal = 0.0, 0.0
    for view in h:
        mean = [sum(view[i, d] for i in range(n)) / n for d in range(dim)]
        for a in range(dim):
            for b in range(dim):
                cov = sum((view[i, a] - mean[a]) * (view[i, b] - mean[b]) for i in range(n)) / (n - 1)
                if a == b:
                    hinge = hinge + max(0.0, 1 - math.sqrt(cov + 1e-4)) / (2 * dim)
                else:
                    off_diagonal = off_diagonal + cov**2 / dim
    return invariance * distance + variance * hinge + covariance * off_diagonal


@given(
    n=st.integers(2, 5),
    dim=st.integers(1, 5),
    weights=st.tuples(*[st.floats(0, 30)] * 3),
    scale=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_vicreg_is_its_definition(n, dim, weights, scale):
    h = scale * normal(2, n, dim)
    losses = VICReg(*weights)(h, generator=gen())
    assert losses.total.item() == pytest.approx(entry_by_entry(h, *weights), rel=1e-10, abs=1e-12)


def test_terms_are_reported_in_their_units():
    h = normal(2, 8, 3)
    losses = VICReg()(h, generator=gen())
    torch.testing.assert_close(losses.alignment, alignment(h))
    torch.testing.assert_close(losses.total, 25 * losses.alignment / 3 + losses.regulariser)


def test_defaults_are_the_published_weights():
    objective = VICReg()
    assert (objective.invariance, objective.variance, objective.covariance) == (25, 25, 1)


def test_gradient_is_that_of_finite_differences():
    # Scaled down, so that the hinge is open.
    h = (0.5 * normal(2, 5, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: VICReg()(h, generator=gen()).total, h)


def test_collapse_has_a_finite_gradient():
    h = torch.zeros(2, 5, 3, requires_grad=True)
    losses = VICReg()(h, generator=gen())
    losses.total.backward()
    assert losses.total.item() == pytest.approx(25 * 0.99)  # 1 - sqrt(1e-4)
    assert torch.isfinite(h.grad).all()


def test_variances_above_one_are_not_held_back():
    h = normal(1, 50, 1).expand(2, 50, 1)
    assert VICReg()(h / h.std() * 7, generator=gen()).total.item() == pytest.approx(0, abs=1e-12)


def test_half_precision_is_computed_in_float32():
    h = normal(2, 32, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        losses = VICReg()(h, generator=gen())
    assert losses.total.dtype == torch.float32
    torch.testing.assert_close(losses.total, VICReg()(h.float(), generator=gen()).total, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((4, 3), "expected (views, batch, dim) with two views or more"),
        ((1, 4, 3), "expected (views, batch, dim) with two views or more"),
        ((2, 1, 3), "expected two samples or more in each view"),
    ],
)
def test_two_views_of_two_samples_are_needed(shape, rule):
    with pytest.raises(ShapeError) as raised:
        VICReg()(torch.zeros(shape), generator=gen())
    assert str(raised.value) == f"embeddings have shape {shape}: {rule}"


@pytest.mark.parametrize("name", ["invariance", "variance", "covariance"])
def test_weights_are_not_negative(name):
    with pytest.raises(ArgumentError, match=rf"{name}=-1.0: expected a number in \[0, inf\)"):
        VICReg(**{name: -1.0})
