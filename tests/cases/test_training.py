import contextlib
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from orthoworld.encoders import MLP
from orthoworld.errors import ConfigError
from orthoworld.experiments.build import build_encoder, build_objective, build_recipes, build_world
from orthoworld.experiments.carry_out import carry_out, curve_metrics
from orthoworld.experiments.config import RunSpec
from orthoworld.identifiability.recovery import recovery
from orthoworld.objectives.lejepa import LeJEPA, WhitenedLeJEPA
from orthoworld.results.store import FileCheckpoint
from orthoworld.training import session
from orthoworld.training.schedule import AdamW, HalfCosine
from orthoworld.training.trainer import train
from orthoworld.worlds.latents import Gaussian
from orthoworld.worlds.mixings import Banana, Spiral
from orthoworld.worlds.transitions import OU
from orthoworld.worlds.world import World

WORLD = World(Gaussian(2), OU(0.95), Banana())


def hundred_steps(**options):
    encoder = MLP(2, 2, width=16, depth=2, generator=torch.Generator().manual_seed(0))
    sizes = {"steps": 100, "batch": 64, "evaluation_samples": 1000, "whitener_samples": 1000, "evaluate_every": 20}
    return train(WORLD, encoder, WhitenedLeJEPA(slices=16), **(sizes | options))


def weights(run):
    return torch.cat([parameter.flatten() for parameter in run.representation.encoder.parameters()])


@pytest.fixture(autouse=True)
def _few_samples_for_the_whitener_of_a_curve(monkeypatch):
    monkeypatch.setattr(session, "CURVE_WHITENER_SAMPLES", 1000)


