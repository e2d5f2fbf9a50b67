"""What each of several processes computes of its own rows; started by torchrun from `objectives/test_processes.py`.

    torchrun --nproc-per-node 2 across_processes.py FOLDER

writes `FOLDER/rank.pt` for each rank.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import orthoworld as ow
from orthoworld.functional import alignment, infonce, sigreg, this_process_only, whiten, whitening
from orthoworld.objectives.sigreg import random_directions

ROWS = {1: (8,), 2: (3, 5), 3: (1, 5, 2)}
"""Rows of a view that each process holds, 8 in all."""

LOSSES = {
    "sigreg": lambda h, g: sigreg(h, generator=g, slices=8),
    "sigreg-pooled": lambda h, g: sigreg(h, generator=g, slices=8, pooled=True, scaled=True),
    "sigreg-debiased": lambda h, g: sigreg(h, generator=g, slices=8, debiased=True),
    "sigreg-all-directions": lambda h, g: sigreg(h, slices=None, scaled=True),
    "whitening": lambda h, g: whitening(h),
    "whitening-frobenius": lambda h, g: whitening(h, form="frobenius"),
    "alignment": lambda h, g: alignment(h),
    "alignment-centroid": lambda h, g: alignment(h, form="centroid"),
    "infonce": lambda h, g: infonce(h, sigma=0.7),
    "whitened": lambda h, g: sigreg(whiten(h), generator=g, slices=8),
}

OBJECTIVES = {
    "LeJEPA": ow.LeJEPA(0.05, slices=8),
    "Whitening": ow.Whitening(0.5),
    "VICReg": ow.VICReg(),
    "InfoNCE": ow.InfoNCE(0.5),
    "WhitenedAlignment": ow.WhitenedAlignment(),
    "WhitenedLeJEPA": ow.WhitenedLeJEPA(slices=8),
    "ConstrainedLeJEPA": ow.ConstrainedLeJEPA(slices=8),
}
"""Built before the process group is; `SIGReg` in `main` is built after it."""

PRECISIONS = {"bfloat16": (torch.bfloat16, 1001), "float16": (torch.float16, 70_000)}
"""Types that count to 256 and to 2048 exactly, and numbers of rows beyond."""


def gen(seed):
    return torch.Generator().manual_seed(seed)


def embeddings():
    return 1.3 * torch.randn(2, 8, 3, dtype=torch.float64, generator=gen(1)) + 0.2


def value_and_gradient(loss, h, seed):
    h = h.clone().requires_grad_()
    value = loss(h, gen(seed))
    value.backward()
    return value.detach(), h.grad


def low_precision(h):
    """Return the per-sample and the scaled form, whose ratio is the number of rows that was counted."""
    return torch.stack([sigreg(h, generator=gen(0), slices=4, scaled=scaled) for scaled in (False, True)])


def encoder_gradients(encoder, h):
    loss = ow.SIGReg(slices=8)(encoder(h.flatten(0, 1).float()).unflatten(0, (2, -1)), generator=gen(0))
    loss.backward()
    return [parameter.grad for parameter in encoder.parameters()]


def train_alone():
    """Train as no other process does; a collective would wait for the others for ever."""
    world = ow.World(ow.Gaussian(2), ow.OU(0.9), ow.Banana())
    run = ow.train(world, ow.MLP(2, 2, width=8, depth=1), ow.WhitenedLeJEPA(), steps=3, batch=32, whitener_samples=100)
    return list(run.representation.parameters())


def compute(rank, rows):
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    h = embeddings()[:, mine]
    # Only rank 0's seed may matter.
    found = {name: value_and_gradient(loss, h, seed=rank) for name, loss in LOSSES.items()}
    for name, objective in OBJECTIVES.items():
        found[name] = value_and_gradient(lambda h, g, of=objective: of(h, generator=g).total, h, seed=rank)
    for name, (dtype, count) in PRECISIONS.items():
        share = torch.randn(count, 1, generator=gen(2)).to(dtype).tensor_split(len(rows))[rank]
        found[name] = low_precision(share)
    own_stream = gen(5 + rank)
    steps = []
    for _ in range(5):
        if rank == 1:
            torch.randn(7)  # somebody uses the global state of one rank
        steps.append(random_directions(3, 8, generator=own_stream, like=h))
    found["slices"] = torch.stack(steps)
    with this_process_only():
        found["alone"] = sigreg(h, generator=gen(3), slices=8)
    encoder = ow.MLP(3, 3, width=8, depth=1)
    found["ddp"] = encoder_gradients(DistributedDataParallel(encoder) if len(rows) > 1 else encoder, h)
    if rank == 0:
        found["trained"] = train_alone()
    return found


def main():
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.save(compute(rank, ROWS[distributed.get_world_size()]), Path(sys.argv[1]) / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
