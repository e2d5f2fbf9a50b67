"""Runs of a fraction of a second, and what tests of processes share."""

import io
import subprocess
import sys
import time
from pathlib import Path

import torch

from orthoworld.experiments.config import load_experiment

SMALL = (
    "mixings=spiral",
    "objectives=lejepa",
    "encoder.width=16",
    "encoder.depth=1",
    "train.steps=20",
    "train.batch=32",
    "train.whitener_samples=1000",
    "train.evaluation_samples=500",
    "train.evaluate_every=5",
    "train.device=cpu",
)
COMMAND = Path(sys.executable).with_name("orthoworld")


def small_specs(*assignments):
    return load_experiment("two-d").overridden([*SMALL, *assignments]).runs()


def small_spec(*assignments):
    return small_specs(*assignments)[0]


def start(*arguments, **options):
    """Start the command in a process group of its own."""
    return subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def folder_of(spec, root):
    return root / spec.experiment / spec.run_id


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class MemoryCheckpoint:
    """Keeps the state as the bytes a file would hold."""

    def __init__(self):
        self.content = None
        self.saves = 0

    def load(self):
        return None if self.content is None else torch.load(io.BytesIO(self.content), weights_only=True)

    def save(self, state):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.content = buffer.getvalue()
        self.saves += 1
