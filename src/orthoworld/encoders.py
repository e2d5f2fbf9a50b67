"""Encoders `h = f(x)`: a perceptron, and couplings whose inverse has the form of a mixing."""

import itertools
import math
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orthoworld.checks import points, whole
from orthoworld.errors import ArgumentError
from orthoworld.worlds.couplings import coupling_shapes, uncouple
from orthoworld.worlds.mixings import AffineCoupling, Coupling


def _generator(generator: torch.Generator | None) -> torch.Generator:
    """Return the given generator, or a fresh one of seed 0: weights never come from the global random state."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def _linear(in_dim: int, out_dim: int, generator: torch.Generator, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer with PyTorch's default law of weights, drawn from `generator`."""
    layer = torch.nn.utils.skip_init(nn.Linear, in_dim, out_dim, bias=bias)
    bound = 1 / math.sqrt(in_dim)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


class MLP(nn.Module):
    """A perceptron with GELU: `depth` hidden layers of `width` units and a linear output.

    Args:
        in_dim: size of an observation.
        out_dim: size of the embedding.
        width: units of a hidden layer.
        depth: number of hidden layers, >= 1.
        generator: source of the initial weights; without one, a generator of seed 0, so always the same weights.

    Raises:
        ArgumentError: a size is not a whole number >= 1.

    Example:
        >>> sum(p.numel() for p in MLP(2, 2, width=256, depth=4).parameters())
        198658
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        width: int = 256,
        depth: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        whole("in_dim", in_dim), whole("out_dim", out_dim), whole("width", width), whole("depth", depth)
        generator = _generator(generator)
        layers: list[nn.Module] = []
        for size in [in_dim] + [width] * (depth - 1):
            layers += [_linear(size, width, generator), nn.GELU()]
        self.layers = nn.Sequential(*layers, _linear(width, out_dim, generator))

    def forward(self, x: Tensor) -> Tensor:
        """Map observations `(..., in_dim)` to embeddings `(..., out_dim)`."""
        return self.layers(x)


C = TypeVar("C", bound="_InverseCouplings")


class _InverseCouplings(nn.Module):
    """Coupling layers undone, with `matrices` free weights in each, and a linear output for another embedding size."""

    matrices: ClassVar[int]

    def __init__(
        self,
        in_dim: int,
        out_dim: int | None = None,
        *,
        layers: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        generator = _generator(generator)
        self.in_dim = whole("in_dim", in_dim)
        self.out_dim = in_dim if out_dim is None else whole("out_dim", out_dim)
        self.layers = whole("layers", layers)
        same = self.out_dim == in_dim
        self.output = nn.Identity() if same else _linear(in_dim, self.out_dim, generator, bias=False)
        shapes = [shape for shape in coupling_shapes(in_dim, layers) for _ in range(self.matrices)]
        self.weights = nn.ParameterList(_normal(shape, generator) for shape in shapes)

    def match(self: C, mixing: Coupling | AffineCoupling) -> C:
        """Take over the weights of `mixing`, which makes the encoder its exact inverse, and return the encoder.

        Raises:
            ArgumentError: the mixing is of the other kind, or has another size or number of layers.
        """
        found = (mixing.dim, mixing.layers, len(mixing.matrices))
        expected = (self.in_dim, self.layers, self.matrices)
        if found != expected:
            raise ArgumentError(
                f"mixing has (dimensions, layers, matrices in a layer) {found}: expected {expected}, as the encoder"
            )
        with torch.no_grad():
            for parameter, weight in zip(self.weights, itertools.chain(*mixing.weights), strict=True):
                parameter.copy_(weight)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map observations `(..., in_dim)` to embeddings `(..., out_dim)`."""
        flat = list(self.weights)
        layers = [flat[start : start + self.matrices] for start in range(0, len(flat), self.matrices)]
        return self.output(uncouple(points("x", x, self.in_dim), layers))


def _normal(shape: tuple[int, int], generator: torch.Generator) -> nn.Parameter:
    """Return a matrix of normal entries whose variance is 1 over the number of inputs, as the published encoders."""
    return nn.Parameter(torch.randn(shape, generator=generator) / math.sqrt(max(shape[0], 1)))


class InverseCoupling(_InverseCouplings):
    """The inverse of additive coupling layers with free weights: it can invert `Coupling`, and preserves volume.

    With `out_dim == in_dim` it preserves volume, so it cannot scale its output or lose all of it; a regulariser has
    little to do then.

    Args:
        in_dim: size of an observation, any number >= 1.
        out_dim: size of the embedding; another one than `in_dim` adds a linear output without bias.
        layers: number of coupling layers.
        generator: source of the initial weights; without one, a generator of seed 0.

    Raises:
        ArgumentError: a size is not a whole number >= 1.
    """

    matrices = 1


class InverseAffineCoupling(_InverseCouplings):
    """The inverse of affine coupling layers with free weights: it can invert `AffineCoupling`, and changes volume.

    Args and errors as in `InverseCoupling`.
    """

    matrices = 2
