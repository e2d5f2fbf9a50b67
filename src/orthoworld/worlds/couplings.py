"""Coupling layers: one part of a vector moves the other, in turn. Mixings apply them, encoders undo them."""

from collections.abc import Sequence

import torch
from torch import Tensor

LOG_SCALE = 0.5
"""Largest logarithm of the factor by which one affine layer stretches a coordinate."""

Weights = Sequence[Sequence[Tensor]]
"""The matrices of each layer: `(W,)` in an additive one, `(W, U)` in an affine one."""


def coupling_shapes(dim: int, layers: int) -> list[tuple[int, int]]:
    """Return the weight shape `(from, to)` of each coupling layer.

    The vector is split into a first part of `ceil(dim / 2)` and a second of `floor(dim / 2)`; even layers move the
    second part by the first, odd layers the first by the second. In one dimension the second part is empty.
    """
    first, second = dim - dim // 2, dim // 2
    return [(first, second) if layer % 2 == 0 else (second, first) for layer in range(layers)]


def couple(z: Tensor, weights: Weights) -> Tensor:
    """Apply layers to `z (..., dim)`: each moved part becomes `moved exp(tanh(fixed U) / 2) + tanh(fixed W)`."""
    for layer, (shift, *scale) in enumerate(weights):
        fixed, moved = _split(z, layer)
        for matrix in scale:
            moved = moved * _stretch(fixed, matrix)
        z = _join(fixed, moved + torch.tanh(_product(fixed, shift)), layer)
    return z


def uncouple(x: Tensor, weights: Weights) -> Tensor:
    """Undo `couple`."""
    for layer, (shift, *scale) in reversed(list(enumerate(weights))):
        fixed, moved = _split(x, layer)
        moved = moved - torch.tanh(_product(fixed, shift))
        for matrix in scale:
            moved = moved / _stretch(fixed, matrix)
        x = _join(fixed, moved, layer)
    return x


def _stretch(fixed: Tensor, matrix: Tensor) -> Tensor:
    return torch.exp(LOG_SCALE * torch.tanh(_product(fixed, matrix)))


def _product(fixed: Tensor, matrix: Tensor) -> Tensor:
    """Return `fixed @ matrix`; from one coordinate it is a multiplication, many times faster for stacked runs."""
    return fixed * matrix.squeeze(-2) if matrix.shape[-2] == 1 else fixed @ matrix


def _split(points: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return the `(fixed, moved)` parts of `points` in a layer."""
    first, second = points.tensor_split([points.shape[-1] - points.shape[-1] // 2], dim=-1)
    return (first, second) if layer % 2 == 0 else (second, first)


def _join(fixed: Tensor, moved: Tensor, layer: int) -> Tensor:
    """Undo `_split`."""
    return torch.cat([fixed, moved] if layer % 2 == 0 else [moved, fixed], dim=-1)
