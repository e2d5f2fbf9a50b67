"""Mixings: the unknown map `x = g(z)` from latents to observations, with its inverse."""

import hashlib
import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import points, real, whole
from orthoworld.errors import ArgumentError, ShapeError


class Mixing(nn.Module, ABC):
    """An injective map from `dim` latents to `out_dim` observed numbers.

    `mixing(z)` maps `(..., dim)` to `(..., out_dim)`; `mixing.inverse(x)` maps back. Both raise `ShapeError` when the
    last dimension is another one. Weights are buffers: a mixing moves to a device with `.to(...)` and is never trained.
    """

    def __init__(self, dim: int, out_dim: int | None = None) -> None:
        super().__init__()
        self.dim = whole("dim", dim)
        self.out_dim = self.dim if out_dim is None else whole("out_dim", out_dim)

    def forward(self, z: Tensor) -> Tensor:
        """Return the observations `g(z)`, shape `(..., out_dim)`."""
        return self._mix(points("z", z, self.dim))

    def inverse(self, x: Tensor) -> Tensor:
        """Return the latents `g^-1(x)`, shape `(..., dim)`."""
        return self._unmix(points("x", x, self.out_dim))

    def fingerprint(self) -> str:
        """Return a hash of the kind, the settings and the weights: equal fingerprints are the same map."""
        settings = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        settings.pop("training", None)
        digest = hashlib.sha256(repr((type(self).__name__, sorted(settings.items()))).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @abstractmethod
    def _mix(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _unmix(self, x: Tensor) -> Tensor: ...


class Identity(Mixing):
    """`x = z`: the latents are observed as they are."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def _mix(self, z: Tensor) -> Tensor:
        return z

    def _unmix(self, x: Tensor) -> Tensor:
        return x


class Linear(Mixing):
    """`x = M z`, with at least as many observed numbers as latents.

    Args:
        matrix: `M`, shape `(out_dim, dim)`, of full column rank.

    Raises:
        ShapeError: `matrix` is not two-dimensional.
        ArgumentError: entries are not finite floating-point numbers, or the columns are linearly dependent, so that the
            map has no inverse.
    """

    matrix: Tensor
    left_inverse: Tensor

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2:
            raise ShapeError(f"matrix has shape {tuple(matrix.shape)}: expected (out_dim, dim)")
        if not (matrix.is_floating_point() and torch.isfinite(matrix).all()):
            raise ArgumentError(f"matrix of {matrix.dtype}: expected finite floating-point numbers, got {matrix}")
        out_dim, dim = matrix.shape
        super().__init__(dim, out_dim)
        rank = int(torch.linalg.matrix_rank(matrix))
        if rank < dim:
            raise ArgumentError(f"matrix of shape ({out_dim}, {dim}) has rank {rank}: expected full column rank {dim}")
        self.register_buffer("matrix", matrix.clone())
        self.register_buffer("left_inverse", torch.linalg.pinv(matrix))

    def _mix(self, z: Tensor) -> Tensor:
        return z @ self.matrix.T

    def _unmix(self, x: Tensor) -> Tensor:
        return x @ self.left_inverse.T


class Spiral(Mixing):
    """`x = R(rate |z|) z`: each point turns about the origin by an angle that grows with its distance.

    It preserves volume and the standard normal law, so the observation is Gaussian and yet a nonlinear map of the
    state.

    Args:
        rate: angle per unit of distance, in radians; the published worlds use pi.
    """

    def __init__(self, rate: float = math.pi) -> None:
        super().__init__(2)
        self.rate = real("rate", rate, -math.inf, math.inf)

    def _turn(self, points: Tensor, rate: float) -> Tensor:
        angle = rate * points.norm(dim=-1)
        cos, sin = angle.cos(), angle.sin()
        first, second = points.unbind(-1)
        return torch.stack([cos * first - sin * second, sin * first + cos * second], dim=-1)

    def _mix(self, z: Tensor) -> Tensor:
        return self._turn(z, self.rate)

    def _unmix(self, x: Tensor) -> Tensor:
        return self._turn(x, -self.rate)


class Banana(Mixing):
    """`x = (z_0, z_1 + curvature z_0^2)`, the parabolic shear.

    Args:
        curvature: coefficient of the square; 1 as published.
    """

    def __init__(self, curvature: float = 1.0) -> None:
        super().__init__(2)
        self.curvature = real("curvature", curvature, -math.inf, math.inf)

    def _mix(self, z: Tensor) -> Tensor:
        first, second = z.unbind(-1)
        return torch.stack([first, second + self.curvature * first**2], dim=-1)

    def _unmix(self, x: Tensor) -> Tensor:
        first, second = x.unbind(-1)
        return torch.stack([first, second - self.curvature * first**2], dim=-1)


class Sinusoid(Mixing):
    """`x = (z_0 + sin(frequency z_1), z_1)`.

    Args:
        frequency: in radians per unit; 1.5 as published.
    """

    def __init__(self, frequency: float = 1.5) -> None:
        super().__init__(2)
        self.frequency = real("frequency", frequency, -math.inf, math.inf)

    def _mix(self, z: Tensor) -> Tensor:
        first, second = z.unbind(-1)
        return torch.stack([first + torch.sin(self.frequency * second), second], dim=-1)

    def _unmix(self, x: Tensor) -> Tensor:
        first, second = x.unbind(-1)
        return torch.stack([first - torch.sin(self.frequency * second), second], dim=-1)


def coupling_shapes(dim: int, layers: int) -> list[tuple[int, int]]:
    """Return the weight shape `(from, to)` of each coupling layer.

    The vector is split into a first part of `ceil(dim / 2)` and a second of `floor(dim / 2)`; even layers move the
    second part by the first, odd layers the first by the second. In one dimension the second part is empty.
    """
    first, second = dim - dim // 2, dim // 2
    return [(first, second) if layer % 2 == 0 else (second, first) for layer in range(layers)]


def split(points: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return `(fixed, moved)` parts of `points` for a coupling layer."""
    first, second = points.tensor_split([points.shape[-1] - points.shape[-1] // 2], dim=-1)
    return (first, second) if layer % 2 == 0 else (second, first)


def join(fixed: Tensor, moved: Tensor, layer: int) -> Tensor:
    """Undo `split`."""
    return torch.cat([fixed, moved] if layer % 2 == 0 else [moved, fixed], dim=-1)


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Float[Tensor, "rows columns"]:
    """Return a random matrix with orthonormal rows or columns, uniform under rotations."""
    # Drawn and factorised on the CPU whatever the device of use: the same seed is the same world everywhere.
    normal = torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal().sign()  # without the signs of r the law of q would not be uniform
    return (q if rows >= columns else q.T).float().contiguous()


class Coupling(Mixing):
    """Additive coupling layers: `z_2 += tanh(z_1 W_0)`, `z_1 += tanh(z_2 W_1)`, ... in turn.

    It preserves volume. Each `W_i` is twice a random orthonormal matrix. Any number of latents works: an odd one is
    split into unequal parts. In one dimension nothing is left to move, and the map is the identity: up to sign and
    shift that is the only smooth map of the line that preserves volume.

    Args:
        dim: number of latents.
        layers: number of coupling layers.
        generator: CPU generator of the weights.

    Raises:
        ArgumentError: `dim` or `layers` is not a whole number >= 1.

    Example:
        >>> mixing = Coupling(5, generator=torch.Generator().manual_seed(0))
        >>> z = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
        >>> bool(torch.allclose(mixing.inverse(mixing(z)), z, atol=1e-5))
        True
    """

    def __init__(self, dim: int, layers: int = 4, *, generator: torch.Generator) -> None:
        super().__init__(dim)
        self.layers = whole("layers", layers)
        for layer, shape in enumerate(coupling_shapes(dim, layers)):
            self.register_buffer(f"weight_{layer}", 2 * _orthonormal(*shape, generator))

    @property
    def weights(self) -> list[Tensor]:
        """The matrices `W_i`, in the order in which they are applied."""
        return [self.get_buffer(f"weight_{layer}") for layer in range(self.layers)]

    def _mix(self, z: Tensor) -> Tensor:
        for layer, weight in enumerate(self.weights):
            fixed, moved = split(z, layer)
            z = join(fixed, moved + torch.tanh(fixed @ weight), layer)
        return z

    def _unmix(self, x: Tensor) -> Tensor:
        for layer, weight in reversed(list(enumerate(self.weights))):
            fixed, moved = split(x, layer)
            x = join(fixed, moved - torch.tanh(fixed @ weight), layer)
        return x


LOG_SCALE = 0.5
"""Largest logarithm of the factor by which one affine coupling layer stretches a coordinate."""


class AffineCoupling(Mixing):
    """Affine coupling layers: `z_2 <- z_2 exp(s(z_1)) + tanh(z_1 W)`, with `s(z_1) = tanh(z_1 U) / 2`, in turn.

    It changes volume, so no encoder that preserves volume inverts it. One dimension: the identity.

    Args:
        dim: number of latents.
        layers: number of coupling layers.
        generator: CPU generator of the weights.

    Raises:
        ArgumentError: `dim` or `layers` is not a whole number >= 1.
    """

    def __init__(self, dim: int, layers: int = 4, *, generator: torch.Generator) -> None:
        super().__init__(dim)
        self.layers = whole("layers", layers)
        for layer, shape in enumerate(coupling_shapes(dim, layers)):
            self.register_buffer(f"shift_{layer}", 2 * _orthonormal(*shape, generator))
            self.register_buffer(f"scale_{layer}", 2 * _orthonormal(*shape, generator))

    @property
    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """The matrices `(W_i, U_i)`, in the order in which they are applied."""
        names = [(f"shift_{layer}", f"scale_{layer}") for layer in range(self.layers)]
        return [(self.get_buffer(shift), self.get_buffer(scale)) for shift, scale in names]

    def _mix(self, z: Tensor) -> Tensor:
        for layer, (shift, scale) in enumerate(self.weights):
            fixed, moved = split(z, layer)
            stretch = torch.exp(LOG_SCALE * torch.tanh(fixed @ scale))
            z = join(fixed, moved * stretch + torch.tanh(fixed @ shift), layer)
        return z

    def _unmix(self, x: Tensor) -> Tensor:
        for layer, (shift, scale) in reversed(list(enumerate(self.weights))):
            fixed, moved = split(x, layer)
            stretch = torch.exp(LOG_SCALE * torch.tanh(fixed @ scale))
            x = join(fixed, (moved - torch.tanh(fixed @ shift)) / stretch, layer)
        return x
