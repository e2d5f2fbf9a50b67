"""Every kernel against the definition in float64: values, gradients, large and small angles, many shapes."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.objectives.kernels import cpu, eager

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
"""Triton's interpreter takes tensors of the CPU, and fifty microseconds an operation; see `conftest`."""

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is for Linux alone")


class GPU:
    """The kernel on a GPU, or interpreted, for tensors of the CPU."""

    def means(self, x, knots):
        return self.kernel.means(self.moved(x), knots).cpu()

    def polynomial(self, *tensors):
        return self.kernel.polynomial(*map(self.moved, tensors)).cpu()

    @property
    def kernel(self):
        from orthoworld.objectives.kernels import cuda

        return cuda

    @staticmethod
    def moved(tensor):
        return tensor if INTERPRETED else tensor.cuda()


gpu = GPU()
KERNELS = {"cpu": cpu, "eager": eager, "gpu": pytest.param(gpu, marks=needs_triton)}
COMPILED = {name: kernel for name, kernel in KERNELS.items() if kernel is not eager}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
compiled_kernels = pytest.mark.parametrize("kernel", COMPILED.values(), ids=COMPILED)


def fewer(kernel, number):
    """Return `number`, or a hundredth where Triton is interpreted."""
    return number // 100 if kernel is gpu and INTERPRETED else number


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
    assert (error <= (20 if kernel is eager else 1) * knots * 3e-7 * size).all()


@kernels
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 3.0])
def test_the_gradient_keeps_its_digits_at_small_angles(kernel, scale):
    # A collapsing embedding ends at small angles, where the plain recurrence loses the gradient's digits.
    x, sine = scale * normal(8, 64), torch.arange(17).float().expand(8, 17)
    exact = exact_polynomial(x, sine, 0 * sine)
    assert (kernel.polynomial(x, sine, 0 * sine) - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("centre", [0.0, math.pi / 4, math.pi / 2, math.pi, 1.5 * math.pi, 9.375, 1e3, 1e5, -1e5])
@compiled_kernels
def test_compiled_sine_and_cosine_are_exact_to_float32_everywhere(kernel, centre):
    x = (centre + torch.linspace(-1e-3, 1e-3, 4001, dtype=torch.float64)).float()[:, None]
    found, exact = kernel.means(x, 2)[:, :, 1].double(), torch.stack([x.double().cos(), x.double().sin()])[:, :, 0]
    assert (found - exact).abs().max() < 1.2e-7


@compiled_kernels
def test_large_projections_lose_nothing_at_the_last_knot(kernel):
    # |x| = 50 in latent units is an angle of 9.375 a knot, 150 radians at the last.
    x = torch.linspace(-9.375, 9.375, fewer(kernel, 100_001))[:, None]
    error = (kernel.means(x, 17) - exact_means(x, 17)).abs()
    assert error.max() < 2e-6  # sixteen multiplications at 6e-8, and one more for the sine and cosine
    assert error.square().mean().sqrt() < 2e-7


@compiled_kernels
def test_many_rows_sum_to_float64_accuracy(kernel):
    x = normal(1, fewer(kernel, 10**6))
    torch.testing.assert_close(kernel.means(x, 17).double(), exact_means(x, 17), atol=6e-8, rtol=0)


def test_number_of_threads_does_not_change_a_bit():
    x, (sine, cosine) = normal(96, 2**13), normal(2, 96, 17)
    torch.set_num_threads(1)
    alone = cpu.means(x, 17), cpu.polynomial(x, sine, cosine)
    torch.set_num_threads(3)
    together = cpu.means(x, 17), cpu.polynomial(x, sine, cosine)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered in (sin|cos):RuntimeWarning")  # numpy's, interpreted
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


@kernels
def test_the_first_knot_is_exact(kernel):
    means = kernel.means(normal(5, 1000), 3)
    assert (means[0, :, 0] == 1).all()
    assert (means[1, :, 0] == 0).all()


@needs_triton
def test_rows_shared_out_among_programs_add_up_the_same_at_every_call():
    x = normal(3, 5000)  # ten programs a slice, the last one short
    means = gpu.means(x, 9)
    torch.testing.assert_close(means.double(), exact_means(x, 9), atol=1e-6, rtol=0)
    assert torch.equal(means, gpu.means(x, 9))


@needs_triton
@pytest.mark.parametrize("slices", [1, 7, 256, 10**6])
@pytest.mark.parametrize("rows", [1, 3, 64, 65, 4096, 10**7])
def test_tiles_hold_every_row_and_programs_fill_a_gpu_where_there_is_work(rows, slices):
    from orthoworld.objectives.kernels import cuda

    width, lanes = cuda._tile(rows, cuda.SUMS_TILE)
    assert width * lanes == cuda.SUMS_TILE
    assert lanes < 2 * rows
    count, groups = -(-rows // lanes), -(-slices // width)
    tiles = cuda._tiles(count, groups)
    assert 1 <= tiles <= min(count, cuda.SUMS_TILES[1])
    assert tiles <= cuda.SUMS_TILES[0] or count * groups > tiles * cuda.SUMS_PROGRAMS / 2


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from orthoworld.objectives.kernels import programs

for program in (programs.sums, programs.polynomial):
    kinds = dict.fromkeys(program.arg_names, "*fp32") | dict.fromkeys(("slices", "rows"), "i32")
    if program is programs.sums:
        kinds |= dict.fromkeys(("splits", "tiles"), "i32")
    sizes = {"knots": 17, "width": 1, "lanes": 64}
    source = ASTSource(program, kinds | dict.fromkeys(sizes, "constexpr"), sizes)
    for capability in (80, 90):
        options = {"num_warps": 1, "enable_fp_fusion": True}
        code = compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        assert "fma.rn.f32" in code
        assert ".approx" not in code
"""


@needs_triton
def test_programs_compile_for_gpus_and_use_no_approximate_sine(tmp_path):
    # The interpreter takes what the compiler refuses; to compile takes no GPU.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
