"""How fast we are beside the textbook form and installed peers: ratios of medians, taken in turn in one process."""

import functools
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orthoworld.encoders import MLP, InverseCoupling
from orthoworld.errors import ArgumentError
from orthoworld.experiments.build import build_objective, build_world
from orthoworld.experiments.carry_out import train_restart
from orthoworld.experiments.config import RunSpec, load_experiment
from orthoworld.functional import alignment, sigreg
from orthoworld.objectives.empirical_cf import kernel_for
from orthoworld.objectives.lejepa import LeJEPA
from orthoworld.objectives.objective import Objective
from orthoworld.objectives.sigreg import knot_grid, random_directions
from orthoworld.streams import stream
from orthoworld.training.ensemble import Member, train_ensemble
from orthoworld.training.schedule import AdamW, HalfCosine
from orthoworld.training.trainer import train
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Coupling
from orthoworld.worlds.transitions import OU, SharedParent
from orthoworld.worlds.world import World

KNOTS, T_MAX = 17, 3.0
SHAPES = ((512, 2, 256), (4096, 64, 256), (16384, 64, 1024))
"""Rows, dimensions, slices."""

SECONDS = 4.0
"""Time spent on one case, about, and never fewer than three turns."""

TURN_MS = 20.0
"""The least duration of a turn, about."""

LONG_MS = 1e4
"""No call that fits into a turn takes so long, compiled or not."""

TRAINING_STEPS = 300
"""Steps of a run that is timed whole."""

SWEEP_SEEDS = (0, 1, 2)
"""With three values of lambda and three of rho."""

PEER_ROWS = 4096
"""Peers are timed at the one shape of this many rows."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        section, case: what was timed.
        ours_ms, textbook_ms: medians, forward and backward. ratio: theirs over ours.
        peers: name of an installed peer to the ratio of its time to ours.
        peak_mb: memory beyond the input, in MiB; None where it is not measured.
        note: what the case says beyond its times.
        against: what `textbook_ms` is the time of.
    """

    section: str
    case: str
    ours_ms: float
    textbook_ms: float
    ratio: float
    peers: Mapping[str, float] = field(default_factory=dict)
    peak_mb: float | None = None
    note: str = ""
    against: str = "textbook"


def textbook(h: Tensor, *, generator: torch.Generator, slices: int) -> Tensor:
    """Return SIGReg as its formula is written, with a tensor of all rows, slices and knots."""
    return textbook_statistic(h @ random_directions(h.shape[-1], slices, generator=generator, like=h))


def textbook_statistic(projections: Tensor) -> Tensor:
    """Return SIGReg of given projections `(rows, slices)`."""
    t, target, weights = (values.to(projections) for values in knot_grid(KNOTS, T_MAX))
    angles = projections[..., None] * t
    error = (angles.cos().mean(dim=-3) - target).square() + angles.sin().mean(dim=-3).square()
    return (error @ weights).mean()


