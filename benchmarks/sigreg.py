"""Time SIGReg, forward and backward, against a textbook version that builds the samples x slices x knots tensor.

Usage: python benchmarks/sigreg.py [--threads N]

Prints the ratio of the median times of both, taken in turn in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from orthoworld.functional import sigreg
from orthoworld.objectives.sigreg import knot_grid, random_directions

CASES = ((512, 64, 256), (4096, 64, 256))
"""Samples, dimensions, slices."""

REPEATS = 30


def textbook(h: Tensor, *, generator: torch.Generator, slices: int, knots: int = 17, t_max: float = 3.0) -> Tensor:
    """Return SIGReg as its formula is written."""
    t, target, weights = (values.to(h) for values in knot_grid(knots, t_max))
    angles = (h @ random_directions(h.shape[1], slices, generator=generator, like=h))[:, :, None] * t
    error = (angles.cos().mean(dim=0) - target).square() + angles.sin().mean(dim=0).square()
    return (error @ weights).mean()


def seconds(function: Callable[..., Tensor], h: Tensor, slices: int) -> float:
    """Return the time of one forward and backward pass."""
    h.grad = None
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    function(h, generator=generator, slices=slices).backward()
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    for samples, dim, slices in CASES:
        h = torch.randn(samples, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        pairs = [(seconds(textbook, h, slices), seconds(sigreg, h, slices)) for _ in range(REPEATS)]
        theirs, ours = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{samples} x {dim}, {slices} slices: {ours:.2f} ms, textbook {theirs:.2f} ms, ratio {theirs / ours:.1f}")


if __name__ == "__main__":
    main()
