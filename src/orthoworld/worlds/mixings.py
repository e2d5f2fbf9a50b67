"""Mixings: the unknown map `x = g(z)` from latents to observations, with its inverse."""

import hashlib
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import points, real, whole
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.worlds.couplings import couple, coupling_shapes, uncouple


class Mixing(nn.Module, ABC):
    """An injective map from `dim` latents to `obs_dim` observed numbers.

    `mixing(z)` maps `(..., dim)` to `(..., obs_dim)`; `mixing.inverse(x)` maps back. Both raise `ShapeError` when the
    last dimension is another one. Weights are buffers: a mixing moves to a device with `.to(...)` and is never trained.
    """

    def __init__(self, dim: int, obs_dim: int | None = None) -> None:
        super().__init__()
        self.dim = whole("dim", dim)
        self.obs_dim = self.dim if obs_dim is None else whole("obs_dim", obs_dim)

    def forward(self, z: Tensor) -> Tensor:
        """Return the observations `g(z)`, shape `(..., obs_dim)`."""
        return self._mix(points("z", z, self.dim))

    def inverse(self, x: Tensor) -> Tensor:
        """Return the latents `g^-1(x)`, shape `(..., dim)`."""
        return self._unmix(points("x", x, self.obs_dim))

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
        matrix: `M`, shape `(obs_dim, dim)`, of full column rank.

    Raises:
        ShapeError: `matrix` is not two-dimensional.
        ArgumentError: entries are not finite floating-point numbers, or the columns are linearly dependent, so that the
            map has no inverse.
    """

    matrix: Tensor
    left_inverse: Tensor

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2:
            raise ShapeError(f"matrix has shape {tuple(matrix.shape)}: expected (obs_dim, dim)")
        if not (matrix.is_floating_point() and torch.isfinite(matrix).all()):
            raise ArgumentError(f"matrix of {matrix.dtype}: expected finite floating-point numbers, got {matrix}")
        obs_dim, dim = matrix.shape
        super().__init__(dim, obs_dim)
        rank = int(torch.linalg.matrix_rank(matrix))
        if rank < dim:
            raise ArgumentError(f"matrix of shape ({obs_dim}, {dim}) has rank {rank}: expected full column rank {dim}")
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

    Raises:
        ArgumentError: `rate` is not a finite number.
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


class _Shear(Mixing):
    """One of two coordinates moves by a function of the other."""

    moved: ClassVar[int]

    def __init__(self) -> None:
        super().__init__(2)

    @abstractmethod
    def _shift(self, fixed: Tensor) -> Tensor: ...

    def _sheared(self, points: Tensor, sign: int) -> Tensor:
        parts = list(points.unbind(-1))
        parts[self.moved] = parts[self.moved] + sign * self._shift(parts[1 - self.moved])
        return torch.stack(parts, dim=-1)

    def _mix(self, z: Tensor) -> Tensor:
        return self._sheared(z, 1)

    def _unmix(self, x: Tensor) -> Tensor:
        return self._sheared(x, -1)


class Banana(_Shear):
    """`x = (z_0, z_1 + curvature z_0^2)`, the parabolic shear.

    Args:
        curvature: coefficient of the square; 1 as published.

    Raises:
        ArgumentError: `curvature` is not a finite number.
    """

    moved = 1

    def __init__(self, curvature: float = 1.0) -> None:
        super().__init__()
        self.curvature = real("curvature", curvature, -math.inf, math.inf)

    def _shift(self, fixed: Tensor) -> Tensor:
        return self.curvature * fixed**2


class Sinusoid(_Shear):
    """`x = (z_0 + sin(frequency z_1), z_1)`.

    Args:
        frequency: in radians per unit; 1.5 as published.

    Raises:
        ArgumentError: `frequency` is not a finite number.
    """

    moved = 0

    def __init__(self, frequency: float = 1.5) -> None:
        super().__init__()
        self.frequency = real("frequency", frequency, -math.inf, math.inf)

    def _shift(self, fixed: Tensor) -> Tensor:
        return torch.sin(self.frequency * fixed)


class _Couplings(Mixing):
    """Coupling layers with fixed random weights: `matrices` of them in each layer, each twice an orthonormal one."""

    matrices: ClassVar[tuple[str, ...]]

    def __init__(self, dim: int, layers: int = 4, *, generator: torch.Generator) -> None:
        super().__init__(dim)
        self.layers = whole("layers", layers)
        for layer, shape in enumerate(coupling_shapes(dim, layers)):
            for name in self.matrices:
                self.register_buffer(f"{name}_{layer}", 2 * _orthonormal(*shape, generator))

    @property
    def weights(self) -> list[tuple[Tensor, ...]]:
        """The matrices of each layer, in the order in which layers are applied."""
        return [tuple(self.get_buffer(f"{name}_{layer}") for name in self.matrices) for layer in range(self.layers)]

    def _mix(self, z: Tensor) -> Tensor:
        return couple(z, self.weights)

    def _unmix(self, x: Tensor) -> Tensor:
        return uncouple(x, self.weights)


class Coupling(_Couplings):
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

    matrices = ("weight",)


class AffineCoupling(_Couplings):
    """Affine coupling layers: `z_2 <- z_2 exp(s(z_1)) + tanh(z_1 W)`, with `s(z_1) = tanh(z_1 U) / 2`, in turn.

    It changes volume, so no encoder that preserves volume inverts it. One dimension: the identity.

    Args:
        dim: number of latents.
        layers: number of coupling layers.
        generator: CPU generator of the weights.

    Raises:
        ArgumentError: `dim` or `layers` is not a whole number >= 1.
    """

    matrices = ("shift", "scale")


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Float[Tensor, "rows columns"]:
    """Return a random matrix with orthonormal rows or columns, uniform under rotations."""
    # Drawn and factorised on the CPU whatever the device of use: the same seed is the same world everywhere.
    normal = torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal().sign()  # without the signs of r the law of q would not be uniform
    return (q if rows >= columns else q.T).float().contiguous()
