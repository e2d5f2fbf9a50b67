"""What SIGReg over all directions costs beside 256 slices, and what noise it saves.

Usage: python benchmarks/slice_free.py

One thread, float32, forward and backward, standard normal embeddings. The noise is the standard deviation over draws of
the directions for one batch, relative to the mean; for the gradient, the norms of both.
"""

import functools

import torch
from torch import Tensor

from orthoworld.bench import machine, medians
from orthoworld.functional import sigreg

DRAWS = 200


def gradient(h: Tensor, slices: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return SIGReg and its gradient."""
    h = h.detach().requires_grad_()
    value = sigreg(h, slices=slices, generator=generator)
    return value.detach(), torch.autograd.grad(value, h)[0]


def noise(h: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """Return the relative standard deviations of the value and of the gradient over draws of 256 slices."""
    exact = gradient(h, None, generator)
    squares = [0.0, 0.0]
    for _ in range(DRAWS):
        for i, (drawn, mean) in enumerate(zip(gradient(h, 256, generator), exact, strict=True)):
            squares[i] += float((drawn - mean).square().sum() / mean.square().sum()) / DRAWS
    return squares[0] ** 0.5, squares[1] ** 0.5


def main() -> None:
    """Print one line for each shape."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(machine())
    for n in (128, 512, 2048):
        for dim in (2, 64, 512):
            h = torch.randn(n, dim, generator=generator)
            calls = [functools.partial(gradient, h, slices, generator) for slices in (None, 256)]
            exact, drawn = medians(calls, seconds=2)
            value, slope = noise(h, generator)
            print(f"{n} x {dim}: {exact / drawn:.1f} times the time; noise {value:.3f}, gradient {slope:.3f}")


if __name__ == "__main__":
    main()
