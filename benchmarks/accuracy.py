"""Compare SIGReg in float32 with the textbook form in float64 at many random shapes and scales.

Usage: python benchmarks/accuracy.py [--shapes 100000] [--seed 0]

Prints the largest errors: of the value relative to it, of the gradient relative to its largest entry. Fails above 1e-5
and 1e-4. Seventeen knots up to 3; projections of up to about 50. About ten minutes for a hundred thousand shapes.
"""

import argparse
import math
import random
from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor

from orthoworld.functional import sigreg
from orthoworld.objectives.sigreg import knot_grid, random_directions

VALUE, GRADIENT = 1e-5, 1e-4


def textbook(h: Tensor, *, generator: torch.Generator, slices: int) -> Tensor:
    """Return SIGReg of each view as its formula is written."""
    t, target, weights = knot_grid(17, 3.0)
    angles = (h @ random_directions(h.shape[-1], slices, generator=generator, like=h))[..., None] * t
    error = (angles.cos().mean(dim=1) - target).square() + angles.sin().mean(dim=1).square()
    return (error @ weights).mean()


def errors(shape: random.Random) -> tuple[float, float, str]:
    """Return the relative errors of value and gradient at a random shape, and the shape."""
    rows = round(math.exp(shape.uniform(0, math.log(600))))
    sizes = (shape.randint(1, 3), rows, shape.randint(1, 70))
    slices = shape.randint(1, 40)
    scale, shift = math.exp(shape.uniform(math.log(1e-3), math.log(12))), shape.choice([0, 0, 1])
    h = scale * torch.randn(sizes, generator=torch.Generator().manual_seed(shape.getrandbits(32))) + shift
    results = []
    forms: tuple[tuple[Callable[..., Tensor], torch.dtype], ...] = (sigreg, torch.float32), (textbook, torch.float64)
    for function, dtype in forms:
        own = h.to(dtype).requires_grad_()
        value = function(own, generator=torch.Generator().manual_seed(0), slices=slices)
        (gradient,) = torch.autograd.grad(value, own)
        results.append((value.detach().double(), gradient.double()))
    (value, gradient), (exact, exact_gradient) = results
    value_error = float((value - exact).abs() / exact)
    gradient_error = float((gradient - exact_gradient).abs().max() / exact_gradient.abs().max())
    return value_error, gradient_error, f"{sizes}, {slices} slices, scale {scale:.3g} shift {shift}"


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = random.Random(arguments.seed)
    worst_value, worst_gradient = (0.0, ""), (0.0, "")
    for _ in track(range(arguments.shapes), description="shapes"):
        value, gradient, case = errors(shape)
        worst_value, worst_gradient = max(worst_value, (value, case)), max(worst_gradient, (gradient, case))
    print(f"{arguments.shapes} shapes: value within {worst_value[0]:.1e} at {worst_value[1]}")
    print(f"gradient within {worst_gradient[0]:.1e} at {worst_gradient[1]}")
    if worst_value[0] > VALUE or worst_gradient[0] > GRADIENT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
