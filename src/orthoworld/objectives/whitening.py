"""Whitening: the covariance of an embedding pulled to, or set to, the identity."""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import at_least_float32, points, real, views, whole, without_autocast
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.objectives.processes import global_mean, total_rows

WhiteningForm = Literal["frobenius", "mean"]

JITTER = {torch.float32: 1e-6, torch.float64: 1e-14}
"""Part of the mean variance added to the covariance before it is factorised, against rounding, by type."""

RANK_TOLERANCE = 1e-8
"""Directions with less than this part of the largest variance count as constant."""

ROUNDING = 1e-12
"""So do directions whose variance is below this part of the mean square: in float32 they are rounding."""


def covariance(h: Float[Tensor, "*runs samples dim"]) -> Float[Tensor, "*runs dim dim"]:
    """Return the unbiased sample covariance of the rows of `h`."""
    centred = _centred(h)
    second, samples = global_mean(centred.mT @ centred / h.shape[-2], h.shape[-2])
    return second * (samples / (samples - 1))


def _centred(h: Float[Tensor, "*runs samples dim"]) -> Float[Tensor, "*runs samples dim"]:
    mean, _ = global_mean(h.mean(dim=-2), h.shape[-2])
    return h - mean.unsqueeze(-2)


def _pool(h: Tensor) -> Float[Tensor, "*runs samples dim"]:
    return at_least_float32(views(h, runs=h.ndim == 4)).flatten(-3, -2)


def whitening(h: Tensor, *, form: WhiteningForm = "mean") -> Float[Tensor, "*runs"]:
    """Return the distance of the covariance of all views together from the identity. The mean of `h` is left free.

    Args:
        h: embeddings `(batch, dim)` or `(views, batch, dim)`; of several runs, `(runs, views, batch, dim)`.
        form: `"frobenius"` is `||Cov(h) - I||_F^2`; `"mean"` divides it by `dim^2`, as published.

    Returns:
        Scalar, one for each run, with the unbiased covariance. Null level: see `whitening_null_level`.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has another number of dimensions, or a single sample, whose covariance does not exist.
        ArgumentError: there is no such form.

    Example:
        >>> h = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> round(whitening(h, form="frobenius").item(), 4)  # Cov = 4/3 I
        0.2222
    """
    pooled = _pool(h)
    if total_rows(pooled.shape[-2], h.device) < 2:
        raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected two samples or more, to have a covariance")
    with without_autocast(h.device):
        identity = torch.eye(pooled.shape[-1], dtype=pooled.dtype, device=pooled.device)
        squares = (covariance(pooled) - identity).square()
    return squares.sum(dim=(-2, -1)) if _checked(form) == "frobenius" else squares.mean(dim=(-2, -1))


def _checked(form: WhiteningForm) -> WhiteningForm:
    if form not in ("frobenius", "mean"):
        raise ArgumentError(f"form={form!r}: expected 'frobenius' or 'mean'")
    return form


def whitening_null_level(n: int, dim: int, *, views: int = 1, r: float = 0.0, form: WhiteningForm = "mean") -> float:
    """Return the mean of `whitening` over standard normal embeddings, to leading order in `1/n`.

    Formula: `dim (dim + 1) (1 + (views - 1) r^2) / (n - 1)` for the Frobenius form.

    Args:
        n: samples, all views included.
        dim: size of the embedding.
        views: number of views among them.
        r: correlation between the views, in [-1, 1].
        form: as in `whitening`.

    Raises:
        ArgumentError: an argument lies outside its range.

    Example:
        >>> round(whitening_null_level(512, 1024, views=2, r=0.9025), 5)
        0.00355
    """
    whole("n", n, least=2), whole("dim", dim), whole("views", views), real("r", r, -1, 1, closed="both")
    squared = dim * (dim + 1) * (1 + (views - 1) * r**2) / (n - 1)
    return squared if _checked(form) == "frobenius" else squared / dim**2


