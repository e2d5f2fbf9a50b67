"""Transitions: how the next latent state follows from the last, and which two states form a positive pair."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import real
from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Source


class Stationarity(NamedTuple):
    """Whether both views of a pair have the source's law, and why."""

    holds: bool
    reason: str


class Transition(ABC):
    """A Markov chain on the latents whose components move independently."""

    linear: ClassVar[bool] = True
    """Whether `E[z'|z]` is proportional to `z` for every source, so that two steps correlate at the product."""

    @abstractmethod
    def step(self, z: Tensor, source: Source, *, generator: torch.Generator) -> Tensor:
        """Return the next states of `z`, shape `(..., dim)`."""

    @abstractmethod
    def correlation(self, dim: int) -> Float[Tensor, " dim"]:
        """Return the correlation of the two states of a positive pair, per latent (float64).

        Raises:
            ArgumentError: the transition was built for another number of latents.
        """

    @abstractmethod
    def stationarity(self, source: Source) -> Stationarity:
        """Say whether the states keep the law of `source`."""

    def pair(self, n: int, source: Source, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return `n` positive pairs `(z, z')`, each of shape `(n, dim)`."""
        z = source.sample(n, generator=generator)
        return z, self.step(z, source, generator=generator)


class Correlated(Transition):
    """A transition whose correlation is declared: one number in `(lowest, 1)` for all latents, or one for each."""

    lowest: ClassVar[float] = -1

    def __init__(self, rho: float | Sequence[float]) -> None:
        self.rho: float | tuple[float, ...]
        if not isinstance(rho, Sequence):
            self.rho = real("rho", rho, self.lowest, 1)
        elif rho:
            self.rho = tuple(real("rho", value, self.lowest, 1) for value in rho)
        else:
            raise ArgumentError(f"rho={rho!r}: expected a number in ({self.lowest:g}, 1), or one for each latent")

    def correlation(self, dim: int) -> Float[Tensor, " dim"]:
        rho = torch.tensor(self.rho, dtype=torch.float64)
        if rho.ndim == 1 and len(rho) != dim:
            raise ArgumentError(f"rho has {len(rho)} entries: expected one number, or one for each of {dim} latents")
        return rho.expand(dim).clone()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rho={self.rho})"


class _Autoregressive(Correlated):
    """`z' = rho z + noise`."""

    def _coefficients(self, z: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Return `rho` and the noise's standard deviation, as numbers or in the type and on the device of `z`."""
        if isinstance(self.rho, float):
            return self.rho, math.sqrt(1 - self.rho**2)
        rho = self.correlation(z.shape[-1])
        return rho.to(z), (1 - rho**2).sqrt().to(z)


class OU(_Autoregressive):
    """The Ornstein-Uhlenbeck step `z' = rho z + sqrt(1 - rho^2) eta`, with `eta` an independent draw of the source.

    The pair correlation is `rho` for every source. The chain is stationary for the Gaussian source only: for another
    one `z'` is a sum of two rescaled draws of the source, which has a different law.

    Args:
        rho: correlation of consecutive states, in (-1, 1); one number, or one for each latent.

    Raises:
        ArgumentError: a value lies outside (-1, 1).
    """

    def step(self, z: Tensor, source: Source, *, generator: torch.Generator) -> Tensor:
        rho, noise = self._coefficients(z)
        return rho * z + noise * source.sample(*z.shape[:-1], generator=generator)

    def stationarity(self, source: Source) -> Stationarity:
        if source.is_gaussian:
            return Stationarity(True, "an Ornstein-Uhlenbeck step keeps the standard normal law")
        if self.correlation(source.dim).abs().max() == 0:
            return Stationarity(True, "with rho = 0 the next state is an independent draw of the source")
        return Stationarity(False, f"rho z + sqrt(1 - rho^2) eta does not keep the law of {source!r}")


class LaplaceAR(_Autoregressive):
    """The exact stationary first-order autoregression with Laplace marginal.

    `z' = rho z + b e`, where `b = 0` with probability `rho^2`, else 1, and `e` is Laplace of unit variance. With the
    characteristic function `phi(s) = 1/(1 + s^2/2)` of the source, the noise has
    `phi(s)/phi(rho s) = rho^2 + (1 - rho^2) phi(s)`, which is that mixture. The noise is additive and independent of
    `z`.

    Args:
        rho: correlation of consecutive states, in (-1, 1); one number, or one for each latent.

    Raises:
        ArgumentError: a value lies outside (-1, 1).
    """

    def step(self, z: Tensor, source: Source, *, generator: torch.Generator) -> Tensor:
        rho = self.correlation(z.shape[-1]).to(z)
        positive, negative = torch.empty((2, *z.shape), device=z.device).exponential_(generator=generator)
        moves = torch.rand(z.shape, generator=generator, device=z.device) >= rho**2
        return rho * z + moves * (positive - negative).to(z) / math.sqrt(2)

    def stationarity(self, source: Source) -> Stationarity:
        if source.is_laplace:
            return Stationarity(True, "the noise is the one that keeps the Laplace law")
        return Stationarity(False, f"the chain tends to the Laplace law and starts in {source!r}")


class SharedParent(Transition):
    """Two children of one parent: both views are independent steps from the same state.

    This is how the published synthetic experiments draw pairs. The two views correlate at `rho^2`, not at `rho`.
    Consecutive states of a trajectory still follow the step itself.

    Args:
        inner: the step from the parent to each child.

    Raises:
        ArgumentError: `inner` is itself a shared parent, or its `E[z'|z]` is not linear, so that the correlation of the
            views depends on the source.

    Example:
        >>> SharedParent(OU(0.95)).correlation(1)
        tensor([0.9025], dtype=torch.float64)
    """

    def __init__(self, inner: Transition) -> None:
        if isinstance(inner, SharedParent):
            raise ArgumentError(f"SharedParent({inner!r}): expected a step such as OU, not another shared parent")
        if not inner.linear:
            raise ArgumentError(
                f"SharedParent({inner!r}): expected a step with E[z'|z] = rho z; the views of this one correlate at "
                "a value that depends on the source, so take its direct pairs"
            )
        self.inner = inner

    def step(self, z: Tensor, source: Source, *, generator: torch.Generator) -> Tensor:
        return self.inner.step(z, source, generator=generator)

    def pair(self, n: int, source: Source, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        parent = source.sample(n, generator=generator)
        first = self.step(parent, source, generator=generator)
        return first, self.step(parent, source, generator=generator)

    def correlation(self, dim: int) -> Float[Tensor, " dim"]:
        return self.inner.correlation(dim) ** 2

    def stationarity(self, source: Source) -> Stationarity:
        return self.inner.stationarity(source)

    def __repr__(self) -> str:
        return f"SharedParent({self.inner!r})"
