"""Optimisers and learning-rate schedules, each a small description that builds the PyTorch object."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from orthoworld.checks import real, whole


@runtime_checkable
class OptimizerRecipe(Protocol):
    """Builds the optimisers of a model; several when its parameters are treated differently."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return optimisers that together hold every trainable parameter of `model` once."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """The factor on the learning rate during a run."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor in `[0, 1]` at `step` (from 0) of `steps`."""
        ...


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        real(name, rate, 0, math.inf, closed="low")


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW`, with the learning rate and weight decay of the published synthetic experiments.

    Raises:
        ArgumentError: a rate is not a finite number >= 0.
    """

    lr: float = 3e-3
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, weight_decay=self.weight_decay)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)]


HIDDEN_SIDE = 8
"""Muon makes an update orthogonal, which says little about a matrix with a shorter side than this."""


@dataclass(frozen=True)
class Muon:
    """`torch.optim.Muon` for weight matrices with both sides of at least 8, AdamW without decay for everything else.

    Args:
        lr: learning rate of the matrices, in the scale at which Muon's updates have the size of AdamW's.
        adamw_lr: learning rate of biases and of thin matrices, as the first and last layer of a small world has.
        weight_decay: decay of the matrices.

    Raises:
        ArgumentError: a rate is not a finite number >= 0.
    """

    lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, adamw_lr=self.adamw_lr, weight_decay=self.weight_decay)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        trainable = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trainable if p.ndim == 2 and min(p.shape) >= HIDDEN_SIDE]
        chosen = {id(p) for p in hidden}
        rest = [p for p in trainable if id(p) not in chosen]
        optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            optimizers.append(
                torch.optim.Muon(hidden, lr=self.lr, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            optimizers.append(torch.optim.AdamW(rest, lr=self.adamw_lr, weight_decay=0.0))
        return optimizers


@dataclass(frozen=True)
class HalfCosine:
    """Constant for the first half of the run, then half a cosine down to 0: the published schedule."""

    def factor(self, step: int, steps: int) -> float:
        half = steps / 2
        return 1.0 if step < half else (1 + math.cos(math.pi * (step - half) / half)) / 2


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up over `warmup` steps (at most a tenth of the run), then half a cosine down to 0.

    Raises:
        ArgumentError: `warmup` is not a whole number >= 0.
    """

    warmup: int = 100

    def __post_init__(self) -> None:
        whole("warmup", self.warmup, least=0)

    def factor(self, step: int, steps: int) -> float:
        warmup = min(self.warmup, steps // 10)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
