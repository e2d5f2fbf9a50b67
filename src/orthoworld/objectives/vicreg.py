"""VICReg's own variance-invariance-covariance form (Bardes, Ponce and LeCun, arXiv:2105.04906)."""

import math

import torch
from torch import Tensor

from orthoworld.checks import at_least_float32, real, without_autocast
from orthoworld.errors import ShapeError
from orthoworld.objectives.alignment import alignment
from orthoworld.objectives.objective import Losses, Objective, two_or_more_views
from orthoworld.objectives.processes import total_rows
from orthoworld.objectives.whitening import covariance
from orthoworld.streams import Generators

VARIANCE_FLOOR = 1e-4
"""Added to variances under the square root, whose gradient is infinite at 0; the published value."""


class VICReg(Objective):
    """`invariance MSE + variance hinge + covariance penalty`, as its authors wrote it.

    With two views `h, h'` of `n` samples: the mean squared difference over all entries; for each view the mean over
    dimensions of `max(0, 1 - sqrt(Var + 1e-4))`, averaged over views; and for each view the sum of squared off-diagonal
    covariances over `dim`, summed over views. The hinge bounds variances from below only, so second moments are not
    fixed to the identity: Theorem 1 speaks of `Whitening` rather than of this form.

    Args:
        invariance: weight of the mean squared difference, >= 0.
        variance: weight of the hinge, >= 0.
        covariance: weight of the covariance penalty, >= 0.

    Raises:
        ArgumentError: a weight is not a finite number >= 0.
        ShapeError: at the call, for other shapes than `(views, batch, dim)` with at least two of each of the first two.
    """

    coefficients = ("invariance", "variance", "covariance")

    def __init__(self, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance = real("invariance", invariance, 0, math.inf, closed="low")
        self.variance = real("variance", variance, 0, math.inf, closed="low")
        self.covariance = real("covariance", covariance, 0, math.inf, closed="low")

    def forward(self, h: Tensor, *, generator: Generators) -> Losses:
        if total_rows(two_or_more_views(h).shape[-2], h.device) < 2:
            raise ShapeError(f"embeddings have shape {tuple(h.shape)}: expected two samples or more in each view")
        aligned = alignment(h)
        dim = h.shape[-1]
        with without_autocast(h.device):
            matrices = covariance(at_least_float32(h))  # one for each view
            variances = matrices.diagonal(dim1=-2, dim2=-1)
            hinge = torch.relu(1 - torch.sqrt(variances + VARIANCE_FLOOR)).mean(dim=(-2, -1))
            off_diagonal = (matrices.square().sum(dim=(-3, -2, -1)) - variances.square().sum(dim=(-2, -1))) / dim
            regulariser = self.variance * hinge + self.covariance * off_diagonal
            total = self.invariance * aligned / dim + regulariser
        return Losses(total=total, alignment=aligned, regulariser=regulariser)
