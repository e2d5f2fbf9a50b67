"""Check SIGReg on a GPU against float64 on the CPU, and time it beside torch operations and the textbook form.

Usage: python benchmarks/gpu.py [--json]

Needs a CUDA device; two or three minutes on a large one. The share is the bandwidth at which the bytes move that must
(forward, each projection is read; backward, it is read and its gradient written), over that of a large copy.
"""

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor

from orthoworld import bench
from orthoworld.encoders import MLP
from orthoworld.functional import sigreg
from orthoworld.objectives.empirical_cf import Kernel, kernel_for
from orthoworld.objectives.kernels import eager
from orthoworld.objectives.lejepa import LeJEPA
from orthoworld.objectives.sigreg import knot_grid
from orthoworld.streams import stream
from orthoworld.training.ensemble import Member, train_ensemble
from orthoworld.training.schedule import AdamW, HalfCosine
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Spiral
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World

CHECKS = (
    (37, 5, 100, 1.0),
    (512, 2, 256, 1.0),
    (1000, 3, 7, 1.0),
    (4096, 64, 256, 1.0),
    (4096, 64, 256, 1e-3),
    (4096, 64, 256, 30.0),
    (2**20, 2, 3, 1.0),
    (16384, 64, 1024, 1.0),
)
"""Rows, dimensions, slices, standard deviation: few and many rows, odd numbers, a collapse and an explosion."""

STATISTIC = (16384, 1024)
"""Rows and slices of the projections that the passes alone are timed with."""

COPIED = 2**28
"""Numbers in the copy whose bandwidth is the measure: 1 GiB, far more than a cache."""

ENSEMBLE = (100, 300)
"""Runs and steps of an ensemble."""

SECONDS = 4.0
"""Time spent on one case, about, and never fewer than three turns."""

Line = dict[str, str | float]
Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""What returns the mean milliseconds of a call that is made so many times."""


def event_ms(call: Call, number: int) -> float:
    """Return the mean milliseconds of a call, by the GPU's own events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / number


def medians(calls: Sequence[tuple[Call, AbstractContextManager[object]]], clock: Clock, seconds: float) -> list[float]:
    """Return the median milliseconds of each call, made inside its context; calls take turns as in `bench.medians`."""
    times: list[list[float]] = [[] for _ in calls]
    repeats = []
    for call, context in calls:
        with context:
            call()  # compiles
            repeats.append(max(1, round(bench.TURN_MS / clock(call, 1))))
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for (call, context), number, own in zip(calls, repeats, times, strict=True):
            with context:
                call()
                own.append(clock(call, number))
    return [statistics.median(own) for own in times]


def errors(device: torch.device, rows: int, dim: int, slices: int, scale: float) -> Line:
    """Return the error of value and gradient relative to the largest of their exact numbers."""
    h = scale * torch.randn(rows, dim, generator=torch.Generator().manual_seed(1))
    found, exact = (value_and_gradient(part, slices) for part in (h.to(device), h.double()))
    value, gradient = (
        ((own.cpu().double() - other).abs().max() / other.abs().max()).item()
        for own, other in zip(found, exact, strict=True)
    )
    case = f"{rows} x {dim}, {slices} slices, scale {scale:g}"
    return {"section": "errors", "case": case, "value": value, "gradient": gradient}


def value_and_gradient(h: Tensor, slices: int) -> tuple[Tensor, Tensor]:
    """Return SIGReg of `h` and its gradient; directions are drawn on the CPU, the same for every device and type."""
    h = h.clone().requires_grad_()
    value = sigreg(h, generator=torch.Generator().manual_seed(0), slices=slices)
    (gradient,) = torch.autograd.grad(value, h)
    return value.detach(), gradient


