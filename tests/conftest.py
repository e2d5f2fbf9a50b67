"""Shape annotations are checked in every test; thread counts are fixed so that timings and sums do not wander."""

from jaxtyping import install_import_hook

# With the numeric tower a float parameter takes an int, as type checkers have it.
install_import_hook("orthoworld", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("tests", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
