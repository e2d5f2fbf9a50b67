"""Time a published run of 20,000 steps as it is, and with the textbook's SIGReg in its place.

Usage: python benchmarks/whole_run.py

Half an hour, one thread; leave the machine alone meanwhile. Both runs have the world, encoder, optimiser and random
streams of `orthoworld run two-d --preset paper mixings=spiral objectives=lejepa seeds=1337`, and its evaluation.
"""

import time

import torch

from orthoworld.bench import with_textbook_sigreg
from orthoworld.experiments.build import build_objective, build_world
from orthoworld.experiments.carry_out import train_restart
from orthoworld.experiments.config import load_experiment

CHOSEN = ["mixings=spiral", "objectives=lejepa", "seeds=1337"]


def main() -> None:
    """Print the seconds of each and their ratio."""
    torch.set_num_threads(1)
    (spec,) = load_experiment("two-d", "paper").overridden(CHOSEN).runs()
    world, ours = build_world(spec.world, spec.seed), build_objective(spec)
    seconds = []
    for name, objective in (("orthoworld", ours), ("textbook", with_textbook_sigreg(spec))):
        start = time.perf_counter()
        run = train_restart(spec, world, objective)
        seconds.append(time.perf_counter() - start)
        print(f"{name}: {spec.train.steps} steps in {seconds[-1]:.0f} s, {run.status}", flush=True)
    print(f"ratio: {seconds[1] / seconds[0]:.2f}")


if __name__ == "__main__":
    main()
