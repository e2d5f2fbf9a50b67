"""The world: latents that move by a transition and are seen through a mixing."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Source
from orthoworld.worlds.mixings import Mixing
from orthoworld.worlds.transitions import Stationarity, Transition


@dataclass(frozen=True)
class Pairs:
    """Positive pairs: latents `(n, dim)`, observations `(n, obs_dim)`, and the correlation `r` of `z` and `z_next`.

    `r` is one number when all latents have the same correlation, else one for each.
    """

    z: Float[Tensor, "n dim"]
    z_next: Float[Tensor, "n dim"]
    x: Float[Tensor, "n obs_dim"]
    x_next: Float[Tensor, "n obs_dim"]
    r: float | tuple[float, ...]


@dataclass(frozen=True)
class Trajectories:
    """Episodes of consecutive states, as a recording has them: latents and observations `(episodes, length, ...)`."""

    z: Float[Tensor, "episodes length dim"]
    x: Float[Tensor, "episodes length obs_dim"]


class World:
    """`z ~ p`, `z' ~ p(z'|z)`, `x = g(z)`.

    Args:
        source: the law of the latents.
        transition: how the next state follows, and which states form a pair.
        mixing: the map from latents to observations.

    Raises:
        ArgumentError: the parts disagree about the number of latents.

    Example:
        >>> from orthoworld.worlds.latents import Gaussian
        >>> from orthoworld.worlds.mixings import Spiral
        >>> from orthoworld.worlds.transitions import OU
        >>> world = World(Gaussian(2), OU(rho=0.95), Spiral())
        >>> pairs = world.sample_pairs(100, generator=torch.Generator().manual_seed(0))
        >>> pairs.x.shape, pairs.r, world.stationarity.holds
        (torch.Size([100, 2]), 0.95, True)
    """

    def __init__(self, source: Source, transition: Transition, mixing: Mixing) -> None:
        if mixing.dim != source.dim:
            raise ArgumentError(f"mixing takes {mixing.dim} latents and the source has {source.dim}: expected the same")
        self.source = source
        self.transition = transition
        self.mixing = mixing
        self._correlation = transition.correlation(source.dim)

    @property
    def dim(self) -> int:
        """Number of latents."""
        return self.source.dim

    @property
    def r(self) -> float | tuple[float, ...]:
        """Correlation of the two latent states of a pair: one number, or one for each latent where they differ."""
        values = self._correlation.tolist()
        return values[0] if len(set(values)) == 1 else tuple(values)

    @property
    def stationarity(self) -> Stationarity:
        """Whether both views of a pair have the source's law, and why."""
        return self.transition.stationarity(self.source)

    def sample_pairs(self, n: int, *, generator: torch.Generator) -> Pairs:
        """Draw `n` independent positive pairs on the generator's device.

        Raises:
            ArgumentError: `n` is not a whole number >= 1.
        """
        z, z_next = self.transition.pair(whole("n", n), self.source, generator=generator)
        with torch.no_grad():
            return Pairs(z, z_next, self.mixing(z), self.mixing(z_next), self.r)

    def sample_trajectories(self, episodes: int, length: int, *, generator: torch.Generator) -> Trajectories:
        """Draw `episodes` independent chains of `length` consecutive states, each begun from the source's law.

        Raises:
            ArgumentError: `episodes` or `length` is not a whole number >= 1.
        """
        z = self.source.sample(whole("episodes", episodes), generator=generator)
        states = [z]
        for _ in range(whole("length", length) - 1):
            states.append(self.transition.step(states[-1], self.source, generator=generator))
        z = torch.stack(states, dim=1)
        with torch.no_grad():
            return Trajectories(z, self.mixing(z))

    def __repr__(self) -> str:
        return f"World({self.source!r}, {self.transition!r}, {type(self.mixing).__name__}({self.mixing.dim}))"
