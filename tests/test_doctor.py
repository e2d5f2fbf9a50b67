"""What the doctor finds, and what it says is missing."""

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import orthoworld
from orthoworld import doctor

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lacking(*packages):
    found = importlib.metadata.version

    def version(name):
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    return version


def test_versions_are_those_that_are_installed():
    found = doctor.examine()
    assert found["machine"]["orthoworld"] == orthoworld.__version__
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["machine"]["torch threads"] == str(torch.get_num_threads())


def test_findings_are_text():
    found = doctor.examine()
    assert json.loads(json.dumps(found)) == found
    assert all(isinstance(value, str) for entries in found.values() for value in entries.values())


def test_every_dependency_and_extra_for_users_is_looked_at():
    declared = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    del declared["dev"]
    names = {extra: {canonicalize_name(Requirement(text).name) for text in texts} for extra, texts in declared.items()}
    found = doctor.requirements()
    assert {extra: {canonicalize_name(name) for name in packages} for extra, packages in found.items()} == names


def test_missing_package_comes_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lacking("matplotlib", "jinja2", "scipy"))
    found = doctor.examine()
    assert found["extras"]["report"] == "missing jinja2, matplotlib: pip install orthoworld[report]"
    assert found["packages"]["scipy"] == "missing: pip install orthoworld"
    assert found["packages"]["numpy"] == importlib.metadata.version("numpy")


def test_complete_extra_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    assert set(doctor.examine()["extras"].values()) == {"installed"}


@pytest.mark.parametrize(
    ("available", "built", "expected"),
    [
        (True, "12.8", "yes, a card"),
        (False, "12.8", "no"),
        (False, None, "no: this torch is built without it"),
    ],
)
def test_graphics_card_is_named_or_its_absence_explained(monkeypatch, available, built, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.version, "cuda", built)
    assert doctor.examine()["devices"]["cuda"] == expected
