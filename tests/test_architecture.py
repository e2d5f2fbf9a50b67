"""Imports go one way along the chain, and the package keeps to its own rules."""

import ast
import re
from pathlib import Path

import pytest

import orthoworld

PACKAGE = Path(orthoworld.__file__).parent

CHAIN = [
    {"errors", "checks", "streams", "extras", "devices", "__init__"},
    {"worlds"},
    {"encoders"},
    {"objectives"},
    {"functional"},
    {"training"},
    {"identifiability"},
    {"experiments"},
    {"results"},
    {"audit", "bench", "doctor"},
    {"cli"},
]
"""Parts of the package in the order in which they may import one another: from their own level and those before."""

LEVEL = {part: level for level, parts in enumerate(CHAIN) for part in parts}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def imported_parts(source: str) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides where it comes from"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("orthoworld.")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_imports_only_from_before(module):
    own = LEVEL[part_of(module)]
    later = {part for part in imported_parts((PACKAGE / module).read_text()) if LEVEL.get(part, -1) > own}
    assert not later


def test_every_part_has_its_place_in_the_chain():
    assert {part_of(module) for module in MODULES} == set(LEVEL)


def test_a_wrong_import_would_be_seen():
    assert imported_parts("from orthoworld.results.store import collect") == {"results"}
    assert LEVEL["results"] > LEVEL["worlds"]


@pytest.mark.parametrize("part", ["worlds", "encoders", "objectives", "identifiability"])
def test_libraries_neither_print_nor_touch_files_nor_read_configuration(part):
    for module in MODULES:
        if part_of(module) == part:
            source = (PACKAGE / module).read_text()
            assert not re.search(r"\bprint\(|\bopen\(|pathlib|import yaml|pydantic", source), module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_hidden_device_and_no_global_random_state(module):
    source = (PACKAGE / module).read_text()
    assert not re.search(r"device=[\"']cuda|\.cuda\(\)|torch\.manual_seed|np\.random\.seed|random\.seed\(", source)


def test_public_names_resolve_are_sorted_and_documented():
    assert list(orthoworld.__all__) == sorted(orthoworld.__all__)
    for name in orthoworld.__all__:
        assert getattr(orthoworld, name).__doc__, name