def losses(device: torch.device, rows: int, dim: int, slices: int, clock: Clock, seconds: float) -> Line:
    """Time forward and backward with the projection."""
    h = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    generator = torch.Generator(device).manual_seed(0)

    def forward_and_backward(loss: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(loss(h, generator=generator, slices=slices), h)[0]

    ours, theirs = (functools.partial(forward_and_backward, loss) for loss in (sigreg, bench.textbook))
    in_torch = mock.patch("orthoworld.objectives.empirical_cf.kernel_for", in_torch_operations)
    nothing = contextlib.nullcontext()
    times = medians([(ours, nothing), (ours, in_torch), (theirs, nothing)], clock, seconds)
    return {"section": "forward and backward", "case": f"{rows} x {dim}, {slices} slices", **compared(*times)}


def in_torch_operations(device: torch.device, dtype: torch.dtype) -> Kernel:  # noqa: ARG001
    """Return the kernel in torch operations, whatever is asked for."""
    return eager


def compared(ours: float, in_torch: float, textbook: float) -> Line:
    """Return the times, and those of the others over ours."""
    return {
        "ours ms": ours,
        "torch ms": in_torch,
        "textbook ms": textbook,
        "torch / ours": in_torch / ours,
        "textbook / ours": textbook / ours,
    }


def passes(device: torch.device, rows: int, slices: int, bandwidth: float, clock: Clock, seconds: float) -> list[Line]:
    """Time the statistic of given projections, whole and pass by pass, with the share of the copy's bandwidth."""
    x = torch.randn(rows, slices, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    angles = x.detach().T.contiguous() * (bench.T_MAX / (bench.KNOTS - 1))
    _, target, weights = (values.to(angles) for values in knot_grid(bench.KNOTS, bench.T_MAX))
    order = torch.arange(bench.KNOTS, device=device) / rows
    cos, sin = eager.means(angles, bench.KNOTS)
    coefficients = (2 * weights * sin * order, 2 * weights * (cos - target) * order)

    def forward(kernel: Kernel) -> Tensor:
        return kernel.means(angles, bench.KNOTS)

    def backward(kernel: Kernel) -> Tensor:
        return kernel.polynomial(angles, *coefficients)

    def textbook() -> Tensor:
        return torch.autograd.grad(bench.textbook_statistic(x), x)[0]

    kernels = (kernel_for(device, torch.float32), eager)
    calls: list[Call] = [functools.partial(half, kernel) for half in (forward, backward) for kernel in kernels]
    nothing = contextlib.nullcontext()
    times = medians([(call, nothing) for call in (*calls, textbook)], clock, seconds)
    case = f"{rows} rows x {slices} slices"
    return [
        {"section": "statistic alone", "case": case, **compared(times[0] + times[2], times[1] + times[3], times[4])},
        moved(f"forward, {case}", 4 * x.numel(), times[0], times[1], bandwidth),
        moved(f"backward, {case}", 8 * x.numel(), times[2], times[3], bandwidth),
    ]


def moved(case: str, size: int, ours: float, in_torch: float, bandwidth: float) -> Line:
    """Return the times of a pass that must move so many bytes, and its share of the bandwidth, in bytes a second."""
    line: Line = {"section": "passes", "case": case, "ours ms": ours, "torch ms": in_torch}
    return line | {"share": 1e3 * size / ours / bandwidth}


def copy_bandwidth(device: torch.device, numbers: int, clock: Clock, seconds: float) -> float:
    """Return the bytes a second, read and written, of a copy of so many float32 numbers."""
    source = torch.zeros(numbers, device=device)
    target = torch.empty_like(source)
    (ms,) = medians([(lambda: target.copy_(source), contextlib.nullcontext())], clock, seconds)
    return 8e3 * numbers / ms


def ensemble(device: torch.device, runs: int, steps: int) -> Line:
    """Time an ensemble of published spiral runs, and a single one of them, after a few steps that compile."""
    world = World(Gaussian(2), SharedParent(OU(0.95)), Spiral())
    encoders = [MLP(2, 2, generator=stream(seed, "encoder")).to(device) for seed in range(runs)]
    members = [Member(world, encoder, LeJEPA(1e-3, pooled=True), seed) for seed, encoder in enumerate(encoders)]

    def seconds(several: Sequence[Member], steps: int) -> float:
        start = time.perf_counter()
        train_ensemble(
            several, steps=steps, batch=256, optimizer=AdamW(), schedule=HalfCosine(), evaluation_samples=1000
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    both = (members, members[:1])
    for several in both:
        seconds(several, 5)
    together, single = (seconds(several, steps) for several in both)
    line: Line = {"section": "ensemble", "case": f"{runs} spiral runs, {steps} steps", "ensemble s": together}
    return line | {"single s": single, "ensemble / single": together / single}


def measure(device: torch.device) -> Iterator[Line]:
    """Check, then time everything."""
    kernel = kernel_for(device, torch.float32)
    bandwidth = copy_bandwidth(device, COPIED, event_ms, SECONDS)
    yield {
        "section": "machine",
        "case": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kernel": getattr(kernel, "__name__", repr(kernel)).rpartition(".")[2],
        "copy GB/s": bandwidth / 1e9,
    }
    for check in CHECKS:
        yield errors(device, *check)
    for shape in bench.SHAPES:
        yield losses(device, *shape, event_ms, SECONDS)
    yield from passes(device, *STATISTIC, bandwidth, event_ms, SECONDS)
    yield ensemble(device, *ENSEMBLE)


def print_table(lines: Iterator[Line]) -> None:
    """Print each line as it comes, under the names of its columns where they change."""
    columns: list[str] = []
    for line in lines:
        if list(line) != columns:
            columns = list(line)
            print("", aligned(columns), sep="\n")
        print(aligned([f"{value:.3g}" if isinstance(value, float) else value for value in line.values()]), flush=True)


def aligned(cells: Sequence[str]) -> str:
    """Return the cells, the first two to the left."""
    return f"{cells[0]:22}{cells[1]:42}" + "".join(f"{cell:>17}" for cell in cells[2:])


def main() -> None:
    """Check and time, or say that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "no CUDA device here: benchmarks/gpu.py needs one\n")
    lines = measure(torch.device("cuda", torch.cuda.current_device()))
    if arguments.json:
        for line in lines:
            print(json.dumps(line), flush=True)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
