"""The empirical characteristic function of random projections at equally spaced knots.

`cos(kx)` and `sin(kx)` for `k = 0, 1, ...` follow from one sine and cosine of each projection, and the gradient is a
trigonometric polynomial in `x`. Nothing of size samples x slices x knots is built, and projections
are made, used and dropped a chunk of the slices at a time.
"""

import functools
import warnings
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from orthoworld.objectives.kernels import eager

CACHED_ELEMENTS = 2**18
"""Projections held at a time on a CPU, so that a cache holds them and no memory is asked of the system; more are
projected again for the gradient, which costs less."""

CACHED_SLICES = 64
"""But not fewer slices than these, nor than there are dimensions: matrix products of thin factors are slow."""

CHUNK_ELEMENTS = 2**22
"""And never more projections than these, 16 MiB in float32, unless a single slice has more."""

ACCELERATOR_CHUNK_ELEMENTS = 2**26
"""Projections held at a time on other devices, which want more to do at once."""


@runtime_checkable
class Kernel(Protocol):
    """What computes the function and its gradient on one kind of device; `x` has the projections, slice by slice."""

    def means(self, x: Float[Tensor, "slices rows"], knots: int) -> Float[Tensor, "2 slices knots"]:
        """Return the means over rows of `cos kx` and of `sin kx`."""
        ...

    def polynomial(
        self,
        x: Float[Tensor, "slices rows"],
        sine: Float[Tensor, "slices knots"],
        cosine: Float[Tensor, "slices knots"],
    ) -> Float[Tensor, "slices rows"]:
        """Return `sum_k (cosine_k cos kx - sine_k sin kx)`; the coefficients of `k = 0` are 0."""
        ...