def medians(calls: Sequence[Callable[[], object]], seconds: float = SECONDS) -> list[float]:
    """Return the median milliseconds of each call.

    The calls take turns, so that what else the machine does falls on all of them. In its turn a call shorter than
    `TURN_MS` is repeated for that long, after one that is not counted: that one pays for the memory and the caches
    which its predecessor took.
    """
    repeats = [_repeats(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for call, number, own in zip(calls, repeats, times, strict=True):
            if number > 1:
                call()
            own.append(_mean_ms(call, number))
    return [statistics.median(own) for own in times]


def _repeats(call: Callable[[], object]) -> int:
    """Return how often a call fits into a turn, after one that may compile what it needs."""
    first_ms = _mean_ms(call, 1)
    return 1 if first_ms > LONG_MS else max(1, round(TURN_MS / _mean_ms(call, 1)))


def _mean_ms(call: Callable[[], object], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return 1e3 * (time.perf_counter() - start) / number


def machine() -> dict[str, str]:
    """Return what the times depend on."""
    kernel = kernel_for(torch.device("cpu"), torch.float32)
    return {
        "processor": _processor(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "kernel": getattr(kernel, "__name__", repr(kernel)).rpartition(".")[2],
        "absent": ", ".join(name for name in PEERS if not _installed(name)) or "no peer",
    }


def _processor() -> str:
    """Return the name of the processor, with its vector units where Linux tells them."""
    if platform.system() != "Linux":
        return platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    facts = {key.strip(): value.strip() for key, value in lines.items()}
    units = [unit for unit in ("avx2", "avx512f") if unit in facts.get("flags", "").split()]
    return " ".join([facts.get("model name", platform.machine()), *units])


def _jepa_science(slices: int, h: Tensor) -> Tensor:
    from jepa_science import sigreg_loss

    return sigreg_loss(h, num_slices=slices)


def _lightly(slices: int, h: Tensor) -> Tensor:
    from lightly.loss.lejepa_loss import SIGReg

    return SIGReg(num_vectors=slices)(h)


def _stable_pretraining(slices: int, h: Tensor) -> Tensor:
    from stable_pretraining.losses import SlicedEppsPulley

    return SlicedEppsPulley(num_slices=slices)(h)


PEERS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "jepa_science": _jepa_science,
    "lightly": _lightly,
    "stable_pretraining": _stable_pretraining,
}
"""Import name of a peer to its SIGReg with so many slices of embeddings `(rows, dim)`."""


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _forward_and_backward(loss: Callable[[Tensor], Tensor], h: Tensor) -> Callable[[], None]:
    def call() -> None:
        h.grad = None
        loss(h).backward()

    return call


def kernel() -> Iterator[Row]:
    """Time SIGReg with its projection, and the statistic of given projections."""
    for rows, dim, slices in SHAPES:
        yield _with_projection(rows, dim, slices)
    yield _statistic_alone(rows=4096, slices=256)


def _with_projection(rows: int, dim: int, slices: int) -> Row:
    h = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda h: sigreg(h, generator=generator, slices=slices),
        "textbook": lambda h: textbook(h, generator=generator, slices=slices),
    }
    for name, peer in PEERS.items():
        if _installed(name) and rows == PEER_ROWS:
            losses[name] = functools.partial(peer, slices)
    times = medians([_forward_and_backward(loss, h) for loss in losses.values()])
    ratios = {name: ms / times[0] for name, ms in zip(losses, times, strict=True)}
    peers = {name: ratio for name, ratio in ratios.items() if name in PEERS}
    return Row("kernel", f"{rows} x {dim}, {slices} slices", times[0], times[1], ratios["textbook"], peers)


def _statistic_alone(rows: int, slices: int) -> Row:
    x = torch.randn(rows, slices, generator=torch.Generator().manual_seed(1)).requires_grad_()
    own = kernel_for(x.device, x.dtype)
    angles = x.detach().T.contiguous() * (T_MAX / (KNOTS - 1))
    _, target, weights = (values.float() for values in knot_grid(KNOTS, T_MAX))
    order = torch.arange(KNOTS) / rows

    def ours() -> None:
        cos, sin = own.means(angles, KNOTS)
        own.polynomial(angles, 2 * weights * sin * order, 2 * weights * (cos - target) * order)

    own_ms, theirs_ms = medians([ours, _forward_and_backward(textbook_statistic, x)])
    return Row("kernel", f"{rows * slices} projections given", own_ms, theirs_ms, theirs_ms / own_ms)


PEAK = """
import sys
import torch
from orthoworld import bench

function = bench.sigreg if sys.argv[1] == "ours" else bench.textbook
rows, dim, slices, threads = map(int, sys.argv[2:])
torch.set_num_threads(threads)
h = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
function(h, generator=torch.Generator().manual_seed(0), slices=slices).backward()
print(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
"""A process of its own: the peak of this one may have been reached long ago."""


def memory() -> Iterator[Row]:
    """Measure the peak memory of forward and backward beyond that of the input, in processes of their own (Linux)."""
    if platform.system() != "Linux":
        return
    rows, dim, slices = SHAPES[1]
    ours, theirs = (_peak_mb(name, rows, dim, slices) for name in ("ours", "textbook"))
    ratio = theirs / ours if ours > 0 else float("nan")  # a small call may fit into what is there already
    share = ours / (rows * slices * 4 / 2**20)
    note = f"{share:.2f} times rows x slices x 4 bytes, textbook {theirs:.0f} MiB"
    yield Row("memory", f"{rows} x {dim}, {slices} slices", float("nan"), float("nan"), ratio, {}, ours, note)


def _peak_mb(function: str, rows: int, dim: int, slices: int) -> float:
    """Return the growth of the largest resident memory, in MiB, between a small call and a large one."""
    sizes = [str(size) for size in (rows, dim, slices, torch.get_num_threads())]
    peaks = []
    for arguments in ([function, "64", *sizes[1:]], [function, *sizes]):
        command = [sys.executable, "-c", PEAK, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(float(answer.stdout))
    return peaks[1] - peaks[0]


def step() -> Iterator[Row]:
    """Time a training step with alignment alone, and with SIGReg beside it."""
    yield _step("MLP, 2 latents, batch 256", MLP(2, 2), dim=2)
    yield _step("couplings, 64 latents, batch 256", InverseCoupling(64), dim=64)


def _step(case: str, encoder: nn.Module, dim: int) -> Row:
    optimizer = torch.optim.AdamW(encoder.parameters())
    x = torch.randn(512, dim, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)

    def training_step(regulariser: Callable[[Tensor], Tensor] | None) -> Callable[[], None]:
        def call() -> None:
            h = encoder(x).unflatten(0, (2, -1))
            loss = alignment(h, form="centroid")
            if regulariser is not None:
                loss = loss + regulariser(h)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return call

    alone, ours, theirs = medians(
        [
            training_step(None),
            training_step(lambda h: sigreg(h, generator=generator, pooled=True)),
            training_step(lambda h: textbook(h.flatten(0, 1), generator=generator, slices=256)),
        ]
    )
    added, theirs_added = ours / alone - 1, theirs / alone - 1
    note = f"SIGReg adds {added:.0%} to the step with alignment alone, the textbook form {theirs_added:.0%}"
    return Row("step", case, ours, theirs, theirs / ours, note=note)


def ensemble() -> Iterator[Row]:
    """Time a sweep of matched encoders as one ensemble, and one run after the other."""
    members = [
        _matched(seed, lam, rho) for seed in SWEEP_SEEDS for lam in (1e-3, 1e-2, 0.1) for rho in (0.5, 0.9, 0.95)
    ]
    options: dict[str, Any] = {
        "steps": TRAINING_STEPS,
        "batch": 256,
        "optimizer": AdamW(),
        "schedule": HalfCosine(),
        "evaluation_samples": 1000,
    }

    def one_by_one() -> None:
        for member in members:
            train(member.world, member.encoder, member.objective, seed=member.seed, **options)

    ours, theirs = medians([lambda: train_ensemble(members, **options), one_by_one], seconds=0)
    case = f"{len(members)} runs, {TRAINING_STEPS} steps"
    yield Row("ensemble", case, ours, theirs, theirs / ours, against="one by one")


def _matched(seed: int, lam: float, rho: float) -> Member:
    """Return a run of the published grid: two latents, an encoder of the form of the mixing's inverse."""
    mixing = Coupling(2, layers=8, generator=stream(seed, "mixing"))
    world = World(Gaussian(2), SharedParent(OU(rho)), mixing)
    encoder = InverseCoupling(2, layers=8, generator=stream(seed, "encoder"))
    return Member(world, encoder, LeJEPA(lam, pooled=True), seed=seed)


def experiment() -> Iterator[Row]:
    """Time the first steps of the published spiral run with its evaluation, and the same with the textbook's SIGReg."""
    chosen = ["mixings=spiral", "objectives=lejepa", "seeds=1337", f"train.steps={TRAINING_STEPS}"]
    (spec,) = load_experiment("two-d", "paper").overridden(chosen).runs()
    world = build_world(spec.world, spec.seed)
    objectives = (build_objective(spec), with_textbook_sigreg(spec))
    calls = [functools.partial(train_restart, spec, world, objective) for objective in objectives]
    own_ms, their_ms = medians(calls, seconds=0)
    case = f"two-d paper, spiral, {TRAINING_STEPS} steps"
    yield Row("experiment", case, own_ms, their_ms, their_ms / own_ms)


def with_textbook_sigreg(spec: RunSpec) -> Objective:
    """Return a run's objective with the textbook's SIGReg in the place of the kernels."""
    objective = build_objective(spec)
    objective.sigreg = _TextbookSIGReg(**spec.objective.options())
    return objective


class _TextbookSIGReg(nn.Module):
    """The pooled and scaled form, as the formula is written."""

    def __init__(self, slices: int, **_: object) -> None:
        super().__init__()
        self.slices = slices

    def forward(self, h: Tensor, *, generator: torch.Generator) -> Tensor:
        pooled = h.flatten(0, 1)
        return textbook(pooled, generator=generator, slices=self.slices) * len(pooled)


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "kernel": kernel,
    "memory": memory,
    "step": step,
    "ensemble": ensemble,
    "experiment": experiment,
}


def run(sections: Sequence[str]) -> Iterator[Row]:
    """Time the sections, all of them when none is named.

    Raises:
        ArgumentError: there is no such section.
    """
    for name in sections:
        if name not in SECTIONS:
            raise ArgumentError(f"section {name!r}: expected some of {', '.join(SECTIONS)}")
    for name in sections or SECTIONS:
        yield from SECTIONS[name]()
