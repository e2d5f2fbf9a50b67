"""What can go wrong in a run, put into words; and the memory it took."""

import platform
import re
import resource
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.objectives.objective import Losses
from orthoworld.training.run import CurveRow

COLLAPSE_STD = 1e-3
"""An embedding that varies by less than this in some direction, or by less than this part of the widest, has
collapsed."""


def not_finite(h: Float[Tensor, "views batch dim"], losses: Losses) -> str:
    """Name the terms and the tensor of a step that are not finite, or return nothing."""
    if torch.isfinite(losses.total):
        return ""
    terms = {"total": losses.total, "alignment": losses.alignment, "regulariser": losses.regulariser}
    broken = {name: value.item() for name, value in terms.items() if value is not None and not torch.isfinite(value)}
    told = ", ".join(f"{name} is {value}" for name, value in broken.items())
    for view, count in enumerate((~torch.isfinite(h)).any(dim=2).sum(dim=1).tolist()):
        if count:
            return f"{told}: embedding h of view {view} has {count} non-finite rows of {h.shape[1]}"
    return f"{told}, though the embedding h is finite"


def collapse(row: CurveRow) -> str:
    """Describe the collapse that a row of the curve shows, or return nothing."""
    smallest, largest = row["smallest_std"], row["largest_std"]
    if smallest >= COLLAPSE_STD * max(largest, 1):
        return ""
    return (
        f"the held-out embedding has standard deviation {smallest:.2g} in one direction and {largest:.2g} in another: "
        f"expected at least {COLLAPSE_STD:g} in each, and that part of the largest"
    )


def peak_rss_mb() -> float:
    """Return the process's largest resident memory in MiB."""
    if platform.system() == "Linux":
        # getrusage would start a child at the peak of the process it was forked from.
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts in bytes
