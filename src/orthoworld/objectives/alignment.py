"""Alignment: how far apart the embeddings of the views of one state are."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from orthoworld.checks import at_least_float32, without_autocast
from orthoworld.errors import ArgumentError
from orthoworld.objectives.objective import two_or_more_views
from orthoworld.objectives.processes import global_mean

AlignmentForm = Literal["norm", "centroid"]


def alignment(h: Tensor, *, form: AlignmentForm = "norm") -> Float[Tensor, "*runs"]:
    """Return the alignment loss of the views of a batch.

    Args:
        h: embeddings `(views, batch, dim)` with at least two views; of several runs, `(runs, views, batch, dim)`.
        form: `"norm"` is `E ||h - h'||^2`, the sum over dimensions, averaged over all pairs of views. `"centroid"` is
            the mean over views, batch and dimensions of `(h - view mean)^2`, as the public codes have it.

    Returns:
        Scalar, one for each run; norm = centroid times `2 dim views / (views - 1)`, which is `4 dim` for two views. At
        an orthogonal map of a world with pair correlation `r`: norm `2 (1 - r) dim`, centroid `(1 - r) / 2` for two
        views.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: `h` has neither three nor four dimensions, or fewer than two views.
        ArgumentError: there is no such form.

    Example:
        >>> import torch
        >>> h = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
        >>> alignment(h).item(), alignment(h, form="centroid").item()
        (25.0, 3.125)
    """
    h = at_least_float32(two_or_more_views(h))
    if form not in ("norm", "centroid"):
        raise ArgumentError(f"form={form!r}: expected 'norm' or 'centroid'")
    with without_autocast(h.device):
        spread = (h - h.mean(dim=-3, keepdim=True)).square().mean(dim=(-3, -2, -1))
        centroid, _ = global_mean(spread, h.shape[-2])
    return centroid if form == "centroid" else in_norm_units(centroid, h)


def in_norm_units(centroid: Tensor, h: Tensor) -> Tensor:
    """Turn alignment of the centroid form into that of the norm form, for embeddings of the shape of `h`."""
    number, _, dim = h.shape[-3:]
    return centroid * (2 * dim * number / (number - 1))
