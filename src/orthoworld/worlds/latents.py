"""Sources: the laws of independent latents, all of mean 0 and variance 1."""

import math
from abc import ABC, abstractmethod
from typing import Any

import scipy  # its statistics, slow to import, wait until a law's functions are needed
import torch
from torch import Tensor

from orthoworld.checks import real, whole


class Source(ABC):
    """A law of `dim` independent, identically distributed latents of mean 0 and variance 1.

    Each is symmetric about 0, with a density that does not grow away from 0. The law's functions are those of one
    latent and act on each entry of their argument.
    """

    def __init__(self, dim: int) -> None:
        self.dim = whole("dim", dim)

    @abstractmethod
    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return independent draws of the law in float64 or float32, on the generator's device."""

    @abstractmethod
    def _law(self) -> Any:
        """Return the law as SciPy's frozen distribution."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Return `log p(z)` in the type and on the device of `z`; it holds inside the law's support."""

    @abstractmethod
    def upper_mean(self, z: Tensor) -> Tensor:
        """Return `E[Z; Z > z]`, the part of the mean above `z`, in the type and on the device of `z`."""

    def survival(self, z: Tensor) -> Tensor:
        """Return `P(Z > z)` in float64 on the CPU, to full precision in the upper tail.

        Example:
            >>> Laplace(1).survival(torch.tensor([0.0]))
            tensor([0.5000], dtype=torch.float64)
        """
        return torch.as_tensor(self._law().sf(z.double().cpu().numpy()))

    def upper_quantile(self, mass: Tensor) -> Tensor:
        """Return the `z` with `P(Z > z) = mass`, in float64 on the CPU; at mass 0 the end of the support."""
        return torch.as_tensor(self._law().isf(mass.double().cpu().numpy()))

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

    def _law(self) -> Any:
        return scipy.stats.norm()

    def log_density(self, z: Tensor) -> Tensor:
        return -z.square() / 2 - math.log(2 * math.pi) / 2

    def upper_mean(self, z: Tensor) -> Tensor:
        return self.log_density(z).exp()

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

    @property
    def _log_scale(self) -> float:
        """The logarithm of `s`."""
        return (math.lgamma(1 / self.alpha) - math.lgamma(3 / self.alpha)) / 2

    def _law(self) -> Any:
        return scipy.stats.gennorm(self.alpha, scale=math.exp(self._log_scale))

    def log_density(self, z: Tensor) -> Tensor:
        log_normalizer = math.log(2) + self._log_scale + math.lgamma(1 + 1 / self.alpha)
        return -((z.abs() / math.exp(self._log_scale)) ** self.alpha) - log_normalizer

    def upper_mean(self, z: Tensor) -> Tensor:
        # With g = |z/s|^alpha it is s Gamma(2/alpha, g) / (2 Gamma(1/alpha)).
        whole = math.exp(self._log_scale + math.lgamma(2 / self.alpha) - math.lgamma(1 / self.alpha)) / 2
        return whole * torch.special.gammaincc(
            torch.full_like(z, 2 / self.alpha), (z.abs() / math.exp(self._log_scale)) ** self.alpha
        )

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # |z| = s U G^(1/alpha), with U uniform and G ~ Gamma(1 + 1/alpha). The usual form without
        # U, G ~ Gamma(1/alpha), underflows to 0 for large alpha; and the logarithm keeps small alpha from overflowing.
        device = generator.device
        gamma = torch._standard_gamma(
            torch.full(shape, 1 + 1 / self.alpha, dtype=torch.float64, device=device), generator=generator
        )
        uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator, device=device)  # in (0, 1]
        sign = torch.randint(2, shape, generator=generator, device=device) * 2 - 1
        return sign * torch.exp(self._log_scale + uniform.log() + gamma.log() / self.alpha)


class Laplace(Source):
    """The Laplace law with scale `1/sqrt 2`, so of unit variance."""

    @property
    def is_laplace(self) -> bool:
        return True

    def _law(self) -> Any:
        return scipy.stats.laplace(scale=1 / math.sqrt(2))

    def log_density(self, z: Tensor) -> Tensor:
        return -math.sqrt(2) * z.abs() - math.log(2) / 2

    def upper_mean(self, z: Tensor) -> Tensor:
        steepness = math.sqrt(2) * z.abs()
        return (1 + steepness) * torch.exp(-steepness) / math.sqrt(8)

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

    def _law(self) -> Any:
        return scipy.stats.t(self.df, scale=math.sqrt((self.df - 2) / self.df))

    def log_density(self, z: Tensor) -> Tensor:
        log_normalizer = (
            math.lgamma(self.df / 2) - math.lgamma((self.df + 1) / 2) + math.log(math.pi * (self.df - 2)) / 2
        )
        return -(self.df + 1) / 2 * torch.log1p(z.square() / (self.df - 2)) - log_normalizer

    def upper_mean(self, z: Tensor) -> Tensor:
        return (self.df - 2 + z.square()) / (self.df - 1) * self.log_density(z).exp()

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        device = generator.device
        normal = torch.randn(shape, dtype=torch.float64, generator=generator, device=device)
        half_df = torch.full(shape, self.df / 2, dtype=torch.float64, device=device)
        half_chi2 = torch._standard_gamma(half_df, generator=generator)
        # t = normal sqrt(df / chi2) has variance df / (df - 2).
        return normal * torch.sqrt((self.df - 2) / (2 * half_chi2))


class Uniform(Source):
    """The uniform law on `[-sqrt 3, sqrt 3]`."""

    def _law(self) -> Any:
        return scipy.stats.uniform(-math.sqrt(3), 2 * math.sqrt(3))

    def log_density(self, z: Tensor) -> Tensor:
        return torch.full_like(z, -math.log(12) / 2)

    def upper_mean(self, z: Tensor) -> Tensor:
        return (3 - z.square()).clamp(min=0) / math.sqrt(48)

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1) * math.sqrt(3)
