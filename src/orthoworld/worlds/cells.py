"""A law cut into cells: the reversible nearest-neighbour chain between them, and exact draws inside them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from orthoworld.errors import ArgumentError
from orthoworld.worlds.latents import Source


@dataclass(frozen=True)
class Cells:
    """The Langevin generator `L f = (p f')'/p` discretised by finite volumes on cells of the line (float64, CPU).

    Cell `i` has its mass `p_i` and its conditional mean `m_i`, both exact. Neighbours exchange at the rates
    `Q_ij = (p_e / |m_j - m_i|) / p_i`, with `p_e` the density at the edge between them: the two-point flux of
    Eymard, Gallouet and Herbin, *Finite volume methods*, 2000. So `p_i Q_ij = p_j Q_ji`, and the chain is reversible
    with the cells' masses as its law. With the means as the points of the cells, `(Q m)_i = E[L z | cell i]` exactly;
    so for the Gaussian, where `L z = -z`, the means are an eigenvector with eigenvalue -1 on any cells.

    The chain is its own mirror image, so eigenfunctions are odd and even in turn, and each kind is found on the half
    line; odd ones vanish at 0. There the inverse of the generator is a product `A^T A` of masses and resistances in
    closed form. Its largest eigenvalues are those of the slow modes, which are therefore found to full accuracy even
    where the rates range over more digits than a float has, as they do near a cusp.

    Attributes:
        edges: inner edges, ascending; 0 is one.
        mass: probability of each cell.
        mean: mean of the law on each cell.
        decay: `l_0 = 0 < l_1 < ...`, the eigenvalues of `-Q`.
        modes: column `k` is the eigenfunction `f_k`, of norm 1 under `mass`, positive on the last cell.
        loadings: `E[f_k(z) z]`.
    """

    edges: Float[Tensor, " edges"]
    mass: Float[Tensor, " cells"]
    mean: Float[Tensor, " cells"]
    decay: Float[Tensor, " cells"]
    modes: Float[Tensor, "cells cells"]
    loadings: Float[Tensor, " cells"]

    @classmethod
    def of(cls, source: Source, count: int, tail: float) -> "Cells":
        """Cut the law of `source` into `count` cells.

        Raises:
            ArgumentError: the law is too heavy-tailed for float64, so that a cell has no mass or no mean.
        """
        refusal = ArgumentError(f"{source!r}: expected a law that float64 can cut into {count} cells of positive mass")
        if not source.log_density(torch.zeros(1, dtype=torch.float64)).isfinite():
            raise refusal
        edges = _half_edges(source, count // 2, tail)
        mass = 2 * _drops(source.survival(edges))
        mean = 2 * _drops(source.upper_mean(edges)) / mass
        steps = torch.diff(mean, prepend=torch.zeros(1, dtype=torch.float64))
        if not (mass > 0).all() or not (torch.isfinite(mean) & (steps > 0)).all():
            raise refusal

        # The law of |z| on the half line, with the density 2p. Entry e of `resistance` lies below cell e; at 0 it leads
        # to the point 0 itself, where odd functions vanish and which even ones do not cross.
        resistance = steps / (2 * source.log_density(edges).exp())
        above = torch.ones(count // 2, count // 2, dtype=torch.float64).triu()  # [e, i]: cell i lies above edge e
        root = mass.sqrt()
        odd = resistance.sqrt().unsqueeze(1) * above * root
        # Even: minus the mass beyond the edge, on either side; so it has mean 0.
        upper = 2 * source.survival(edges).unsqueeze(1)
        even = odd - resistance.sqrt().unsqueeze(1) * upper * root
        even[0] = 0
        constant = (1 + even.square().sum()) * torch.outer(root, root)
        slowness, vectors = torch.linalg.eigh(torch.stack([even.T @ even + constant, odd.T @ odd]))
        slowness, vectors = slowness.flip(1), vectors.flip(2)  # slowest first, the constant at the head of the even
        vectors = torch.where(vectors[:, -1:] < 0, -vectors, vectors)

        functions = vectors / root.unsqueeze(1)
        mirrored = torch.cat([functions.flip(1) * torch.tensor([[[1.0]], [[-1.0]]]), functions], dim=1)
        decay = 1 / slowness.clamp(min=torch.finfo(torch.float64).tiny)
        decay[0, 0] = 0
        loadings = torch.stack([torch.zeros_like(mean), (mass * mean) @ functions[1]])
        return cls(
            edges=torch.cat([-edges[1:].flip(0), edges]),
            mass=torch.cat([mass.flip(0), mass]) / 2,
            mean=torch.cat([-mean.flip(0), mean]),
            decay=decay.T.flatten(),
            modes=mirrored.permute(1, 2, 0).flatten(1),
            loadings=loadings.T.flatten(),
        )

    def correlation(self, time: float) -> float:
        """Return the correlation of `z` and `z'` over a time: `sum_ij p_i P_ij m_i m_j`, with `P = exp(time Q)`."""
        return float((self.loadings.square() * torch.exp(-time * self.decay)).sum())

    def kernel(self, time: float) -> Float[Tensor, "cells cells"]:
        """Return `P = exp(time Q)`; row `i` holds the probabilities of the cells after cell `i`."""
        weighted = self.mass.unsqueeze(1) * self.modes
        joint = weighted * torch.exp(-time * self.decay) @ weighted.T
        joint = ((joint + joint.T) / 2).clamp(min=0)
        # The sum over modes is rounded: the diagonal makes up for what a row lacks, and the joint law stays symmetric.
        joint.diagonal().add_(self.mass - joint.sum(dim=1)).clamp_(min=0)
        return joint / self.mass.unsqueeze(1)


@dataclass(frozen=True)
class Bins:
    """Parts of the cells on which the density falls by little, so that uniform draws are soon accepted.

    Attributes:
        cell: the cell of each bin.
        share: its part of that cell's mass.
        lower: its lower edge.
        width: its width; 0 stands for an unbounded bin.
        highest: the maximum of `log p` on it.
        beyond: the mass of an unbounded bin, on either side.
    """

    cell: Int[Tensor, " bins"]
    share: Float[Tensor, " bins"]
    lower: Float[Tensor, " bins"]
    width: Float[Tensor, " bins"]
    highest: Float[Tensor, " bins"]
    beyond: float

    @classmethod
    def of(cls, cells: Cells, source: Source) -> "Bins":
        """Split the cells of `source` until `log p` falls by at most 1/2 on each bin."""
        inner = cells.edges[len(cells.edges) // 2 :]
        end = source.upper_quantile(torch.zeros(1))
        bounded = bool(torch.isfinite(end))
        edges = torch.cat([inner, end]) if bounded else inner
        while (steep := -source.log_density(edges).diff() > 0.5).any():
            edges = torch.cat([edges, edges[:-1][steep] / 2 + edges[1:][steep] / 2]).sort().values

        lower = edges[:-1] if bounded else edges
        width = edges.diff() if bounded else torch.cat([edges.diff(), torch.zeros(1, dtype=torch.float64)])
        highest = source.log_density(lower)
        highest[width == 0] = -torch.inf  # whatever stands for a draw from an unbounded bin is accepted
        share = _drops(source.survival(lower))
        beyond = 0.0 if bounded else float(share[-1])
        cell = torch.searchsorted(inner, lower, right=True) - 1
        share = share / torch.zeros_like(inner).index_add_(0, cell, share)[cell]
        return cls(
            cell=torch.cat([len(inner) - 1 - cell.flip(0), len(inner) + cell]),
            share=torch.cat([share.flip(0), share]),
            lower=torch.cat([-(lower + width).flip(0), lower]),
            width=torch.cat([width.flip(0), width]),
            highest=torch.cat([highest.flip(0), highest]),
            beyond=beyond,
        )

    def to(self, device: torch.device) -> "Bins":
        """Return the bins on a device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if name != "beyond"})

    def draw(
        self, index: Int[Tensor, "*shape"], source: Source, *, generator: torch.Generator
    ) -> Float[Tensor, "*shape"]:
        """Draw from the law of `source` inside the bins numbered by `index`, on its device (float64).

        Exact, by rejection: a uniform draw of the bin is accepted with probability `p(z) / max p`.
        """
        bins = index.flatten()
        z = torch.empty(bins.shape, dtype=torch.float64, device=index.device)
        waiting = torch.arange(len(bins), device=index.device)
        while len(waiting):
            here = bins[waiting]
            position, chance = torch.rand(
                (2, len(waiting)), dtype=torch.float64, generator=generator, device=index.device
            )
            proposed = self.lower[here] + self.width[here] * position
            z[waiting] = proposed
            waiting = waiting[chance.log() > source.log_density(proposed) - self.highest[here]]

        unbounded = self.width[bins] == 0
        if unbounded.any():
            uniform = torch.rand(int(unbounded.sum()), dtype=torch.float64, generator=generator, device=index.device)
            size = source.upper_quantile(self.beyond * (1 - uniform)).to(index.device)
            z[unbounded] = size * self.lower[bins[unbounded]].sign()
        return z.view(index.shape)


def _half_edges(source: Source, count: int, tail: float) -> Float[Tensor, " count"]:
    """Return the lower edges of `count` cells of the upper half line, the first of them 0.

    Half of the cells lie with the density `p^(1/3)`, which loses the least variance inside the cells (Panter and Dite,
    1951), half are equally wide, so that tails and edges, where eigenfunctions are steepest, are resolved too.
    """
    end = source.upper_quantile(torch.zeros(1))
    bounded = bool(torch.isfinite(end))
    grid = source.upper_quantile(torch.linspace(np.log(0.5), np.log(tail), 16 * count, dtype=torch.float64).exp())
    grid[0] = 0
    if bounded:
        grid[-1:] = end
    optimal = torch.cumulative_trapezoid((source.log_density(grid) / 3).exp(), grid)
    optimal = torch.cat([torch.zeros(1, dtype=torch.float64), optimal])
    place = optimal / optimal[-1] + grid / grid[-1]
    return torch.as_tensor(np.interp(np.linspace(0, 2, count + bounded)[:count], place, grid))


def _drops(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return by how much a falling function drops between its arguments, and from the last one to infinity."""
    return -values.diff(append=torch.zeros(1, dtype=torch.float64))
