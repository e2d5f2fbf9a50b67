"""What a user may ask of SLURM."""

import pytest

from orthoworld.errors import ConfigError
from orthoworld.experiments.slurm import check_devices, split_assignments
from small_runs import small_specs


def asked(*assignments):
    return split_assignments(assignments, "slurm")[1]


def test_keys_of_slurm_are_kept_apart_from_those_of_the_runs():
    described, options = split_assignments(
        ["seeds=[0]", "slurm.partition=cpu", "train.steps=3", "slurm.mem=8GB"], "slurm"
    )
    assert described == ["seeds=[0]", "train.steps=3"]
    assert (options.partition, options.mem, options.minutes) == ("cpu", "8GB", 60)


def test_local_sweeps_have_no_options_of_slurm():
    assert split_assignments(["seeds=[0]"], "local") == (["seeds=[0]"], None)


@pytest.mark.parametrize(
    ("given", "minutes"),
    [
        ("90", 90),
        ("2:00:00", 120),
        ("30:00", 30),
        ("10:30", 11),
        ("1-0", 1440),
        ("1-12:30", 2190),
        ("2-00:00:01", 2881),
    ],
)
def test_times_are_read_as_slurm_writes_them(given, minutes):
    assert asked(f"slurm.time={given}").minutes == minutes


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("slurm.partion=cpu", ["unknown key slurm.partion", "did you mean partition?", "account", "gpus"]),
        ("slurm.cpus=two", ["slurm.cpus='two'", "integer"]),
        ("slurm.cpus=0", ["slurm.cpus=0", "greater than or equal to 1"]),
        ("slurm.time=tomorrow", ["slurm.time='tomorrow'", "hours:minutes:seconds"]),
        ("slurm.time=1", ["slurm.time=1", "slurm.grace=90"]),
        ("slurm.mem", ["'slurm.mem'", "key=value"]),
        ("slurm.extra=fast", ["slurm.extra='fast'", "dictionary"]),
    ],
)
def test_misuse_names_the_key_and_the_rule(assignment, told):
    with pytest.raises(ConfigError) as caught:
        asked(assignment)
    for part in told:
        assert part in str(caught.value)


def test_keys_of_slurm_are_refused_elsewhere():
    with pytest.raises(ConfigError, match=r"^slurm\.time=60: expected with --executor slurm only"):
        split_assignments(["slurm.time=60"], "local")


def test_graphics_processors_that_no_run_uses_are_refused():
    options = asked("slurm.gpus=1")
    check_devices(small_specs("train.device=cuda"), options)
    with pytest.raises(ConfigError, match=r"slurm\.gpus=1.*train\.device"):
        check_devices(small_specs(), options)
