"""The objectives as plain functions, for use in somebody else's training loop."""

from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.infonce import infonce, matched_sigma
from orthoworld.objectives.processes import this_process_only
from orthoworld.objectives.sigreg import sigreg, sigreg_null_level
from orthoworld.objectives.whitening import whiten, whitening, whitening_null_level

__all__ = [
    "alignment",
    "infonce",
    "matched_sigma",
    "sigreg",
    "sigreg_null_level",
    "this_process_only",
    "whiten",
    "whitening",
    "whitening_null_level",
]
