"""Shape annotations are checked in every test; thread counts are fixed so that timings and sums do not wander."""

import contextlib
import os

# Triton's programs run in its interpreter, on tensors of the CPU; it reads the variable when a program is defined, so
# this comes before every import. With TRITON_INTERPRET=0 and a GPU they are compiled and run there.
os.environ.setdefault("TRITON_INTERPRET", "1")

from jaxtyping import install_import_hook

# numba and Triton compile what they are given: it is imported before the hook can wrap it.
import orthoworld.objectives.kernels.loops

with contextlib.suppress(ImportError):  # Triton is for Linux alone
    import orthoworld.objectives.kernels.programs  # noqa: F401

# With the numeric tower a float parameter takes an int, as type checkers have it.
install_import_hook("orthoworld", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import subprocess  # noqa: E402
import sys  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import across_processes  # noqa: E402
from orthoworld import cli  # noqa: E402

settings.register_profile("tests", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def call(monkeypatch, capfd):
    """A function that runs the command in this process and returns its exit code, output and errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["orthoworld", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capfd.readouterr()
        return ended.value.code or 0, output, errors

    return call


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def alone():
    """What one process finds of all rows."""
    return across_processes.compute(0, across_processes.ROWS[1])


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """What each of two, and of three, processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    answer = subprocess.run([*launch, across_processes.__file__, folder], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]
