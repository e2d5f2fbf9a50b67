"""Optional dependencies, imported when they are needed."""

import importlib
from types import ModuleType

from orthoworld.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: its import name.
        extra: the extra of this package that installs it.

    Raises:
        MissingExtraError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something of its own
        raise MissingExtraError(f"{module} is not installed: pip install orthoworld[{extra}]") from error
