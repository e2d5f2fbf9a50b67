"""Where a run is trained."""

from collections.abc import Callable

import torch

from orthoworld.errors import ArgumentError

AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}


def default_device() -> str:
    """Return `cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        ArgumentError: this machine does not have it.

    Example:
        >>> device_of("cpu")
        device(type='cpu')
    """
    if not AVAILABLE[name]():
        here = ", ".join(other for other, available in AVAILABLE.items() if available())
        raise ArgumentError(f"device={name!r}: this machine has {here}")
    return torch.device(name)


def device_name(name: str) -> str:
    """Return the device's name with the model of the processor where torch knows it."""
    return f"cuda ({torch.cuda.get_device_name()})" if name == "cuda" else name
