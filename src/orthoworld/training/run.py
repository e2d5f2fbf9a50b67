"""A finished training: the trained encoder and what happened on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from orthoworld.objectives.whitening import Whitener
from orthoworld.worlds.world import World

Status = Literal["finished", "collapsed", "diverged", "interrupted"]

CurveRow = Mapping[str, float]


class Representation(nn.Module):
    """An encoder and, for an objective that speaks of the whitened embedding, the whitener fitted behind it.

    Args:
        encoder: maps observations `(batch, in_dim)` to embeddings `(batch, out_dim)`.
        whitener: fitted map, or None.
    """

    def __init__(self, encoder: nn.Module, whitener: Whitener | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.whitener = whitener

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder(x)
        return h if self.whitener is None else self.whitener(h)


ENCODE_BATCH = 4096
"""Rows encoded at a time."""


@torch.no_grad()
def encode(model: nn.Module, x: Tensor) -> Tensor:
    """Return `model(x)` in evaluation mode, in batches, on the device of `x`; the model's mode is left as it was."""
    device = next((p.device for p in model.parameters()), x.device)
    was_training = model.training
    model.eval()
    try:
        return torch.cat([model(part.to(device)).to(x.device) for part in x.split(ENCODE_BATCH)])
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class Run:
    """The result of `train`.

    Attributes:
        representation: the trained encoder, with its whitener where the objective has one.
        world: the world it was trained in.
        status: `"finished"`; `"collapsed"`, when the held-out embedding is constant in some direction; `"diverged"`,
            when a loss was no finite number; `"interrupted"`, when it was asked to stop.
        reason: what was found, for a status other than finished.
        steps: optimiser steps taken.
        held_out_loss: the objective on held-out pairs at the end; NaN when it diverged or was interrupted.
        curve: one row for each evaluation.
        wall_s: seconds of training, earlier sessions of a resumed run included.
        peak_rss_mb: largest resident memory of the process so far, in MiB.
    """

    representation: Representation = field(repr=False)
    world: World
    status: Status
    reason: str
    steps: int
    held_out_loss: float
    curve: list[CurveRow] = field(repr=False)
    wall_s: float
    peak_rss_mb: float

    def encode(self, x: Tensor) -> Tensor:
        """Return the embeddings `(n, out_dim)` of observations `(n, in_dim)`, without gradient."""
        return encode(self.representation, x)
