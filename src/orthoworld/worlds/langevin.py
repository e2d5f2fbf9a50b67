"""The Langevin chain: a reversible transition that keeps the law of any source, and the functions it makes visible."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import brentq
from torch import Tensor

from orthoworld.checks import points, real, whole
from orthoworld.errors import ArgumentError
from orthoworld.worlds.cells import Bins, Cells
from orthoworld.worlds.latents import Source
from orthoworld.worlds.transitions import Correlated, Stationarity

CELLS, TAIL = 512, 1e-8


class _Tables(NamedTuple):
    """What a step reads, on one device."""

    edges: Float[Tensor, " edges"]
    cumulative: Float[Tensor, " entries"]  # row r, of one rho and one cell, runs from r to r + 1 over the bins
    row: Int[Tensor, " latents"]  # first row of each latent, or one for all
    bins: Bins


class Langevin(Correlated):
    """A step of the overdamped Langevin diffusion: stationary and reversible for every source.

    The diffusion `dz = (log p)'(z) dt + sqrt 2 dW` has the generator `L f = (p f')'/p`, with the source's law `p` as
    its reversible law and with constant diffusion, the setting of the converse theorem (Pavliotis, *Stochastic
    Processes and Applications*, 2014, chapter 4). It is discretised to a chain on cells of the line, see
    `orthoworld.worlds.cells.Cells`. A step draws the next cell from `exp(tQ)`, with `Q` the generator of that chain,
    and the position in the cell from `p`. Cells are entered with their exact mass, so `z'` has the law `p` up to
    rounding however coarse the cells are; what they approximate is the diffusion. The time `t` is the one after which
    `z` and `z'` correlate at `rho`. For the Gaussian this is the Ornstein-Uhlenbeck step.

    **What an encoder finds.** Let `f_1, f_2, ...` be the eigenfunctions of `Q` and `mu_k = exp(-l_k t)` the eigenvalues
    of the step, falling in `k`. When all latents have one `rho`, the whitened encoder of least alignment loss is `f_1`
    of each latent, up to rotation: any other function has an eigenvalue of at most `max(mu_2, mu_1^2)`, that of an
    `f_2` or of a product of two `f_1`, and both lie below `mu_1`. With several values of `rho`, these of slow latents
    can overtake `f_1` of a fast one. `f_1` is linear for the Gaussian only; `linear_recovery` says how nearly for
    another source.

    **Heavy tails.** For `GeneralizedNormal` with `alpha <= 1` and for `StudentT` the drift is too weak for the
    diffusion to have an `f_1`: its spectrum is continuous from the bottom. The chain, whose tails end in cells of
    probability `tail`, has one; it lives in the tails, and `linear_recovery` falls to 0 with `tail`. A sample sees it
    only as far as it sees the tails. For small `alpha`, `rho` is the correlation of rare, huge values, and most pairs
    are nearly independent.

    Args:
        rho: correlation of consecutive states, in (0, 1); one number, or one for each latent.
        cells: number of cells, even.
        tail: probability of each of the two outermost cells, where the support is unbounded; in (0, 0.1).

    Raises:
        ArgumentError: `rho`, `cells` or `tail` lies outside its domain. At the first use with a source: `rho` is closer
            to 1 than its cells can keep, which is .9999 for most sources, .996 for `alpha = 1/8`, .998 for `df = 3`.

    Example:
        >>> from orthoworld.worlds.latents import Gaussian, Uniform
        >>> chain = Langevin(rho=0.95)
        >>> z, z_next = chain.pair(5, Uniform(2), generator=torch.Generator().manual_seed(0))
        >>> z_next.shape
        torch.Size([5, 2])
        >>> round(chain.linear_recovery(Gaussian(2)), 6), round(chain.linear_recovery(Uniform(2)), 3)
        (1.0, 0.986)
    """

    lowest: ClassVar[float] = 0
    linear: ClassVar[bool] = False

    def __init__(self, rho: float | Sequence[float], *, cells: int = CELLS, tail: float = TAIL) -> None:
        super().__init__(rho)
        self.cells = whole("cells", cells, least=4)
        if cells % 2:
            raise ArgumentError(f"cells={cells}: expected an even number, half on each side of 0")
        self.tail = real("tail", tail, 0, 0.1)
        self._forget()

    def step(self, z: Tensor, source: Source, *, generator: torch.Generator) -> Tensor:
        """Return the next states of `z`, shape `(..., dim)`.

        Raises:
            ArgumentError: `rho` has another number of latents, or cannot be reached with this source.
            ShapeError: the last size of `z` is not the source's number of latents.
        """
        tables = self._tables_for(points("z", z, source.dim), source)
        row = torch.searchsorted(tables.edges, z.double().contiguous()) + tables.row
        draw = torch.rand(z.shape, dtype=torch.float64, generator=generator, device=z.device)
        count = len(tables.bins.lower)
        entry = torch.searchsorted(tables.cumulative, row + draw, right=True) - row * count
        bins = entry.clamp(0, count - 1)  # row + draw is rounded, so it can reach the next row
        return tables.bins.draw(bins, source, generator=generator).to(z.dtype)

    def stationarity(self, source: Source) -> Stationarity:
        return Stationarity(
            True, f"each cell is entered with its mass under {source!r}, and left for a draw of its law"
        )

    def kernel(self, source: Source) -> Float[Tensor, "rhos cells cells"]:
        """Return the transition probabilities between cells (float64), one matrix for each entry of `rho`.

        Raises:
            ArgumentError: a `rho` cannot be reached with this source.
        """
        return self._kernels(source, self._rhos)

    def spectrum(self, source: Source, k: int) -> Float[Tensor, "rhos k"]:
        """Return `mu_1 ... mu_k`, the largest eigenvalues of a step below 1, a row for each entry of `rho` (float64).

        For the Gaussian `mu_k = rho^k`, for the uniform law `mu_k = mu_1^(k^2)`, both up to the width of the cells.

        Raises:
            ArgumentError: `k` is not a whole number in `[1, cells)`, or a `rho` cannot be reached with this source.
        """
        cells = self.cells_of(source)
        times = torch.tensor([self._time(cells, rho, source) for rho in self._rhos], dtype=torch.float64)
        return torch.exp(-times.unsqueeze(1) * cells.decay[1 : self._order(k) + 1])

    def eigenfunction(self, z: Tensor, source: Source, k: int = 1) -> Tensor:
        """Return `f_k` at `z`, of mean 0 and variance 1 and positive for large `z`; it is constant on each cell.

        Args:
            z: latents of any shape.
            source: their law.
            k: the function's number; it has `k` changes of sign.

        Raises:
            ArgumentError: `k` is not a whole number in `[1, cells)`.
        """
        cells = self.cells_of(source)
        values = cells.modes[:, self._order(k)].to(z)
        return values[torch.searchsorted(cells.edges.to(z.device), z.double().contiguous())]

    def linear_recovery(self, source: Source) -> float:
        """Return `corr(f_1(z), z)^2`: the R2 of `z` from the whitened encoder of least alignment loss.

        1 for the Gaussian, `96/pi^4 = .98553` for the uniform law. It does not depend on `rho`. `z` enters by its mean
        over the cell, so what the cells round off is not counted as a loss.
        """
        loadings = self.cells_of(source).loadings.square()
        return float(loadings[1] / loadings.sum())

    def cells_of(self, source: Source) -> Cells:
        """Return the chain for this source, built when it is first needed."""
        key = repr(source)
        if key not in self._cells:
            self._cells[key] = Cells.of(source, self.cells, self.tail)
        return self._cells[key]

    @property
    def _rhos(self) -> list[float]:
        return [self.rho] if isinstance(self.rho, float) else list(self.rho)

    def _order(self, k: int) -> int:
        if whole("k", k) >= self.cells:
            raise ArgumentError(f"k={k}: expected a whole number below the number of cells, {self.cells}")
        return k

    def _kernels(self, source: Source, rhos: list[float]) -> Float[Tensor, "rhos cells cells"]:
        cells = self.cells_of(source)
        return torch.stack([cells.kernel(self._time(cells, rho, source)) for rho in rhos])

    def _time(self, cells: Cells, rho: float, source: Source) -> float:
        """Return the time at which the correlation has decayed to `rho`."""
        reach = cells.correlation(0)
        if not rho < reach:
            raise ArgumentError(
                f"rho={rho}: expected less than {reach:.6g}, the most that {self.cells} cells with tail={self.tail:g} "
                f"keep for {source!r}; more cells or a smaller tail keep more"
            )
        low = high = math.log(-math.log(rho) / float(cells.decay[1]))
        while cells.correlation(math.exp(low)) < rho:
            low -= 1
        while cells.correlation(math.exp(high)) > rho:
            high += 1
        return math.exp(brentq(lambda log_t: cells.correlation(math.exp(log_t)) - rho, low, high, xtol=1e-13))

    def _tables_for(self, z: Tensor, source: Source) -> _Tables:
        key = (repr(source), z.device)
        if key not in self._tables:
            self.correlation(source.dim)  # refuses another number of latents
            cells, bins = self.cells_of(source), Bins.of(self.cells_of(source), source)
            distinct = list(dict.fromkeys(self._rhos))
            within = self._kernels(source, distinct)[..., bins.cell] * bins.share
            cumulative = within.flatten(0, 1).cumsum(1)
            cumulative /= cumulative[:, -1:].clone()
            cumulative += torch.arange(len(cumulative)).unsqueeze(1)
            row = torch.tensor([distinct.index(rho) for rho in self._rhos]) * self.cells
            edges, cumulative, row = (part.to(z.device) for part in (cells.edges, cumulative.flatten(), row))
            self._tables[key] = _Tables(edges, cumulative, row, bins.to(z.device))
        return self._tables[key]

    def _forget(self) -> None:
        self._cells: dict[str, Cells] = {}
        self._tables: dict[tuple[str, torch.device], _Tables] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt when needed."""
        return {"rho": self.rho, "cells": self.cells, "tail": self.tail}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        extra = {"cells": (self.cells, CELLS), "tail": (self.tail, TAIL)}
        changed = "".join(f", {name}={value}" for name, (value, default) in extra.items() if value != default)
        return f"Langevin(rho={self.rho}{changed})"