def whiten(h: Tensor) -> Tensor:
    """Return the embedding moved and mapped linearly so that all views together have mean 0 and covariance `I`.

    The map is the inverse of the Cholesky factor of the covariance, differentiable; whatever is computed from the
    result and does not change under rotations does not depend on this choice. Directions with less than about 1e-6 of
    the mean variance (1e-14 in float64) come out smaller than 1.

    Args:
        h: embeddings `(batch, dim)` or `(views, batch, dim)`, more samples than dimensions; of several runs,
            `(runs, views, batch, dim)`, each whitened on its own.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has another number of dimensions, or not more samples than dimensions.

    Example:
        >>> h = 3 + 2 * torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> torch.cov(whiten(h).T).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    pooled = _pool(h)
    dim = pooled.shape[-1]
    samples = total_rows(pooled.shape[-2], h.device)
    if samples <= dim:
        raise ShapeError(
            f"embeddings have shape {tuple(h.shape)}, {samples} samples: expected more than {dim}, to whiten"
        )
    with without_autocast(h.device):
        centred = _centred(pooled)
        second, _ = global_mean(centred.mT @ centred / pooled.shape[-2], pooled.shape[-2])
        factor = _cholesky(second * (samples / (samples - 1)))
        white = torch.linalg.solve_triangular(factor, centred.mT, upper=False).mT
    return white.reshape(h.shape)


def _cholesky(matrix: Float[Tensor, "*runs dim dim"]) -> Float[Tensor, "*runs dim dim"]:
    """Return the Cholesky factor; NaN, not an exception, where there is none, so that training reports a divergence."""
    jitter = JITTER[matrix.dtype] * matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(jitter.expand(matrix.shape[:-1])))
    return torch.where(failed[..., None, None] > 0, torch.nan, factor)


class Whitener(nn.Module):
    """A fixed affine map `h -> (h - mean) matrix` that whitens the distribution it was fitted to.

    Directions in which the fitted embedding does not vary are mapped to 0, so that a collapse stays visible.

    Args:
        dim: size of the embedding; a new whitener is the identity until `fit` is called.

    Example:
        >>> h = 3 + 2 * torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> torch.cov(Whitener(2).fit(h)(h).T).round(decimals=3).abs()
        tensor([[1., 0.],
                [0., 1.]])
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("matrix", torch.eye(dim))

    @torch.no_grad()
    def fit(self, h: Tensor | Iterable[Tensor]) -> "Whitener":
        """Fit mean and symmetric inverse square root of the covariance, in float64, and return the whitener.

        Args:
            h: the sample `(n, dim)`, whole or in parts, of which one is held at a time.

        Raises:
            ShapeError: fewer than two samples, or embeddings of another size.
        """
        dim = len(self.mean)
        count, total, products = 0, torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dim, dtype=torch.float64)
        shift = None
        for batch in [h] if isinstance(h, Tensor) else h:
            if batch.ndim != 2 or batch.shape[1] != dim:
                raise ShapeError(f"embeddings have shape {tuple(batch.shape)}: expected (n, {dim})")
            exact = batch.cpu().double()
            shift = exact.mean(dim=0) if shift is None else shift  # sums about the mean keep their digits
            centred = exact - shift
            count += len(exact)
            total += centred.sum(dim=0)
            products += centred.T @ centred
        if shift is None or count < 2:
            raise ShapeError(f"{count} embeddings of {dim} dimensions: expected two samples or more, to whiten")
        mean = total / count
        spread = (products - count * torch.outer(mean, mean)) / (count - 1)
        if not torch.isfinite(spread).all():
            self.matrix.fill_(torch.nan)  # the embeddings show it, and training reports a divergence
            return self
        values, vectors = torch.linalg.eigh(spread)
        mean_square = products.diagonal().mean() / count + (shift.square() + 2 * shift * mean).mean()
        kept = values > torch.maximum(RANK_TOLERANCE * values[-1], ROUNDING * mean_square)
        scale = torch.where(kept, values.clamp(min=0).rsqrt(), 0.0)
        self.mean.copy_(shift + mean)
        self.matrix.copy_(vectors * scale @ vectors.T)
        return self

    def forward(self, h: Tensor) -> Tensor:
        """Map embeddings `(..., dim)`; `ShapeError` for another size."""
        return (points("h", h, len(self.mean)) - self.mean) @ self.matrix
