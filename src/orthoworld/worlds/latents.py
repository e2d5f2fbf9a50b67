"""Sources: the laws of independent latents, all of mean 0 and variance 1."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from orthoworld.checks import real, whole


class Source(ABC):
    """A law of `dim` independent, identically distributed latents of mean 0 and variance 1."""

    def __init__(self, dim: int) -> None:
        self.dim = whole("dim", dim)

    @abstractmethod
    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return independent draws of the law in float64 or float32, on the generator's device."""

    @property
    def is_gaussian(self) -> bool:
        """Whether the law is the standard normal one."""
        return False

    @property
    def is_laplace(self) -> bool:
        """Whether the law is the Laplace one of unit variance."""
        return False

    def sample(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Draw latents.

        Args:
            shape: the leading shape, one or more sizes.
            generator: source of randomness; the result lies on its device.

        Returns:
            float32 tensor of shape `(*shape, dim)`.

        Raises:
            ArgumentError: a size is not a whole number >= 0.

        Example:
            >>> Gaussian(2).sample(5, 3, generator=torch.Generator().manual_seed(0)).shape
            torch.Size([5, 3, 2])
        """
        for size in shape:
            whole("shape", size, least=0)
        return self._draw((*shape, self.dim), generator).float()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class Gaussian(Source):
    """The standard normal law, the one the theorems are about."""

    @property
    def is_gaussian(self) -> bool:
        return True

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)


class GeneralizedNormal(Source):
    """The density proportional to `exp(-|z/s|^alpha)`, with `s` such that the variance is 1.

    Sparse for `alpha < 2` (Laplace at 1), Gaussian at 2, and towards the uniform law as `alpha` grows. For very small
    `alpha` the variance comes from rare, huge values, which a sample may not hold.

    Args:
        dim: number of latents.
        alpha: the exponent, any number > 0.

    Raises:
        ArgumentError: `alpha` is not a finite number > 0.
    """

    def __init__(self, dim: int, alpha: float) -> None:
        super().__init__(dim)
        self.alpha = real("alpha", alpha, 0, math.inf)

    @property
    def is_gaussian(self) -> bool:
        return self.alpha == 2

    @property
    def is_laplace(self) -> bool:
        return self.alpha == 1

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # |z| = s U G^(1/alpha), with U uniform and G ~ Gamma(1 + 1/alpha). The usual form without
        # U, G ~ Gamma(1/alpha), underflows to 0 for large alpha; and the logarithm keeps small alpha from overflowing.
        device = generator.device
        gamma = torch._standard_gamma(
            torch.full(shape, 1 + 1 / self.alpha, dtype=torch.float64, device=device), generator=generator
        )
        uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator, device=device)  # in (0, 1]
        sign = torch.randint(2, shape, generator=generator, device=device) * 2 - 1
        log_scale = (math.lgamma(1 / self.alpha) - math.lgamma(3 / self.alpha)) / 2
        return sign * torch.exp(log_scale + uniform.log() + gamma.log() / self.alpha)


class Laplace(Source):
    """The Laplace law with scale `1/sqrt 2`, so of unit variance."""

    @property
    def is_laplace(self) -> bool:
        return True

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        positive, negative = torch.empty((2, *shape), device=generator.device).exponential_(generator=generator)
        return (positive - negative) / math.sqrt(2)


class StudentT(Source):
    """Student's t law scaled to unit variance.

    Args:
        dim: number of latents.
        df: degrees of freedom, > 2 so that the variance exists.

    Raises:
        ArgumentError: `df` is not a finite number > 2.
    """

    def __init__(self, dim: int, df: float) -> None:
        super().__init__(dim)
        self.df = real("df", df, 2, math.inf)

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        device = generator.device
        normal = torch.randn(shape, dtype=torch.float64, generator=generator, device=device)
        half_df = torch.full(shape, self.df / 2, dtype=torch.float64, device=device)
        half_chi2 = torch._standard_gamma(half_df, generator=generator)
        # t = normal sqrt(df / chi2) has variance df / (df - 2).
        return normal * torch.sqrt((self.df - 2) / (2 * half_chi2))


class Uniform(Source):
    """The uniform law on `[-sqrt 3, sqrt 3]`."""

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1) * math.sqrt(3)
