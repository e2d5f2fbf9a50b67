"""Every kernel against the definition in float64: values, gradients, large and small angles, many shapes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.objectives.kernels import cpu, eager

KERNELS = {"cpu": cpu, "eager": eager}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_means(x, knots):
    angles = x.double()[:, :, None] * torch.arange(knots)
    return torch.stack([angles.cos().mean(dim=1), angles.sin().mean(dim=1)])


def exact_polynomial(x, sine, cosine):
    angles = x.double()[:, :, None] * torch.arange(sine.shape[1])
    return (cosine.double()[:, None] * angles.cos() - sine.double()[:, None] * angles.sin()).sum(dim=2)


@kernels
@given(
    rows=st.integers(1, 600),
    slices=st.integers(1, 5),
    knots=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 9.4]),
    seed=st.integers(0, 2**16),
)
def test_means_and_polynomial_are_those_of_the_definition(kernel, rows, slices, knots, scale, seed):
    x = scale * normal(slices, rows, seed=seed)
    torch.testing.assert_close(kernel.means(x, knots).double(), exact_means(x, knots), atol=knots * 2e-7, rtol=0)
    sine, cosine = normal(2, slices, knots, seed=seed + 1)
    sine[:, 0] = cosine[:, 0] = 0
    size = (sine.abs() + cosine.abs()).sum(dim=1, keepdim=True)
    error = (kernel.polynomial(x, sine, cosine) - exact_polynomial(x, sine, cosine)).abs()
    # Rounding grows at most linearly with the order; near pi Reinsch's form is allowed more.
    assert (error <= (1 if kernel is cpu else 20) * knots * 3e-7 * size).all()


@kernels
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 3.0])
def test_the_gradient_keeps_its_digits_at_small_angles(kernel, scale):
    # A collapsing embedding ends at small angles, where the plain recurrence loses the gradient's digits.
    x, sine = scale * normal(8, 64), torch.arange(17).float().expand(8, 17)
    exact = exact_polynomial(x, sine, 0 * sine)
    assert (kernel.polynomial(x, sine, 0 * sine) - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("centre", [0.0, math.pi / 4, math.pi / 2, math.pi, 1.5 * math.pi, 9.375, 1e3, 1e5, -1e5])
def test_compiled_sine_and_cosine_are_exact_to_float32_everywhere(centre):
    x = (centre + torch.linspace(-1e-3, 1e-3, 4001, dtype=torch.float64)).float()[:, None]
    found, exact = cpu.means(x, 2)[:, :, 1].double(), torch.stack([x.double().cos(), x.double().sin()])[:, :, 0]
    assert (found - exact).abs().max() < 1.2e-7


def test_large_projections_lose_nothing_at_the_last_knot():
    # |x| = 50 in latent units is an angle of 9.375 a knot, 150 radians at the last.
    x = torch.linspace(-9.375, 9.375, 100_001)[:, None]
    error = (cpu.means(x, 17) - exact_means(x, 17)).abs()
    assert error.max() < 2e-6  # sixteen multiplications at 6e-8, and one more for the sine and cosine
    assert error.square().mean().sqrt() < 2e-7


def test_many_rows_sum_to_float64_accuracy():
    x = normal(1, 10**6)
    torch.testing.assert_close(cpu.means(x, 17).double(), exact_means(x, 17), atol=6e-8, rtol=0)


def test_number_of_threads_does_not_change_a_bit():
    x, (sine, cosine) = normal(96, 2**13), normal(2, 96, 17)
    torch.set_num_threads(1)
    alone = cpu.means(x, 17), cpu.polynomial(x, sine, cosine)
    torch.set_num_threads(3)
    together = cpu.means(x, 17), cpu.polynomial(x, sine, cosine)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_out_as_nan_and_only_there(kernel, bad):
    x = normal(3, 300)
    x[1, 7] = bad
    means = kernel.means(x, 5)
    assert means[:, 1, 1:].isnan().all()
    assert torch.isfinite(means[:, [0, 2]]).all()
    gradient = kernel.polynomial(x, *normal(2, 3, 5))
    assert gradient[1, 7].isnan()
    assert gradient.isnan().sum() == 1


@kernels
def test_transposed_projections_are_read_right(kernel):
    x = normal(50, 4).T
    assert torch.equal(kernel.means(x, 5), kernel.means(x.contiguous(), 5))
