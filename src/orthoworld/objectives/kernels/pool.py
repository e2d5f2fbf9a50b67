"""The threads of torch's own pool, for compiled loops that release the interpreter's lock.

After a parallel operation those threads wait for the next one busily, for some milliseconds. Threads of our own would
have to share the processors with them, and gain nothing between torch's operations, which is where a loss is computed.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from importlib import resources

import torch

Work = Callable[[int], None]
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share(work: Work, parts: int) -> None:
    """Call `work(part)` for every part, as many at a time as there are threads in torch's pool; or raise as it does."""
    numbers, errors = itertools.count(), []

    def body(_: object = None) -> None:
        try:
            while (part := next(numbers)) < parts:  # a team may have fewer threads than were asked for
                work(part)
        except BaseException as error:  # it must not end in the pool, where nobody hears of it
            errors.append(error)

    run_together = _pool() if parts > 1 else None
    if run_together is not None:
        run_together(_Body(body), None, parts, 0)
    else:
        _in_own_threads(body, parts)
    if errors:
        raise errors[0]


def _in_own_threads(body: Callable[[], None], parts: int) -> None:
    """Run `body` in this thread and in others that live as long as the call: none is left for a fork or an exit."""
    threads = [threading.Thread(target=body) for _ in range(parts - 1)]
    for thread in threads:
        thread.start()
    body()
    for thread in threads:
        thread.join()


@functools.cache
def _pool() -> Callable[..., None] | None:
    """Return the entry of GNU OpenMP that runs a function in every thread of a team, of the library torch brought."""
    for library in resources.files(torch).joinpath("lib").iterdir():
        if not library.name.startswith("libgomp"):
            continue
        entry: Callable[..., None] = ctypes.CDLL(str(library)).GOMP_parallel
        entry.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]  # type: ignore[attr-defined]
        entry.restype = None  # type: ignore[attr-defined]
        return entry
    return None
