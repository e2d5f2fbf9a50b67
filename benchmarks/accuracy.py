"""Compare SIGReg in float32 with the textbook form in float64 at many random shapes and scales.

Usage: python benchmarks/accuracy.py [--shapes 100000] [--seed 0]

Prints the largest errors: of the value relative to it, of the gradient relative to its largest entry. Where one exceeds
1e-5 or 1e-4, that of the textbook form in float32 is shown beside it, and the script fails if it is under half as
large. Batches of 4 to 600 rows: of one or two rows little is left when a row's terms with itself cancel, and the errors
are larger than those of the textbook form, in which they cancel exactly. Seventeen knots up to 3; projections of up to
about 50. About ten minutes for a hundred thousand shapes.
"""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import Tensor

from orthoworld.functional import sigreg
from orthoworld.objectives.sigreg import knot_grid, random_directions

BOUNDS = {"value": 1e-5, "gradient": 1e-4}


def textbook(h: Tensor, *, generator: torch.Generator, slices: int) -> Tensor:
    """Return SIGReg of each view as its formula is written."""
    t, target, weights = knot_grid(17, 3.0)
    angles = (h @ random_directions(h.shape[-1], slices, generator=generator, like=h))[..., None] * t
    error = (angles.cos().mean(dim=1) - target).square() + angles.sin().mean(dim=1).square()
    return (error @ weights).mean()


@dataclass(frozen=True)
class Case:
    """Embeddings of a random shape and scale, and the number of slices."""

    h: Tensor
    slices: int
    name: str

    @classmethod
    def draw(cls, choice: random.Random) -> "Case":
        """Return a random case."""
        rows = round(math.exp(choice.uniform(math.log(4), math.log(600))))
        sizes, slices = (choice.randint(1, 3), rows, choice.randint(1, 70)), choice.randint(1, 40)
        scale, shift = math.exp(choice.uniform(math.log(1e-3), math.log(12))), choice.choice([0, 0, 1])
        h = scale * torch.randn(sizes, generator=torch.Generator().manual_seed(choice.getrandbits(32))) + shift
        return cls(h, slices, f"{sizes}, {slices} slices, scale {scale:.3g}, shift {shift}")

    def compute(self, function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return value and gradient, in float64."""
        h = self.h.to(dtype).requires_grad_()
        value = function(h, generator=torch.Generator().manual_seed(0), slices=self.slices)
        (gradient,) = torch.autograd.grad(value, h)
        return value.detach().double(), gradient.double()

    def errors(self, function: Callable[..., Tensor]) -> list[float]:
        """Return the relative errors of a float32 form's value and gradient."""
        found, exact = self.compute(function, torch.float32), self.compute(textbook, torch.float64)
        return [float((own - e).abs().max() / e.abs().max()) for own, e in zip(found, exact, strict=True)]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choice = random.Random(arguments.seed)
    worst, failed = {"value": 0.0, "gradient": 0.0}, False
    for _ in track(range(arguments.shapes), description="shapes"):
        case = Case.draw(choice)
        for (what, most), error in zip(BOUNDS.items(), case.errors(sigreg), strict=True):
            if error > most:
                theirs = case.errors(textbook)[list(BOUNDS).index(what)]
                failed |= error > 2 * theirs
                print(f"{what} off by {error:.1e}, textbook form in float32 by {theirs:.1e}: {case.name}")
            else:
                worst[what] = max(worst[what], error)
    print(f"{arguments.shapes} shapes: value within {worst['value']:.1e}, gradient within {worst['gradient']:.1e}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
