"""Encoders `h = f(x)`: a perceptron, and couplings whose inverse has the form of a mixing."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from orthoworld.checks import points, whole
from orthoworld.errors import ArgumentError
from orthoworld.worlds.mixings import LOG_SCALE, AffineCoupling, Coupling, coupling_shapes, join, split


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


class MLP(nn.Sequential):
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
        whole("in_dim", in_dim), whole("out_dim", out_dim), whole("width", width), whole("depth", depth)
        generator = _generator(generator)
        layers: list[nn.Module] = []
        for size in [in_dim] + [width] * (depth - 1):
            layers += [_linear(size, width, generator), nn.GELU()]
        super().__init__(*layers, _linear(width, out_dim, generator))

    def __getitem__(self, index: int | slice) -> Any:
        return nn.Sequential(*self)[index]  # a part of a perceptron is a plain sequence of layers


class _InverseCouplingBase(nn.Module):
    """What both inverse couplings share: sizes, and a linear output when the embedding has another size."""

    def __init__(self, in_dim: int, out_dim: int | None, layers: int, generator: torch.Generator) -> None:
        super().__init__()
        self.in_dim = whole("in_dim", in_dim)
        self.out_dim = in_dim if out_dim is None else whole("out_dim", out_dim)
        self.layers = whole("layers", layers)
        same = self.out_dim == in_dim
        self.output = nn.Identity() if same else _linear(in_dim, self.out_dim, generator, bias=False)

    def _weights(self, generator: torch.Generator) -> nn.ParameterList:
        """Return one free matrix a layer, normal with variance 1 over the number of inputs."""
        shapes = coupling_shapes(self.in_dim, self.layers)
        drawn = [torch.randn(shape, generator=generator) / math.sqrt(max(shape[0], 1)) for shape in shapes]
        return nn.ParameterList(nn.Parameter(weight) for weight in drawn)

    def _match(self, mixing: Coupling | AffineCoupling) -> None:
        if (mixing.dim, mixing.layers) != (self.in_dim, self.layers):
            raise ArgumentError(
                f"mixing has {mixing.dim} dimensions and {mixing.layers} layers: "
                f"expected {self.in_dim} and {self.layers}, as the encoder"
            )


class InverseCoupling(_InverseCouplingBase):
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

    def __init__(
        self,
        in_dim: int,
        out_dim: int | None = None,
        *,
        layers: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        generator = _generator(generator)
        super().__init__(in_dim, out_dim, layers, generator)
        self.weights = self._weights(generator)

    def match(self, mixing: Coupling) -> "InverseCoupling":
        """Take over the weights of `mixing`, which makes the encoder its exact inverse, and return the encoder.

        Raises:
            ArgumentError: the mixing has another size or number of layers.
        """
        self._match(mixing)
        with torch.no_grad():
            for own, given in zip(self.weights, mixing.weights, strict=True):
                own.copy_(given)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map observations `(..., in_dim)` to embeddings `(..., out_dim)`."""
        h = points("x", x, self.in_dim)
        for layer, weight in reversed(list(enumerate(self.weights))):
            fixed, moved = split(h, layer)
            h = join(fixed, moved - torch.tanh(fixed @ weight), layer)
        return self.output(h)


class InverseAffineCoupling(_InverseCouplingBase):
    """The inverse of affine coupling layers with free weights: it can invert `AffineCoupling`, and changes volume.

    Args and errors as in `InverseCoupling`.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int | None = None,
        *,
        layers: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        generator = _generator(generator)
        super().__init__(in_dim, out_dim, layers, generator)
        self.shifts = self._weights(generator)
        self.scales = self._weights(generator)

    def match(self, mixing: AffineCoupling) -> "InverseAffineCoupling":
        """Take over the weights of `mixing`, which makes the encoder its exact inverse, and return the encoder.

        Raises:
            ArgumentError: the mixing has another size or number of layers.
        """
        self._match(mixing)
        with torch.no_grad():
            for shift, scale, given in zip(self.shifts, self.scales, mixing.weights, strict=True):
                shift.copy_(given[0])
                scale.copy_(given[1])
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map observations `(..., in_dim)` to embeddings `(..., out_dim)`."""
        h = points("x", x, self.in_dim)
        for layer in reversed(range(self.layers)):
            fixed, moved = split(h, layer)
            stretch = torch.exp(LOG_SCALE * torch.tanh(fixed @ self.scales[layer]))
            h = join(fixed, (moved - torch.tanh(fixed @ self.shifts[layer])) / stretch, layer)
        return self.output(h)
