"""What training asks of an objective."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from orthoworld.checks import views
from orthoworld.errors import ArgumentError, ShapeError
from orthoworld.streams import Generators


@dataclass(frozen=True)
class Losses:
    """The scalars of one batch, or those of each of several runs.

    Attributes:
        total: what is minimised.
        alignment: `E ||h - h'||^2` of the embedding that is evaluated (whitened, for the whitened objectives).
        regulariser: what keeps the embedding from collapsing, in the units its objective names: SIGReg or whitening
            before `lam` weighs it, VICReg's hinge and covariance penalty as weighed; None where there is none.
    """

    total: Float[Tensor, "*runs"]
    alignment: Float[Tensor, "*runs"]
    regulariser: Float[Tensor, "*runs"] | None


class Objective(nn.Module, ABC):
    """A loss on the embeddings of the views of a batch.

    State that a run must keep (multipliers, say) lives in buffers, so that it is in the checkpoint.
    """

    whitens = False
    """Whether the embedding the objective speaks of is the whitened output of the encoder; training then fits a
    `Whitener` behind it."""

    coefficients: ClassVar[tuple[str, ...] | None] = None
    """Options in which runs that are trained as one may differ; None for an objective that cannot be `stack`ed."""

    @abstractmethod
    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        """Return the losses of embeddings `(views, batch, dim)`; `generator` draws directions where they are needed.

        A stacked objective takes `(runs, views, batch, dim)` and a generator for each run.
        """

    def after_step(self, losses: Losses) -> None:
        """Update multipliers after an optimiser step."""


Stackable = TypeVar("Stackable", bound=Objective)


def stack(members: Sequence[Stackable]) -> Stackable:
    """Return one objective for several runs: their coefficients and their state become tensors with an entry for each.

    Args:
        members: objectives of one class which has `coefficients`.

    Raises:
        ArgumentError: the objectives differ in more than their coefficients.
    """
    first, *others = members
    assert first.coefficients is not None, f"{type(first).__name__} cannot be stacked"
    fixed = _fixed_options(first)
    for other in others:
        found = _fixed_options(other)
        if found != fixed:
            differing = sorted(key for key in fixed | found if fixed.get(key) != found.get(key))
            raise ArgumentError(
                f"objectives differ in {', '.join(differing)}: expected runs that differ in "
                f"{', '.join(first.coefficients) or 'nothing'} only"
            )
    result = copy.deepcopy(first)
    for name in first.coefficients:
        delattr(result, name)
        values = torch.tensor([getattr(member, name) for member in members])
        result.register_buffer(name, values, persistent=False)  # a run's state is that of its own objective
    for name in first.state_dict():
        owner, _, leaf = name.rpartition(".")
        setattr(result.get_submodule(owner), leaf, torch.stack([member.get_buffer(name) for member in members]))
    return result


def options(module: nn.Module) -> dict[str, float]:
    """Return the options of a module and its parts that are plain numbers."""
    parts = dict(module.named_modules()).items()
    found = ((f"{name}.{key}".lstrip("."), value) for name, part in parts for key, value in vars(part).items())
    return {key: value for key, value in found if isinstance(value, (int, float)) and not key.endswith("training")}


def _fixed_options(objective: Objective) -> dict[str, float | str]:
    """Return what stacked objectives have to share."""
    shared = {key: value for key, value in options(objective).items() if key not in (objective.coefficients or ())}
    return {"class": type(objective).__name__, **shared}


def two_or_more_views(h: Tensor) -> Tensor:
    """Return `h` if it is `(views, batch, dim)` or `(runs, views, batch, dim)` with at least two views.

    Raises:
        TypeError: `h` is not of a floating-point type.
        ShapeError: it has another shape.
    """
    if h.ndim not in (3, 4) or h.shape[-3] < 2:
        raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected (views, batch, dim) with two views or more")
    return views(h, runs=h.ndim == 4)