def test_t1_bitwise_repeat():
    first, second, other = (hundred_steps(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(weights(first), weights(second))
    assert first.curve == second.curve
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("every", [1, 10, 1000])
def test_t2_observation_does_not_disturb(every):
    unwatched = hundred_steps(evaluate_every=0)
    watched = hundred_steps(evaluate_every=every, metrics=curve_metrics, progress=lambda step, row: None)
    assert torch.equal(weights(watched), weights(unwatched))
    assert len(watched.curve) == max(100 // every, 1)


def test_t3_resume(tmp_path):
    checkpoint, steps = FileCheckpoint(tmp_path / "checkpoint.pt"), []
    half = hundred_steps(checkpoint=checkpoint, stop=lambda: len(steps) == 50, progress=lambda s, _: steps.append(s))
    assert (half.status, half.steps) == ("interrupted", 50)
    resumed = hundred_steps(checkpoint=checkpoint, progress=lambda step, _: steps.append(step))
    undisturbed = hundred_steps()
    assert torch.equal(weights(resumed), weights(undisturbed))
    assert steps == list(range(1, 101))
    assert resumed.curve == undisturbed.curve
    assert [row["step"] for row in resumed.curve] == [20, 40, 60, 80, 100]


NUMBERS = 2_000_000

WRITER = f"""
import os, sys
from pathlib import Path
import torch
from orthoworld.results.store import FileCheckpoint

checkpoint = FileCheckpoint(Path(sys.argv[1]))
for _ in sys.stdin:
    writer = os.fork()
    if not writer:
        step = 0
        while True:
            step += 1
            checkpoint.save({{"step": step, "weight": torch.full(({NUMBERS},), float(step))}})
    print(writer, flush=True)
    os.waitpid(writer, 0)
"""


def wait_for_a_partial_file(path, fraction):
    """Return once a file beside `path` has at least this part of a checkpoint's size."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for other in path.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just taken the checkpoint's name
                if other != path and other.stat().st_size >= fraction * 4 * NUMBERS:
                    return
    pytest.fail("nothing was written")


def test_t4_killed_while_saving(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint = FileCheckpoint(path)
    checkpoint.save({"step": 0, "weight": torch.zeros(NUMBERS)})
    hits = 0
    # One process forks the writers, so that torch is imported once; each writer is killed by its own id.
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as nursery:
        for fraction in (0, 0.01, 0.2, 0.5, 0.8, 0.95):
            nursery.stdin.write("\n")
            writer = int(nursery.stdout.readline())
            try:
                wait_for_a_partial_file(path, fraction)
            finally:
                os.kill(writer, signal.SIGKILL)
            state = checkpoint.load()
            assert torch.equal(state["weight"], torch.full((NUMBERS,), float(state["step"])))
            for leftover in set(tmp_path.iterdir()) - {path}:
                hits += 1
                leftover.unlink()
        nursery.stdin.close()
    assert hits > 0  # some kill did hit a write


RESTARTS = {
    "experiment": "test",
    "seed": 3,
    "world": {"dim": 3, "source": "gaussian", "transition": {"name": "ou", "rho": 0.9}, "mixing": "affine-coupling"},
    "encoder": {"name": "mlp", "width": 16, "depth": 2},
    "objective": "whitened-lejepa",
    "train": {
        "steps": 20,
        "batch": 64,
        "optimizer": "muon",
        "schedule": "warmup-cosine",
        "evaluate_every": 0,
        "evaluation_samples": 1000,
        "whitener_samples": 1000,
        "restarts": 3,
    },
}


def test_t5_restarts_share_the_world():
    spec = RunSpec.from_data(RESTARTS)
    outcome = carry_out(spec)
    world = build_world(spec.world, spec.seed)
    assert outcome.metrics["mixing_hash"] == outcome.run.world.mixing.fingerprint() == world.mixing.fingerprint()
    assert build_world(spec.world, 4).mixing.fingerprint() != world.mixing.fingerprint()
    optimizer, schedule = build_recipes(spec)
    alone = [
        train(
            world,
            build_encoder(spec, world, restart),
            build_objective(spec),
            seed=spec.seed,
            restart=restart,
            optimizer=optimizer,
            schedule=schedule,
            steps=20,
            batch=64,
            evaluation_samples=1000,
            whitener_samples=1000,
        )
        for restart in range(3)
    ]
    losses = outcome.metrics["restart_losses"]
    assert losses == [run.held_out_loss for run in alone]  # each of them was trained in this world
    assert len(set(losses)) == 3
    best = losses.index(min(losses))
    assert outcome.metrics["restart"] == best
    assert outcome.metrics["loss"] == outcome.run.held_out_loss == min(losses)
    assert torch.equal(weights(outcome.run), weights(alone[best]))


def extreme_weight(lam, seed):
    world = World(Gaussian(2), OU(0.95), Spiral())
    run = train(
        world,
        MLP(2, 2, width=64, depth=3, generator=torch.Generator().manual_seed(seed)),
        LeJEPA(lam=lam, pooled=True),
        seed=seed,
        steps=200,
        batch=256,
        optimizer=AdamW(lr=3e-3),
        schedule=HalfCosine(),
        evaluation_samples=1000,
    )
    pairs = world.sample_pairs(5000, generator=torch.Generator().manual_seed(1))
    return run, recovery(pairs.z, run.encode(pairs.x), resamples=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_t7_no_regulariser_collapses(seed):
    run, found = extreme_weight(0.0, seed)
    assert run.status == "collapsed"
    assert "standard deviation" in run.reason
    assert run.curve[-1]["largest_std"] < 1e-3
    assert found.orth_err == pytest.approx(1, abs=0.01)


def test_t7_no_alignment_recovers_nothing():
    run, found = extreme_weight(1.0, 0)
    assert run.status == "finished"
    assert 0.8 < run.curve[-1]["smallest_std"] < run.curve[-1]["largest_std"] < 1.2
    assert found.r2_hz < 0.2


def test_t8_missing_weight():
    with pytest.raises(ConfigError, match=r"objective\.lam is missing"):
        RunSpec.from_data(RESTARTS | {"objective": {"name": "lejepa"}})


class BreaksAtStep(nn.Module):
    """An encoder that gives one row of NaN at one training step."""

    def __init__(self, step):
        super().__init__()
        self.inner = MLP(2, 2, width=16, depth=1)
        self.step = step
        self.register_buffer("taken", torch.tensor(0))

    def forward(self, x):
        self.taken += self.training
        h = self.inner(x)
        broken = self.training and self.taken == self.step
        return torch.where((torch.arange(len(h)) == 5)[:, None] & broken, torch.nan, h)


@pytest.mark.parametrize("objective", [LeJEPA(lam=0.1, slices=16), WhitenedLeJEPA(slices=16)], ids=["soft", "hard"])
def test_l13_embedding_that_is_not_finite(objective, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CHECKPOINT_SECONDS", -1)  # after every step
    path = tmp_path / "checkpoint.pt"
    sizes = {"steps": 20, "batch": 64, "evaluation_samples": 100, "whitener_samples": 100}
    run = train(WORLD, BreaksAtStep(7), objective, checkpoint=FileCheckpoint(path), **sizes)
    assert (run.status, run.steps) == ("diverged", 6)
    assert math.isnan(run.held_out_loss)
    assert "step 7" in run.reason
    assert "h of view 0 has 1 non-finite rows of 64" in run.reason
    assert any(term in run.reason for term in ("total", "alignment", "regulariser"))
    state = FileCheckpoint(path).load()
    assert state["step"] == 6
    assert all(torch.isfinite(tensor).all() for tensor in state["encoder"].values())
    kept = path.read_bytes()
    assert train(WORLD, BreaksAtStep(7), objective, checkpoint=FileCheckpoint(path), **sizes).status == "diverged"
    assert path.read_bytes() == kept
