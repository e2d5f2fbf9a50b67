"""One batch over several processes: means over the rows of all of them, with gradients.

In a process group of torch.distributed every objective speaks of the global batch: each process passes its own rows, of
which it may have any number, and gets the global value. The gradient that arrives at a process's rows is that of the
sum of the values which all processes hold, so `world_size` times the gradient of the one value. The mean over processes
that `DistributedDataParallel` takes is then the gradient of the global batch. All processes have to make the same calls
in the same order, as for any collective; inside `this_process_only()` none of this happens.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_alone = contextvars.ContextVar("orthoworld_this_process_only", default=False)


@contextlib.contextmanager
def this_process_only() -> Iterator[None]:
    """Compute objectives from the rows of this process, in a process group or not; for an evaluation on rank 0, say.

    Example:
        >>> from orthoworld.functional import whitening
        >>> with this_process_only():
        ...     whitening(torch.eye(2), form="frobenius").item()  # Cov - I has four entries of -1/2
        1.0
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def processes() -> int:
    """Return how many processes hold the rows of a batch: those of the default process group, or this one alone."""
    distributed = torch.distributed
    if _alone.get() or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def global_mean(mean: Tensor, rows: int) -> tuple[Tensor, int | Float[Tensor, ""]]:
    """Return the mean over the rows of all processes, and their number.

    Args:
        mean: the mean over this process's rows, at least float32.
        rows: how many those are.

    Returns:
        The mean, differentiable, and the number of rows: a tensor in a process group, so that no device has to wait.
    """
    if processes() == 1:
        return mean, rows
    packed = torch.cat([mean.flatten() * rows, mean.new_tensor([rows])])
    *_, total = sums = _Sum.apply(packed)  # type: ignore[no-untyped-call]
    return (sums[:-1] / total).view_as(mean), total.detach()


def gathered_rows(h: Float[Tensor, "*runs batch dim"]) -> tuple[Float[Tensor, "*runs rows dim"], int]:
    """Return the rows of all processes, in the order of their ranks and differentiable, and where ours begin."""
    if processes() == 1:
        return h, 0
    counts = _counts(h.shape[-2], h.device)
    start = sum(counts[: torch.distributed.get_rank()])
    return _Gather.apply(h, counts, start), start  # type: ignore[no-untyped-call]


def total_rows(rows: int, device: torch.device) -> int:
    """Return the number of rows of all processes, of which this one has `rows`."""
    return rows if processes() == 1 else sum(_counts(rows, device))


def of_first_process(tensor: Tensor) -> Tensor:
    """Return the tensor that rank 0 passed, on every process."""
    if processes() > 1:
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, src=0)
    return tensor


def _counts(rows: int, device: torch.device) -> list[int]:
    own = torch.tensor([rows], device=device)
    counts = [torch.empty_like(own) for _ in range(processes())]
    torch.distributed.all_gather(counts, own)
    return torch.cat(counts).tolist()


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(result)
        return result

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = _Sum.apply(grad)  # type: ignore[no-untyped-call]
        return result


class _Gather(torch.autograd.Function):
    """The rows of all processes one after the other; a collective wants equal shapes, so shorter ones are padded."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, counts: list[int], start: int) -> Tensor:
        ctx.own = slice(start, start + h.shape[-2])
        padded = torch.nn.functional.pad(h, (0, 0, 0, max(counts) - h.shape[-2]))
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded)
        return torch.cat([part[..., :count, :] for part, count in zip(parts, counts, strict=True)], dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total: Tensor = _Sum.apply(grad)  # type: ignore[no-untyped-call]
        return total[..., ctx.own, :], None, None
