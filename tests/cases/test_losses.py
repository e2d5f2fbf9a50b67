"""The cases L reported by users: losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import across_processes
import orthoworld
from orthoworld.encoders import MLP
from orthoworld.errors import ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.kernels import eager
from orthoworld.objectives.lejepa import LeJEPA, Whitening
from orthoworld.objectives.sigreg import SIGReg, sigreg, sigreg_null_level
from orthoworld.objectives.whitening import whitening
from orthoworld.training.trainer import train
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Identity
from orthoworld.worlds.transitions import OU
from orthoworld.worlds.world import World


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=gen(seed))


@pytest.mark.parametrize(("n", "dim"), [(512, 64), (4096, 256)])
def test_l1_sigreg_null_level(n, dim):
    # Thirty draws have a standard error near .01 at these dimensions.
    draws = [sigreg(normal(n, dim, seed=i).float(), generator=gen(i), slices=512, scaled=True) for i in range(30)]
    assert torch.stack(draws).mean().item() == pytest.approx(1.0525, abs=0.06)
    assert sigreg_null_level(n) == pytest.approx(1.0525 / n, rel=1e-4)
    assert "1.0525 / n" in sigreg.__doc__


@pytest.mark.parametrize("slices", [1, 7, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_l2_sigreg_golden_values(seed, slices):
    def scaled(rows):
        return sigreg(torch.tensor(rows), generator=gen(seed), slices=slices, scaled=True).item()

    assert scaled([[1.0], [-1.0]]) == pytest.approx(0.205659, abs=1e-5)
    assert scaled([[0.5]]) == pytest.approx(0.616737, abs=1e-5)
    assert scaled([[0.0]] * 4) == pytest.approx(1.608190, abs=1e-5)
    assert scaled([[0.0] * 5] * 4) == pytest.approx(1.608190, abs=1e-5)


def test_l6_dtype_and_autocast():
    h = 1.3 * normal(2, 256, 8)

    def value(embeddings):
        return sigreg(embeddings, generator=gen(7))

    exact = value(h)
    assert exact.dtype == torch.float64
    assert value(h.float()).item() == pytest.approx(exact.item(), abs=1e-5)
    narrow = value(h.bfloat16())
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(exact.item(), rel=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(value(h.float()), value(h.float()))
        under_autocast = value(h.float()), value(h.bfloat16())
    assert torch.equal(under_autocast[0], value(h.float()))
    assert torch.equal(under_autocast[1], narrow)
    with pytest.raises(TypeError, match=r"embeddings have dtype torch.int32: expected a floating-point type"):
        value(torch.zeros(8, 3, dtype=torch.int32))


@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
def test_l7_device_follows_the_input(device):
    module, h = SIGReg(slices=16), normal(2, 32, 3).to(device).requires_grad_()
    value = module(h, generator=gen(7))
    value.backward()
    assert value.device.type == h.grad.device.type == device
    if device == "cuda":
        torch.testing.assert_close(value.cpu(), module(h.detach().cpu(), generator=gen(7)))


def test_l7_no_device_is_written_into_the_package():
    package = Path(orthoworld.__file__).parent
    written = re.compile(r"""device\s*(:[^=,)]*)?=\s*["']cuda|\.cuda\(|\.to\(["']cuda""")
    assert [path.name for path in package.rglob("*.py") if written.search(path.read_text())] == []


PEAK = """
import resource, sys, torch
from orthoworld.objectives.sigreg import sigreg

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux lets a child's ru_maxrss begin at its parent's.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
h = torch.randn(16_384, 64, generator=g, requires_grad=True)
before = peak()
sigreg(h, generator=g, slices=1024).backward()
print(peak() - before)
"""


def test_l9_ranks_with_3_and_5_rows_equal_8_rows_in_one_process(alone, ranks):
    for found in ranks:
        torch.testing.assert_close(found["sigreg"][0], alone["sigreg"][0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", across_processes.PRECISIONS)
def test_l9_low_precision_counts_every_row(alone, ranks, name):
    _, count = across_processes.PRECISIONS[name]
    for found in ranks:
        per_sample, scaled = found[name].double()
        assert (scaled / per_sample).item() == pytest.approx(count, rel=1e-6)
        torch.testing.assert_close(found[name], alone[name], rtol=1e-3, atol=0)


def test_l10_slices_agree_across_ranks_and_differ_between_steps(ranks):
    first, *others = [found["slices"] for found in ranks]
    assert all(torch.equal(first, other) for other in others)
    assert len({tuple(step.flatten().tolist()) for step in first}) == 5


def test_l11_memory():
    answer = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    growth = int(answer.stdout)
    assert 16_384 * 1024 * 4 < growth < 1.5e9  # more than the projections themselves, or it was not measured


@pytest.mark.parametrize("where", ["empirical_cf.CHUNK_ELEMENTS", "kernels.eager.BLOCK_ELEMENTS"])
def test_l11_chunks_do_not_change_the_loss(monkeypatch, where):
    results = []
    for elements in (1000, 32_768, 10**9):
        monkeypatch.setattr(f"orthoworld.objectives.{where}", elements)
        if "eager" in where:
            monkeypatch.setattr("orthoworld.objectives.empirical_cf.kernel_for", lambda *_: eager)
        h = normal(1024, 16).float().requires_grad_()
        value = sigreg(h, generator=gen(7), slices=256, scaled=True)
        value.backward()
        results.append((value.detach(), h.grad))
    for value, grad in results[:2]:
        torch.testing.assert_close(value, results[2][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(grad, results[2][1], atol=1e-5, rtol=0)


def test_l12_exact_collapse():
    h = torch.zeros(256, 3, requires_grad=True)
    value = sigreg(h, generator=gen(), scaled=True)
    value.backward()
    assert value.item() == pytest.approx(0.40205 * 256, rel=1e-5)
    assert (h.grad == 0).all()
    assert "gradient of exactly 0" in " ".join(sigreg.__doc__.split())


def test_l12_training_flags_a_collapse():
    encoder = MLP(2, 2, width=4, depth=1)
    torch.nn.init.zeros_(encoder.layers[-1].weight)
    torch.nn.init.zeros_(encoder.layers[-1].bias)
    world = World(Gaussian(2), OU(0.95), Identity(2))
    run = train(world, encoder, LeJEPA(lam=1.0, slices=4), steps=2, batch=8, evaluation_samples=50)
    assert run.status == "collapsed"
    assert "standard deviation" in run.reason
    assert "0.001" in run.reason


def test_l14_shape_contract():
    h = normal(8, 3)
    one_view = sigreg(h, generator=gen(7))
    assert torch.equal(one_view, sigreg(h[None], generator=gen(7)))
    assert torch.equal(one_view, sigreg(torch.stack([h, h]), generator=gen(7)))
    for shape in ((8,), (), (2, 2, 8, 3)):
        with pytest.raises(
            ShapeError, match=r"expected \(batch, dim\), read as one view, or \(views, batch, dim\)"
        ) as e:
            sigreg(torch.zeros(shape), generator=gen())
        assert f"embeddings have shape {shape}" in str(e.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SIGReg(slices=0), "slices=0: expected a whole number >= 1"),
        (lambda: SIGReg(knots=1), "knots=1: expected a whole number >= 2"),
        (lambda: SIGReg(t_max=0), "t_max=0: expected a number in (0, inf)"),
        (lambda: SIGReg(t_max=-1), "t_max=-1: expected a number in (0, inf)"),
        (lambda: LeJEPA(lam=-0.1), "lam=-0.1: expected a number in [0, 1]"),
        (lambda: LeJEPA(lam=1.5), "lam=1.5: expected a number in [0, 1]"),
        (lambda: Whitening(lam=1.5), "lam=1.5: expected a number in [0, 1]"),
        (lambda: LeJEPA(lam=0.1, knots=1), "knots=1: expected a whole number >= 2"),
    ],
)
def test_l15_bad_constructor_arguments(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_l16_alignment_factor():
    h = normal(2, 7, 3)
    squared = (h[0] - h[1]).square()
    torch.testing.assert_close(alignment(h), squared.sum(dim=1).mean())
    torch.testing.assert_close(alignment(h, form="centroid"), squared.mean() / 4)
    torch.testing.assert_close(alignment(h), 4 * 3 * alignment(h, form="centroid"))
    assert "`4 dim` for two views" in alignment.__doc__
    with pytest.raises(ValueError, match=r"shape \(1, 7, 3\): expected \(views, batch, dim\) with two views or more"):
        alignment(h[:1])


def test_l17_whitening_value_and_one_sample():
    # Orthogonal columns of squared norm 2 (n - 1) and mean 0: the covariance is 2 I.
    n = 8
    columns = torch.linalg.qr(torch.cat([torch.ones(n, 1).double(), normal(n, 3)], dim=1)).Q[:, 1:]
    h = columns * (2 * (n - 1)) ** 0.5
    assert whitening(h, form="frobenius").item() == pytest.approx(3)
    assert whitening(h, form="mean").item() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"shape \(1, 3\): expected two samples or more, to have a covariance"):
        whitening(h[:1])
