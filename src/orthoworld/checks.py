"""Checks of arguments that several modules share."""

import contextlib
import math
import numbers
from typing import Any

import torch
from torch import Tensor

from orthoworld.errors import ArgumentError, ShapeError


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """Return `value` if it is an integer of at least `least`.

    Raises:
        ArgumentError: otherwise; the message names the argument and the allowed range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ArgumentError(f"{name}={value!r}: expected a whole number >= {least}")
    return int(value)


def real(name: str, value: Any, low: float, high: float, *, closed: str = "") -> float:
    """Return `value` as a float if it lies in the interval from `low` to `high`.

    Args:
        closed: which ends belong to the interval: `""`, `"low"`, `"high"` or `"both"`.

    Raises:
        ArgumentError: `value` is no finite number in the interval; the message names the argument and the interval.
    """
    left = closed in ("low", "both")
    right = closed in ("high", "both")
    if not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value):
        number = float(value)
        above = number >= low if left else number > low
        below = number <= high if right else number < high
        if above and below:
            return number
    interval = f"{'[' if left else '('}{low:g}, {high:g}{']' if right else ')'}"
    raise ArgumentError(f"{name}={value!r}: expected a number in {interval}")


def points(name: str, tensor: Tensor, dim: int) -> Tensor:
    """Return `tensor` if its last dimension is `dim`.

    Raises:
        ShapeError: otherwise.
    """
    if tensor.ndim == 0 or tensor.shape[-1] != dim:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}: expected (..., {dim}), one row a point")
    return tensor


def views(h: Tensor, *, runs: bool = False) -> Tensor:
    """Return embeddings as `(views, batch, dim)`; `(batch, dim)` becomes one view.

    Args:
        runs: whether `h` holds several runs, `(runs, views, batch, dim)`, and is returned as it is.

    Raises:
        TypeError: `h` is not of a real floating-point type.
        ShapeError: `h` has another number of dimensions, or one of them is empty.
    """
    if not h.is_floating_point():
        raise TypeError(f"embeddings have dtype {h.dtype}: expected a floating-point type")
    if runs:
        if h.ndim != 4 or 0 in h.shape:
            raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected (runs, views, batch, dim)")
        return h
    if h.ndim not in (2, 3) or 0 in h.shape:
        raise ShapeError(
            f"embeddings have shape {tuple(h.shape)}: expected (batch, dim), read as one view, or (views, batch, dim)"
        )
    return h if h.ndim == 3 else h.unsqueeze(0)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast, where the device has it, narrows nothing."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 if its type is narrower; statistics of half-precision numbers lose their digits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
