"""Work is shared among torch's threads, every part once, and what goes wrong there is heard of."""

import threading
import time

import pytest

from orthoworld.objectives.kernels import pool
from orthoworld.objectives.kernels.pool import share

POOLS = {"torch's pool": lambda: pool._pool, "own threads": lambda: lambda: None}


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def _either(request, monkeypatch):
    monkeypatch.setattr(pool, "_pool", request.param())


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_part_is_done_once(parts):
    done = []
    share(done.append, parts)
    assert sorted(done) == list(range(parts))


@pytest.mark.usefixtures("_either")
def test_parts_are_done_at_the_same_time():
    together = threading.Barrier(2, timeout=10)  # breaks if one part waits for the other to end
    share(lambda part: together.wait(), 2)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("parts", [1, 3])
def test_an_error_is_raised_after_all_have_stopped(parts):
    running = []

    def work(part):
        running.append(part)
        time.sleep(0.01)
        running.remove(part)
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part"):
        share(work, parts)
    assert running == []


@pytest.mark.usefixtures("_either")
def test_work_within_work_is_done_too():
    done = []
    share(lambda part: share(lambda inner: done.append((part, inner)), 2), 2)
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
