"""The package's errors: the message repeats the input and states the rule it broke. A wrong dtype is a `TypeError`."""


class OrthoworldError(Exception):
    """Base of the package's errors."""


class ArgumentError(OrthoworldError, ValueError):
    """An argument lies outside its domain."""


class ShapeError(ArgumentError):
    """A tensor does not have the shape a function needs."""


class ConfigError(ArgumentError):
    """A configuration names something unknown, lacks something, or holds a value of the wrong type."""


class MissingExtraError(OrthoworldError, ImportError):
    """An optional dependency is needed and not installed."""


class ResultError(OrthoworldError):
    """A run folder is incomplete, damaged, or being written by someone else."""
