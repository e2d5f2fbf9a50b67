"""Named random streams: one seed gives independent generators for the world, the encoder, the slices, ..."""

import hashlib
from collections.abc import Sequence

import torch

Generators = torch.Generator | Sequence[torch.Generator]
"""One generator, or one for each of several runs."""


def stream(seed: int, *names: str | int) -> torch.Generator:
    """Return the CPU generator that belongs to `seed` and the path `names`.

    Streams of different names are independent, so drawing more from one (evaluating more often, say) changes nothing
    in another. The same arguments give the same numbers in every process and on every machine.

    Example:
        >>> a = stream(0, "world").initial_seed()
        >>> a == stream(0, "world").initial_seed(), a == stream(0, "slices").initial_seed()
        (True, False)
    """
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    # 63 bits: torch takes seeds as signed 64-bit integers.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
