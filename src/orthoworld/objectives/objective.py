"""What training asks of an objective."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.errors import ShapeError


@dataclass(frozen=True)
class Losses:
    """The scalars of one batch.

    Attributes:
        total: what is minimised.
        alignment: `E ||h - h'||^2` of the embedding that is evaluated (whitened, for the whitened objectives).
        regulariser: what keeps the embedding from collapsing, in the units its objective names: SIGReg or whitening
            before `lam` weighs it, VICReg's hinge and covariance penalty as weighed; None where there is none.
    """

    total: Float[Tensor, ""]
    alignment: Float[Tensor, ""]
    regulariser: Float[Tensor, ""] | None


class Objective(nn.Module, ABC):
    """A loss on the embeddings of the views of a batch.

    State that a run must keep (multipliers, say) lives in buffers, so that it is in the checkpoint.
    """

    whitens = False
    """Whether the embedding the objective speaks of is the whitened output of the encoder; training then fits a
    `Whitener` behind it."""

    @abstractmethod
    def forward(self, h: Tensor, *, generator: torch.Generator) -> Losses:
        """Return the losses of embeddings `(views, batch, dim)`; `generator` draws directions where they are needed."""

    def after_step(self, losses: Losses) -> None:
        """Update multipliers after an optimiser step."""


def two_or_more_views(h: Tensor) -> Tensor:
    """Return `h` if it is `(views, batch, dim)` with at least two views.

    Raises:
        ShapeError: otherwise.
    """
    if h.ndim != 3 or h.shape[0] < 2:
        raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected (views, batch, dim) with two views or more")
    return h
