"""The linear optimum in closed form: what the best linear encoder of the same observations reaches.

Alignment of a whitened linear map is minimised by the leading eigenvectors of the whitened, symmetrised time-lagged
covariance: time-lagged independent component analysis (TICA; Molgedey and Schuster 1994, Perez-Hernandez et al. 2013),
which is canonical correlation analysis of the two views of a stationary reversible process.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.identifiability.moments import as_rows, finite_rows, whitening_map


@dataclass(frozen=True)
class LinearOracle:
    """The best whitened linear encoder.

    Attributes:
        correlations: pair correlation of each of its components, descending, `(dim,)`.
        loss: its alignment, `2 sum (1 - correlation)`.
        mean, matrix: the encoder is `x -> (x - mean) matrix`, `(obs_dim,)` and `(obs_dim, dim)`, in float64.
    """

    correlations: Float[Tensor, " dim"]
    loss: float
    mean: Float[Tensor, " obs_dim"]
    matrix: Float[Tensor, "obs_dim dim"]

    def transform(self, x: Tensor) -> Float[Tensor, "n dim"]:
        """Return its embeddings of observations `(n, obs_dim)`, in float64."""
        return (as_rows("x", x) - self.mean) @ self.matrix


def linear_oracle(x: Tensor, x_next: Tensor, dim: int) -> LinearOracle:
    """Return the linear encoder to `dim` dimensions with the least whitened alignment on the given pairs.

    No whitened linear map of these observations has a smaller alignment on them; a trained nonlinear one may.

    Args:
        x, x_next: observations `(n, obs_dim)` of both states of each pair.
        dim: number of components, at most the rank of the observations.

    Raises:
        ShapeError: the arrays differ in shape.
        ArgumentError: `dim` exceeds the rank of the observations, or they have non-finite rows.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> z = torch.randn(20_000, 2, generator=g)
        >>> z_next = 0.9 * z + (1 - 0.9**2) ** 0.5 * torch.randn(20_000, 2, generator=g)
        >>> linear_oracle(z, z_next, 2).correlations.round(decimals=1)
        tensor([0.9000, 0.9000], dtype=torch.float64)
    """
    (x, x_next), _ = finite_rows({"x": x, "x_next": x_next})
    if x.shape != x_next.shape:
        raise ShapeError(f"x has shape {tuple(x.shape)} and x_next {tuple(x_next.shape)}: expected the same")
    both = torch.cat([x, x_next])
    mean = both.mean(dim=0)
    first, second = x - mean, x_next - mean
    instant = (first.T @ first + second.T @ second) / len(both)
    lagged = (first.T @ second + second.T @ first) / len(both)
    white = whitening_map(instant)
    rank = int(torch.linalg.matrix_rank(white @ instant @ white.T))
    if whole("dim", dim) > rank:
        raise ArgumentError(f"dim={dim}: expected at most {rank}, the rank of the observations")
    values, vectors = torch.linalg.eigh(white @ lagged @ white.T)
    # Directions outside the range have eigenvalue 0; among `rank` negative ones they must not be taken for better.
    inside = ((white @ instant @ white.T @ vectors) * vectors).sum(dim=0) > 0.5
    order = torch.argsort(torch.where(inside, values, -torch.inf), descending=True)[:dim]
    correlations = values[order]
    return LinearOracle(correlations, float(2 * (1 - correlations).sum()), mean, white.T @ vectors[:, order])
