"""What a user may ask of SLURM, under the names of the command line: `slurm.partition=... slurm.time=...`."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from orthoworld.errors import ConfigError
from orthoworld.experiments.config import RunSpec, Spec, load_yaml, parse

PREFIX = "slurm."

TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<clock>\d+(?::\d+){1,2}))")
"""`days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`, `minutes:seconds`, `hours:minutes:seconds`."""


class SlurmSpec(Spec):
    """The jobs of a sweep.

    Attributes:
        partition, account, qos, constraint, nodelist, exclude: as in `sbatch`; by default the cluster's own.
        time: longest time of a job, in minutes or as SLURM writes times, such as `2:00:00` or `1-12`. A job that needs
            more keeps its state and goes back into the queue.
        cpus: processors of a job; by default as many as the runs have threads.
        mem: memory of a job, such as `8GB`.
        gpus: graphics processors of a job.
        grace: seconds before the end of its time at which a job is told to keep its state.
        timeouts: how often a job may use up its time.
        extra: further options of `sbatch`, such as `{reservation: week}`.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time: int | str = 60
    cpus: int | None = Field(default=None, ge=1)
    mem: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    grace: int = Field(default=90, ge=1)
    timeouts: int = Field(default=20, ge=0)
    extra: dict[str, str | int] = Field(default_factory=dict)

    @property
    def minutes(self) -> int:
        """The time of a job in minutes.

        Raises:
            ConfigError: it is no time as SLURM writes it.
        """
        return self.time if isinstance(self.time, int) else _minutes(self.time)


def _minutes(text: str) -> int:
    match = TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"slurm.time={text!r}: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    days = int(match["days"] or 0)
    parts = [int(part) for part in (match["of_day"] or match["clock"]).split(":")]
    if match["clock"] and len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 24 * 60 * days + 60 * hours + minutes + (seconds > 0)


def split_assignments(assignments: Sequence[str], executor: str) -> tuple[list[str], SlurmSpec | None]:
    """Return the assignments that describe the runs, and what the others ask of SLURM, if it is the executor.

    Raises:
        ConfigError: a key of SLURM is unknown, has a wrong value, or is given for another executor.
    """
    of_slurm = [assignment for assignment in assignments if assignment.startswith(PREFIX)]
    if executor != "slurm":
        if of_slurm:
            raise ConfigError(f"{of_slurm[0]}: expected with --executor slurm only, and this is --executor {executor}")
        return list(assignments), None
    data: dict[str, Any] = {}
    for assignment in of_slurm:
        key, equals, text = assignment.removeprefix(PREFIX).partition("=")
        if not equals:
            raise ConfigError(f"{assignment!r}: expected key=value, such as slurm.time=60")
        data[key] = load_yaml(text, assignment)
    options = parse(SlurmSpec, data, "slurm")
    if 60 * options.minutes <= options.grace:
        raise ConfigError(f"slurm.time={options.time!r}: expected more than slurm.grace={options.grace} seconds")
    return [assignment for assignment in assignments if assignment not in of_slurm], options


def check_devices(specs: Sequence[RunSpec], options: SlurmSpec) -> None:
    """Refuse graphics processors that no run uses.

    Raises:
        ConfigError: they are asked for, and a run is trained on the CPU.
    """
    if options.gpus and any(spec.train.device == "cpu" for spec in specs):
        raise ConfigError(
            f"slurm.gpus={options.gpus}: expected runs that use them, and train.device is cpu; set it too"
        )
