"""Energy per Hermite degree: where in the spectrum of the transition an encoder lies.

In a Gaussian world the products `H_alpha(z) = prod_i He_{alpha_i}(z_i) / sqrt(alpha_i!)` of normalised probabilists'
Hermite polynomials are orthonormal, and the transition multiplies each by `prod_i rho_i^{alpha_i}`. An encoder's energy
in `H_alpha` is `sum_i E[h_i H_alpha(z)]^2`. A perfect one has all of it in degree one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError
from orthoworld.identifiability.moments import (
    GroupedMoments,
    Moments,
    estimates_and_intervals,
    finite_rows,
    inverse,
    trace,
)

FEATURES, H = 0, 1
"""Blocks of the moments."""

MOST_FEATURES = 500
"""More products than this are not fitted."""

MultiIndex = tuple[int, ...]


@dataclass(frozen=True)
class Spectrum:
    """Shares of the variance of an embedding.

    Attributes:
        modes: share of `tr Cov(h)` in each product of Hermite polynomials, by its degrees in each latent.
        degrees: share in total degree 1, 2, ...
        rest: what no product fitted explains.
        ci: 95 % bootstrap intervals: `degree_1`, ..., and `rest`.
        modes_ci: the same for each product.
    """

    modes: dict[MultiIndex, float]
    degrees: list[float]
    rest: float
    ci: dict[str, tuple[float, float]] = field(repr=False)
    modes_ci: dict[MultiIndex, tuple[float, float]] = field(repr=False)

    def __str__(self) -> str:
        lines = [f"  degree {degree:<4}{share:>10.5f}" for degree, share in enumerate(self.degrees, start=1)]
        return "\n".join(["share of the variance", *lines, f"  beyond     {self.rest:>10.5f}"])


def hermite_spectrum(
    z: Tensor | np.ndarray,
    h: Tensor | np.ndarray,
    *,
    degree: int = 8,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Spectrum:
    """Return the share of an embedding's variance in each product of Hermite polynomials of standard normal latents.

    The coefficients are those of the least-squares regression of `h` on the products, so an embedding that is a
    polynomial of this degree is resolved exactly whatever the sample; what lies beyond adds noise of about its share
    over the number of rows to each.

    Args:
        z: latents `(n, dim)`, standard normal and independent.
        h: embeddings `(n, out_dim)`.
        degree: highest total degree, >= 1.
        resamples: bootstrap draws for the intervals; 0 for none.
        generator: source of the draws; without one, a generator of seed 0.

    Raises:
        TypeError: an array is not real.
        ShapeError: the arrays differ in rows.
        ArgumentError: rows are not finite, `degree` is no whole number >= 1, there are more than 500 products, or not
            more rows than those.

    Example:
        >>> z = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
        >>> h = torch.stack([z[:, 0], (z[:, 1] ** 2 - 1) / 2**0.5], dim=1)
        >>> result = hermite_spectrum(z, h, degree=3)
        >>> round(result.modes[1, 0], 2), round(result.modes[0, 2], 2), round(result.rest, 6)
        (0.5, 0.5, 0.0)
    """
    (z, h), _ = finite_rows({"z": z, "h": h})
    indices = multi_indices(z.shape[1], whole("degree", degree))
    if len(z) <= len(indices) + 1:
        raise ArgumentError(f"{len(z)} rows for {len(indices)} Hermite products: expected more rows")
    grouped = GroupedMoments(hermite_products(z, indices), h)
    values, ci = estimates_and_intervals(
        grouped,
        lambda weights: _shares(grouped.moments(weights), indices, degree),
        resamples=resamples,
        generator=generator,
    )
    names = {index: _name(index) for index in indices}
    return Spectrum(
        modes={index: float(values[name]) for index, name in names.items()},
        degrees=[float(values[f"degree_{d}"]) for d in range(1, degree + 1)],
        rest=float(values["rest"]),
        ci={name: interval for name, interval in ci.items() if name not in names.values()},
        modes_ci={index: ci[name] for index, name in names.items() if name in ci},
    )


def multi_indices(dim: int, degree: int) -> list[MultiIndex]:
    """Return the degrees in each of `dim` latents of all products of total degree 1 to `degree`, by total degree.

    Raises:
        ArgumentError: there are more than 500.
    """
    count = math.comb(dim + degree, degree) - 1
    if count > MOST_FEATURES:
        raise ArgumentError(f"degree={degree} in {dim} latents has {count} products: expected at most {MOST_FEATURES}")
    found: list[MultiIndex] = [()]
    for _ in range(dim):
        found = [(*index, d) for index in found for d in range(degree - sum(index), -1, -1)]
    return sorted((index for index in found if sum(index)), key=sum)


def hermite_products(z: Float[Tensor, "n dim"], indices: Sequence[MultiIndex]) -> Float[Tensor, "n products"]:
    """Return the orthonormal products `H_alpha(z)`."""
    highest = max(max(index) for index in indices)
    # He_{k+1} = z He_k - k He_{k-1}, divided by the square roots of the factorials.
    values = [torch.ones_like(z), z]
    for k in range(1, highest):
        values.append((z * values[k] - math.sqrt(k) * values[k - 1]) / math.sqrt(k + 1))
    table = torch.stack(values)
    columns = [
        math.prod((table[d, :, i] for i, d in enumerate(index)), start=torch.ones_like(z[:, 0])) for index in indices
    ]
    return torch.stack(columns, dim=1)


def _shares(moments: Moments, indices: Sequence[MultiIndex], degree: int) -> dict[str, Tensor]:
    """Return the share of each product, of each degree, and of the rest, for each replicate."""
    coefficients = inverse(moments.covs(FEATURES, FEATURES)) @ moments.covs(FEATURES, H)
    energy = coefficients.square().sum(dim=-1)
    residual = (trace(moments.covs(H, H)) - (coefficients * moments.covs(FEATURES, H)).sum(dim=(-2, -1))).clamp(min=0)
    total = energy.sum(dim=-1) + residual  # of the fitted map, whose products are orthonormal beyond the sample
    share = energy / total[..., None]
    shares = {_name(index): share[..., column] for column, index in enumerate(indices)}
    for d in range(1, degree + 1):
        of_degree = [column for column, index in enumerate(indices) if sum(index) == d]
        shares[f"degree_{d}"] = share[..., of_degree].sum(dim=-1)
    shares["rest"] = residual / total
    return shares


def _name(index: MultiIndex) -> str:
    return ",".join(map(str, index))


def mode_name(index: MultiIndex) -> str:
    """Return a product's name, such as `He1(z0)He2(z1)`."""
    return "".join(f"He{d}(z{i})" for i, d in enumerate(index) if d)


def leading_modes(rho: Sequence[float], count: int, *, degree: int = 8) -> dict[MultiIndex, float]:
    """Return the products with the largest eigenvalues `prod_i rho_i^{alpha_i}`: what whitened alignment finds.

    They are the latents themselves iff the smallest `rho` exceeds the square of the largest; else the second harmonic
    of the slowest latent comes before the fastest latent (after Sprekeler, Zito and Wiskott 2014, Journal of Machine
    Learning Research 15).

    Args:
        rho: correlation of each latent, in (0, 1).
        count: number of products.
        degree: highest total degree considered.

    Example:
        >>> leading_modes([0.95, 0.8], 2)
        {(1, 0): 0.95, (2, 0): 0.9025}
    """
    eigenvalues = {
        index: math.prod(r**d for r, d in zip(rho, index, strict=True)) for index in multi_indices(len(rho), degree)
    }
    leading = sorted(eigenvalues, key=lambda index: -eigenvalues[index])[: whole("count", count)]
    return {index: round(eigenvalues[index], 12) for index in leading}


def named(shares: Mapping[MultiIndex, float]) -> dict[str, float]:
    """Return shares by the names of the products."""
    return {mode_name(index): share for index, share in shares.items()}