@runtime_checkable
class ThinKernel(Kernel, Protocol):
    """A kernel that makes the projections of embeddings of up to `THIN` dimensions by itself, and keeps none."""

    THIN: int

    def thin_means(
        self, h: Float[Tensor, "runs views rows dim"], directions: Float[Tensor, "runs dim slices"], knots: int
    ) -> Float[Tensor, "2 runs slices views knots"]:
        """Return the means over rows of `cos k a.h` and of `sin k a.h` for each direction `a`."""
        ...

    def thin_gradient(
        self,
        h: Float[Tensor, "runs views rows dim"],
        directions: Float[Tensor, "runs dim slices"],
        sine: Float[Tensor, "runs slices views knots"],
        cosine: Float[Tensor, "runs slices views knots"],
    ) -> Float[Tensor, "runs views rows dim"]:
        """Return `sum_a a sum_k (cosine_k cos k a.h - sine_k sin k a.h)`; the coefficients of `k = 0` are 0."""
        ...


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the fastest kernel there is for tensors of this kind."""
    if dtype == torch.float32 and device.type == "cpu":
        return _compiled() or eager
    if dtype == torch.float32 and device.type == "cuda":
        return _compiled_on(device) or eager
    return eager


@functools.cache
def _compiled() -> Kernel | None:
    try:
        from orthoworld.objectives.kernels import cpu
    except ImportError:  # numba is absent, or does not go with the numpy that is there
        return None
    return cpu


@functools.cache
def _compiled_on(device: torch.device) -> Kernel | None:
    try:
        from orthoworld.objectives.kernels import cuda

        cuda.means(torch.zeros(1, 1, device=device), 2)
    except ImportError:  # triton is absent
        return None
    except Exception as error:  # Triton compiles at the first call: it may lack a C compiler, or not know the GPU
        warnings.warn(f"SIGReg runs in torch operations on {device}, as Triton failed: {error}", stacklevel=3)
        return None
    return cuda


def empirical_cf(
    h: Float[Tensor, "*runs views rows dim"], directions: Float[Tensor, "*runs dim slices"], knots: int
) -> Float[Tensor, "2 *runs slices views knots"]:
    """Return the means over rows of `cos(k a.h)` and `sin(k a.h)`, `k = 0, ..., knots - 1`, for each direction `a`.

    Differentiable once, with respect to `h`.

    Example:
        >>> cos, sin = empirical_cf(torch.tensor([[[0.0], [torch.pi]]]), torch.ones(1, 1), 3)
        >>> cos.flatten().tolist()
        [1.0, 0.0, 1.0]
    """
    kernel = kernel_for(h.device, h.dtype)
    thin = isinstance(kernel, ThinKernel) and h.shape[-1] <= kernel.THIN
    function = _ThinEmpiricalCF if thin else _EmpiricalCF
    result: Tensor = function.apply(h, directions, knots, kernel)  # type: ignore[no-untyped-call]
    return result


def _chunks(h: Tensor, directions: Tensor) -> list[slice]:
    """Cut the slices into parts whose projections are held at a time."""
    slices, projections = directions.shape[-1], h.shape[:-1].numel()
    if h.device.type == "cpu":
        fast = max(CACHED_ELEMENTS // projections, CACHED_SLICES, h.shape[-1])
        width = max(1, min(fast, CHUNK_ELEMENTS // projections))
    else:
        width = max(1, ACCELERATOR_CHUNK_ELEMENTS // projections)
    return [slice(start, min(start + width, slices)) for start in range(0, slices, width)]


def _project(h: Tensor, directions: Tensor) -> Float[Tensor, "slices_views rows"]:
    """Return the projections, one row for each (run,) direction and view, the views of a direction together."""
    return (directions.mT @ h.flatten(-3, -2).mT).reshape(-1, h.shape[-2])


class _EmpiricalCF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, directions: Tensor, knots: int, kernel: Kernel) -> Tensor:
        ctx.kernel = kernel
        chunks = _chunks(h, directions)
        parts = []
        for chunk in chunks:
            x = _project(h, directions[..., chunk])
            parts.append(kernel.means(x, knots).view(2, *h.shape[:-3], -1, h.shape[-3], knots))
        ctx.save_for_backward(h, directions, *([x] if len(chunks) == 1 else []))
        return torch.cat(parts, dim=-3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        h, directions, *kept = ctx.saved_tensors
        coefficients = _coefficients(grad, h.shape[-2])
        # Transposed, as the product is many times faster for a thin embedding than the one of the transposed factors.
        transposed = torch.zeros_like(h.flatten(-3, -2).mT, memory_format=torch.contiguous_format)
        for chunk in _chunks(h, directions):
            x = kept[0] if kept else _project(h, directions[..., chunk])
            sine, cosine = coefficients[..., chunk, :, :].reshape(2, len(x), -1)
            grad_x = ctx.kernel.polynomial(x, sine, cosine)
            factors = directions[..., chunk], grad_x.view(*h.shape[:-3], -1, transposed.shape[-1])
            transposed.addmm_(*factors) if h.ndim == 3 else transposed.baddbmm_(*factors)
        return transposed.mT.reshape(h.shape), None, None, None


class _ThinEmpiricalCF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, directions: Tensor, knots: int, kernel: ThinKernel) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(h, directions)
        means = kernel.thin_means(*_as_runs(h, directions), knots)
        return means.view(2, *h.shape[:-3], *means.shape[2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        h, directions = _as_runs(*ctx.saved_tensors)
        sine, cosine = _coefficients(grad, h.shape[-2]).view(2, len(h), *grad.shape[-3:])
        gradient: Tensor = ctx.kernel.thin_gradient(h, directions, sine, cosine)
        return gradient.view(ctx.saved_tensors[0].shape), None, None, None


def _as_runs(h: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings and directions with a dimension of runs."""
    return (h, directions) if h.ndim == 4 else (h.unsqueeze(0), directions.unsqueeze(0))


def _coefficients(grad: Float[Tensor, "2 *runs slices views knots"], rows: int) -> Tensor:
    """Return the coefficients of sine and cosine in the derivative by a projection."""
    # d cos(kx) = -k sin(kx) dx and d sin(kx) = k cos(kx) dx, and each mean divides by the number of rows.
    return grad * (torch.arange(grad.shape[-1], dtype=grad.dtype, device=grad.device) / rows)
