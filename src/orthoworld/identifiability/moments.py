"""First and second moments of several arrays at once, kept in groups of rows.

Every measure of identifiability here is a function of means and covariances. Kept for groups of rows, they give a fit
on one half and a score on the other, and a bootstrap, without looking at the data again.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import whole
from orthoworld.errors import ArgumentError, ShapeError

GROUPS = 256
"""Groups of rows, at most; the bootstrap resamples groups."""

GROUP_MEMORY = 2**27
"""Largest number of matrix entries kept over all groups (1 GiB in float64)."""

FEWEST_GROUPS = 20

RANGE_TOLERANCE = 1e-12
"""Directions with less than this part of the largest variance are outside the range; float32 rounding is below it."""

INTERVAL = (0.025, 0.975)
"""Quantiles of the bootstrap that make a 95 % interval."""


def as_rows(name: str, array: Tensor | np.ndarray) -> Float[Tensor, "n dim"]:
    """Return `array` as a float64 CPU tensor `(n, dim)`; one dimension is read as one column.

    Statistics are computed in float64 on the CPU wherever the array lies, so that every device gives the same numbers.

    Raises:
        TypeError: `array` is no real numeric array.
        ShapeError: it has more than two dimensions or no rows.
    """
    tensor = torch.as_tensor(array)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected real numbers")
    tensor = tensor.detach().cpu().double()
    if tensor.ndim == 1:
        tensor = tensor[:, None]
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}: expected (n, dim), one row a sample")
    return tensor


def finite_rows(
    arrays: Mapping[str, Tensor | np.ndarray], *, drop: bool = False
) -> tuple[list[Float[Tensor, "n _"]], int]:
    """Return the arrays as rows of equal number, and how many rows were dropped for not being finite.

    Args:
        arrays: name to array.
        drop: drop a row everywhere when it is not finite anywhere, instead of refusing.

    Raises:
        ShapeError: the arrays have different numbers of rows.
        ArgumentError: a row is not finite and `drop` is off, or no finite row is left.
    """
    rows = {name: as_rows(name, array) for name, array in arrays.items()}
    if len({len(tensor) for tensor in rows.values()}) > 1:
        sizes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in rows.items())
        raise ShapeError(f"arrays have shapes {sizes}: expected the same number of rows")
    finite = {name: torch.isfinite(tensor).all(dim=1) for name, tensor in rows.items()}
    if not drop:
        for name, good in finite.items():
            if not good.all():
                count = int((~good).sum())
                raise ArgumentError(
                    f"{name} has {count} non-finite rows of {len(good)}: remove them, or pass drop=True"
                )
    kept = torch.stack(list(finite.values())).all(dim=0)
    if not kept.any():
        raise ArgumentError(f"none of {len(kept)} rows is finite in all of {', '.join(rows)}")
    return [tensor[kept] for tensor in rows.values()], int((~kept).sum())


@dataclass(frozen=True)
class Moments:
    """Means and covariances (dividing by n) of the blocks, with any leading dimensions for replicates."""

    n: Float[Tensor, "*rep"]
    mean: Float[Tensor, "*rep total"]
    cov: Float[Tensor, "*rep total total"]
    blocks: tuple[slice, ...]

    def means(self, block: int) -> Float[Tensor, "*rep dim"]:
        """Return the mean of one array."""
        return self.mean[..., self.blocks[block]]

    def covs(self, first: int, second: int) -> Float[Tensor, "*rep dim dim2"]:
        """Return the covariance of one array with another."""
        return self.cov[..., self.blocks[first], self.blocks[second]]


def group_starts(n: int, groups: int) -> list[int]:
    """Return the first row of each group; the first half of the rows and the second are cut apart, each evenly."""
    fit_rows, fit_groups = (n + 1) // 2, (groups + 1) // 2
    fit = [index * fit_rows // fit_groups for index in range(fit_groups)]
    score_groups = groups - fit_groups
    return fit + [fit_rows + index * (n - fit_rows) // score_groups for index in range(score_groups)]


def group_count(n: int, columns: int) -> int:
    """Return how many groups `n` rows are kept in, when their arrays have so many columns together."""
    return min(GROUPS, max(FEWEST_GROUPS, GROUP_MEMORY // columns**2), n)


class GroupedMoments:
    """Sums over groups of consecutive rows of several arrays of equal length.

    Args:
        arrays: float64 tensors `(n, dim_i)`.
    """

    def __init__(self, *arrays: Float[Tensor, "n _"]) -> None:
        starts = group_starts(len(arrays[0]), group_count(len(arrays[0]), sum(array.shape[1] for array in arrays)))
        shift = torch.cat([array.mean(dim=0) for array in arrays])  # sums about the mean keep their digits
        self._add_up(zip(*(array.tensor_split(starts[1:]) for array in arrays), strict=True), shift)

    @classmethod
    def of_parts(cls, parts: Iterable[Sequence[Float[Tensor, "rows _"]]]) -> "GroupedMoments":
        """Return the sums over data that come in parts, each a group of its own; one part is held at a time."""
        grouped = cls.__new__(cls)
        grouped._add_up(parts, None)
        return grouped

    def _add_up(
        self, parts: Iterable[Sequence[Float[Tensor, "rows _"]]], shift: Float[Tensor, " total"] | None
    ) -> None:
        """Add up the parts about `shift`, or about the mean of the first."""
        counts, sums, products = [], [], []
        for arrays in parts:
            if shift is None:
                shift = torch.cat([array.mean(dim=0) for array in arrays])
            rows = torch.cat(list(arrays), dim=1) - shift
            counts.append(float(len(rows)))
            sums.append(rows.sum(dim=0))
            products.append(rows.T @ rows)
        assert shift is not None, "there is no part"
        edges = np.cumsum([0] + [array.shape[1] for array in arrays]).tolist()
        self.blocks = tuple(slice(start, end) for start, end in itertools.pairwise(edges))
        self.shift = shift
        self.counts = torch.tensor(counts, dtype=torch.float64)
        self.sums = torch.stack(sums)
        self.products = torch.stack(products)

    def __len__(self) -> int:
        return len(self.counts)

    def moments(self, weights: Float[Tensor, "*rep groups"]) -> Moments:
        """Return the moments with each group counted `weights` times."""
        n = weights @ self.counts
        mean = weights @ self.sums / n[..., None]
        second = torch.einsum("...g,gij->...ij", weights, self.products) / n[..., None, None]
        return Moments(n, mean + self.shift, second - mean[..., :, None] * mean[..., None, :], self.blocks)


def resampling_weights(groups: int, resamples: int, generator: torch.Generator) -> Float[Tensor, "replicates groups"]:
    """Return how often each group enters each replicate: row 0 is the data, the others are bootstrap draws.

    The first half of the groups, which fits, and the second, which scores, are resampled apart.
    """
    half = (groups + 1) // 2
    weights = [torch.ones(1, groups, dtype=torch.float64)]
    if resamples:
        parts = [
            torch.nn.functional.one_hot(
                torch.randint(size, (resamples, size), generator=generator, device=generator.device), size
            ).sum(dim=1)
            for size in (half, groups - half)
            if size
        ]
        weights.append(torch.cat(parts, dim=1).cpu().double())
    return torch.cat(weights)


def halves(groups: int) -> tuple[Float[Tensor, " groups"], Float[Tensor, " groups"]]:
    """Return masks of the groups that fit and of those that score."""
    fit = torch.zeros(groups, dtype=torch.float64)
    fit[: (groups + 1) // 2] = 1
    return fit, 1 - fit


def estimates_and_intervals(
    grouped: GroupedMoments,
    statistics: Callable[[Float[Tensor, "replicates groups"]], Mapping[str, Tensor]],
    *,
    resamples: int,
    generator: torch.Generator | None,
) -> tuple[dict[str, Tensor], dict[str, tuple[float, float]]]:
    """Evaluate `statistics` on the data and on bootstrap replicates.

    Args:
        grouped: decides the number of groups.
        statistics: maps weights of replicates to named values, the replicates first.
        resamples: bootstrap draws; 0 gives no intervals.
        generator: source of the draws; without one, a generator of seed 0.

    Returns:
        The values of the data, and 95 % percentile intervals of those that are scalars and finite in all draws; none
        from fewer than 20 groups, which say too little about the spread. The
        interval of a norm does not reach down to 0 where the norm is 0; for that, look at a signed estimate such as
        `epsilon_squared_debiased` or `delta`.
    """
    whole("resamples", resamples, least=0)
    resamples = resamples if len(grouped) >= FEWEST_GROUPS else 0
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    weights = resampling_weights(len(grouped), resamples, generator)
    at_once = max(1, 2**25 // grouped.products[0].numel())
    parts = [statistics(part) for part in weights.split(at_once)]
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    intervals = {}
    for name, value in values.items():
        if resamples and value.ndim == 1 and torch.isfinite(value).all():
            low, high = torch.quantile(value[1:], torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
            intervals[name] = (low, high)
    return {name: value[0] for name, value in values.items()}, intervals


def trace(matrix: Float[Tensor, "*rep d d"]) -> Float[Tensor, "*rep"]:
    """Return the trace of each matrix."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def inverse(cov: Float[Tensor, "*rep d d"]) -> Float[Tensor, "*rep d d"]:
    """Return an inverse of a covariance on its range; directions without variance are mapped to 0."""
    whitening = whitening_map(cov)
    return whitening.mT @ whitening


def whitening_map(cov: Float[Tensor, "*rep d d"]) -> Float[Tensor, "*rep d d"]:
    """Return `W` with `W cov W^T = I` on the range of the covariance; directions without variance are mapped to 0.

    Columns are brought to unit variance first, so that one in small units counts as much as the others.
    """
    tiny = torch.finfo(torch.float64).tiny
    variance = cov.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(variance > tiny, variance.clamp(min=tiny).rsqrt(), 0.0)
    values, vectors = torch.linalg.eigh(scale[..., :, None] * cov * scale[..., None, :])
    kept = values > RANGE_TOLERANCE * values[..., -1:].clamp(min=tiny)
    roots = torch.where(kept, values.clamp(min=tiny).rsqrt(), 0.0)
    return (vectors * roots[..., None, :]) @ vectors.mT * scale[..., None, :]
