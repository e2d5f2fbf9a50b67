"""The empirical characteristic function: value and gradient of the definition, whatever kernel and chunks do it."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orthoworld.objectives import empirical_cf as module
from orthoworld.objectives.empirical_cf import empirical_cf, kernel_for
from orthoworld.objectives.kernels import eager

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is for Linux alone")
HOME = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
"""Where Triton's programs run."""


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


def textbook(h, directions, knots):
    angles = (h @ directions).permute(2, 0, 1)[..., None] * torch.arange(knots, dtype=h.dtype)
    return angles.cos().mean(dim=2), angles.sin().mean(dim=2)


def value_and_gradient(function, h, directions, knots, weights):
    h = h.clone().requires_grad_()
    value = torch.stack([*function(h, directions, knots)])
    (weights * value).sum().backward()
    return value.detach(), h.grad


@given(
    views=st.integers(1, 3),
    rows=st.integers(1, 7),
    dim=st.integers(1, 9),
    slices=st.integers(1, 5),
    knots=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 10.0]),
)
def test_value_and_gradient_are_those_of_the_definition(views, rows, dim, slices, knots, scale):
    h, directions = scale * normal(views, rows, dim), normal(dim, slices, seed=3) / dim**0.5
    weights = normal(2, slices, views, knots, seed=2)
    ours, expected = (value_and_gradient(f, h, directions, knots, weights) for f in (empirical_cf, textbook))
    torch.testing.assert_close(ours[0], expected[0], atol=1e-11, rtol=0)
    # The gradient of knot k is k times as large, and so is its rounding.
    torch.testing.assert_close(ours[1], expected[1], atol=1e-9, rtol=1e-9)


def test_gradient_is_that_of_finite_differences():
    h, directions = normal(2, 3, 2).requires_grad_(), normal(2, 4, seed=2)
    assert torch.autograd.gradcheck(lambda h: empirical_cf(h, directions, 6), h)


@pytest.mark.parametrize("part", [0, 1])
def test_each_part_has_its_own_gradient(part):
    h, directions = normal(1, 4, 3).requires_grad_(), normal(3, 2, seed=2)
    (ours,) = torch.autograd.grad(empirical_cf(h, directions, 5)[part].sum(), h)
    (expected,) = torch.autograd.grad(textbook(h, directions, 5)[part].sum(), h)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_knot_is_one_and_has_no_gradient(dtype):
    h = normal(2, 5, 3).to(dtype).requires_grad_()
    cos, sin = empirical_cf(h, torch.eye(3, dtype=dtype), 1)
    assert (cos == 1).all()
    assert (sin == 0).all()
    (cos + sin).sum().backward()
    assert (h.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 29, 64, 10**9])  # of ten projections a slice: one slice at a time, two, six, all
def test_chunks_do_not_change_the_result(monkeypatch, dtype, chunk):
    h, directions = normal(2, 5, 3).to(dtype), normal(3, 11, seed=3).to(dtype)
    weights = normal(2, 11, 2, 17, seed=2).to(dtype)
    expected = value_and_gradient(empirical_cf, h, directions, 17, weights)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    ours = value_and_gradient(empirical_cf, h, directions, 17, weights)
    tolerance = 1e-13 if dtype == torch.float64 else 5e-6  # sums of a hundred terms of size 1
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("rows", "dim", "slices", "parts"),
    [(10, 2, 1, 1), (1000, 2, 262, 1), (1000, 2, 263, 2), (2**14, 2, 65, 2), (2**14, 512, 512, 2), (2**23, 2, 3, 3)],
)
def test_chunks_fit_a_cache_or_are_as_wide_as_products_want(rows, dim, slices, parts):
    h, directions = torch.empty(1, 1, 1).expand(1, rows, dim), torch.empty(1, 1).expand(dim, slices)
    chunks = module._chunks(h, directions)
    assert [index for chunk in chunks for index in range(slices)[chunk]] == list(range(slices))
    assert len(chunks) == parts


def test_accelerators_get_larger_chunks():
    h, directions = torch.empty(1, 2**20, 1, device="meta"), torch.empty(1, 65, device="meta")
    assert module._chunks(h, directions) == [slice(0, 64), slice(64, 65)]


def test_views_and_strided_input_are_kept_apart():
    h, directions = normal(4, 3, 2).transpose(0, 1), normal(2, 5, seed=2)
    cos, sin = empirical_cf(h, directions, 4)
    assert cos.shape == sin.shape == (5, 3, 4)
    for view in range(3):
        own_cos, own_sin = textbook(h[view : view + 1].contiguous(), directions, 4)
        torch.testing.assert_close(cos[:, view], own_cos[:, 0])
        torch.testing.assert_close(sin[:, view], own_sin[:, 0])


