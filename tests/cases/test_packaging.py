"""Cases Q3 and Q4 reported by users: what an import costs, and what a missing extra says."""

import json
import subprocess
import sys

import pytest

from orthoworld import cli
from orthoworld.errors import MissingExtraError
from orthoworld.results.figures.curves import curves_figure
from orthoworld.results.figures.recovered import recovered_figure
from orthoworld.results.report import write_reports

HEAVY = ["mujoco", "matplotlib", "pandas", "sklearn"]

LOADED = """
import json, sys

def main():
    from orthoworld.cli import main
    sys.argv = ["orthoworld", *sys.argv[1:]]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code

STATEMENT
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def loaded_after(statement, *arguments):
    script = LOADED.replace("STATEMENT", statement)
    answer = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout.splitlines()[-1]))


def test_q3_missing_extra(monkeypatch, capfd, tmp_path):
    for package in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, package, None)
    command = r"pip install orthoworld\[report\]"
    for call in (lambda: curves_figure({}), lambda: recovered_figure({}, {}), lambda: write_reports(tmp_path)):
        with pytest.raises(MissingExtraError, match=command):
            call()
        with pytest.raises(ImportError, match=command):
            call()
    monkeypatch.setattr(sys, "argv", ["orthoworld", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output, errors = capfd.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert errors == "orthoworld: matplotlib is not installed: pip install orthoworld[report]\n"


@pytest.mark.parametrize(
    ("statement", "arguments", "absent"),
    [
        ("import orthoworld", [], [*HEAVY, "torch", "scipy"]),
        ("import orthoworld; [getattr(orthoworld, name) for name in orthoworld.__all__]", [], HEAVY),
        ("import orthoworld.results.report", [], HEAVY),
        ("main()", ["--help"], [*HEAVY, "torch", "scipy"]),
        ("main()", ["run", "--help"], [*HEAVY, "torch", "scipy"]),
        ("main()", ["list"], HEAVY),
        ("main()", ["doctor"], HEAVY),
    ],
)
def test_q4_import_cost(statement, arguments, absent):
    loaded = loaded_after(statement, *arguments)
    assert "orthoworld" in loaded
    assert loaded.isdisjoint(absent)
