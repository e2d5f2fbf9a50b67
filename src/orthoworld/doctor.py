"""What this machine has, and how to get what is missing."""

import importlib.metadata
import os
import platform
import re

import torch

import orthoworld


def examine() -> dict[str, dict[str, str]]:
    """Return sections of findings, each a name and what was found."""
    needed = requirements()
    return {
        "machine": {
            "orthoworld": orthoworld.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processors": str(os.cpu_count()),
            "torch threads": str(torch.get_num_threads()),
        },
        "devices": {"cpu": "yes", "cuda": _cuda(), "mps": "yes" if torch.backends.mps.is_available() else "no"},
        "packages": {name: _version(name) or "missing: pip install orthoworld" for name in needed.pop("")},
        "extras": {extra: _extra(extra, packages) for extra, packages in needed.items()},
    }


def requirements() -> dict[str, list[str]]:
    """Return the packages that each extra for users brings; under the empty name those that are always needed."""
    needed: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires("orthoworld") or []:
        requirement, _, marker = line.partition(";")
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if package and not (extra and extra[1] == "dev"):
            needed.setdefault(extra[1] if extra else "", []).append(package[0])
    return needed


def _cuda() -> str:
    if torch.cuda.is_available():
        return f"yes, {torch.cuda.get_device_name()}"
    return "no" if torch.version.cuda else "no: this torch is built without it"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(extra: str, packages: list[str]) -> str:
    missing = [name for name in packages if _version(name) is None]
    return f"missing {', '.join(missing)}: pip install orthoworld[{extra}]" if missing else "installed"
