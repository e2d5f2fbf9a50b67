"""Optional dependencies."""

import math
import sys

import pytest

from orthoworld.errors import MissingExtraError, OrthoworldError
from orthoworld.extras import require


def test_module_that_is_there_is_imported():
    assert require("math", "report") is math
    assert require("xml.dom", "report").__name__ == "xml.dom"


@pytest.mark.parametrize("extra", ["report", "reacher"])
def test_missing_module_names_itself_and_its_extra(extra):
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_module", extra)
    assert str(caught.value) == f"no_such_module is not installed: pip install orthoworld[{extra}]"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_missing_extra_can_be_caught_as_an_import_error():
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(MissingExtraError, OrthoworldError)


def test_module_that_is_blocked_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "json.tool", None)
    with pytest.raises(MissingExtraError, match=r"json\.tool is not installed"):
        require("json.tool", "report")


def test_broken_module_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_orthoworld_extra.py").write_text("raise ImportError('libfoo.so: cannot open shared object')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"libfoo\.so"):
        require("broken_orthoworld_extra", "report")