def test_second_derivatives_are_refused_rather_than_wrong():
    h = normal(1, 3, 2).requires_grad_()
    (grad,) = torch.autograd.grad(empirical_cf(h, normal(2, 2), 4)[0].square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_dtype_and_device_follow_the_input():
    h, directions = torch.zeros(2, 4, 3, device="meta"), torch.zeros(3, 6, device="meta")
    cos, sin = empirical_cf(h, directions, 5)
    assert cos.shape == (6, 2, 5)
    assert cos.device == sin.device == torch.device("meta")
    assert cos.dtype == sin.dtype == torch.float32


def test_compiled_loops_are_used_where_they_are_and_never_required(monkeypatch):
    cpu = torch.device("cpu")
    assert kernel_for(cpu, torch.float64) is eager
    assert kernel_for(torch.device("meta"), torch.float32) is eager
    assert kernel_for(cpu, torch.float32) is not eager
    monkeypatch.setattr(module, "_compiled", lambda: None)
    assert kernel_for(cpu, torch.float32) is eager


@needs_triton
def test_programs_on_a_gpu_are_used_where_they_run(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(module, "_compiled_on", {gpu: module._compiled_on(HOME)}.get)
    assert kernel_for(gpu, torch.float32).__name__ == "orthoworld.objectives.kernels.cuda"
    assert kernel_for(gpu, torch.float64) is eager
    monkeypatch.setattr(module, "_compiled_on", lambda _: None)
    assert kernel_for(gpu, torch.float32) is eager


def test_without_triton_a_gpu_has_torch_operations(monkeypatch):
    monkeypatch.delattr("orthoworld.objectives.kernels.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "orthoworld.objectives.kernels.cuda", None)
    assert module._compiled_on.__wrapped__(HOME) is None


@needs_triton
def test_triton_that_fails_is_told_and_not_required(monkeypatch):
    def means(x, knots):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("orthoworld.objectives.kernels.cuda.means", means)
    with pytest.warns(UserWarning, match=r"SIGReg runs in torch operations .*: Failed to find C compiler"):
        assert module._compiled_on.__wrapped__(HOME) is None


@needs_triton
@pytest.mark.parametrize("chunk", [70, 10**9])
def test_programs_on_a_gpu_give_value_and_gradient(monkeypatch, chunk):
    h, directions, weights = normal(2, 7, 3), normal(3, 70, seed=3), normal(2, 70, 2, 17, seed=2)
    expected = value_and_gradient(textbook, h, directions, 17, weights)
    monkeypatch.setattr(module, "kernel_for", lambda *_: module._compiled_on(HOME))
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(module, "ACCELERATOR_CHUNK_ELEMENTS", chunk)
    single = (tensor.to(HOME, torch.float32) for tensor in (h, directions))
    ours = value_and_gradient(empirical_cf, *single, 17, weights.to(HOME, torch.float32))
    for own, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(own.cpu().double(), exact, atol=5e-6 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("state", ["absent", "broken"])
def test_without_numba_or_with_a_broken_one_sigreg_goes_on(tmp_path, state):
    # Imports are those of a fresh process: a stub that refuses to be imported lies before the installed numba.
    error = {"absent": "ModuleNotFoundError('No module named numba')", "broken": "ImportError('Numba needs NumPy 2.3')"}
    (tmp_path / "numba.py").write_text(f"raise {error[state]}")
    program = (
        "import torch, orthoworld as ow\n"
        "h = torch.zeros(4, 3, requires_grad=True)\n"
        "loss = ow.SIGReg()(h, generator=torch.Generator().manual_seed(0))\n"
        "loss.backward()\n"
        "print(round(loss.item(), 4))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.strip()) == (0, "0.402"), answer.stderr


@given(
    runs=st.integers(0, 3),
    views=st.integers(1, 3),
    rows=st.integers(1, 600),
    dim=st.integers(1, 6),
    slices=st.integers(1, 5),
    knots=st.integers(1, 20),
)
def test_compiled_loops_agree_with_torch_operations_for_any_number_of_runs_views_and_dimensions(
    runs, views, rows, dim, slices, knots
):
    several = [runs] if runs else []
    h, directions = normal(*several, views, rows, dim).float(), normal(*several, dim, slices, seed=3).float()
    weights = normal(2, *several, slices, views, knots, seed=2).float()
    found = [
        value_and_gradient(empirical_cf, h.to(dtype), directions.to(dtype), knots, weights.to(dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    for own, exact in zip(*found, strict=True):
        torch.testing.assert_close(own.double(), exact, atol=1e-5 * knots, rtol=1e-5)


@pytest.mark.parametrize("dim", [2, 64])
def test_number_of_threads_does_not_change_a_bit(dim):
    h, directions = normal(2, 1000, dim).float(), normal(dim, 256, seed=3).float()
    weights = normal(2, 256, 2, 17, seed=2).float()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        projections = directions / dim**0.5
        results.append(value_and_gradient(empirical_cf, h, projections, 17, weights))
    assert torch.equal(results[0][0], results[1][0])
    if dim == 2:  # in more dimensions torch's matrix products may round otherwise
        assert torch.equal(results[0][1], results[1][1])
