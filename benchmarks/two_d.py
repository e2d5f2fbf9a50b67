"""Reproduce the two-dimensional worlds and write `docs/two-d.md` from the finished runs.

Usage: python benchmarks/two_d.py [--out FOLDER]

Runs what is missing, about half an hour on two cores, then writes the page and its figures.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from orthoworld.results.report import write_reports
from orthoworld.results.store import collect

ROOT = Path(__file__).resolve().parents[1]

SECTIONS: dict[str, tuple[str, list[str]]] = {
    "quick": (
        "What `make run` does: the whitened objective (1,000 steps of 512) beside the published sum (2,000 of 256).",
        [],
    ),
    "best": ("The whitened objective, Muon, 4,000 steps of 1,024, one encoder for all mixings.", []),
    "paper": (
        "One of the 24 published runs: pairs of two children of one parent (correlation .9025), 20,000 steps of 256. "
        "Published, mean of three seeds of the lambda-rho grid: R2 .985, orthogonality error .336.",
        ["mixings=spiral", "objectives=lejepa", "seeds=1337"],
    ),
}
"""Preset to what it shows, and the assignments that choose its runs."""


def main() -> None:
    """Run the presets and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "two-d-page")
    arguments = parser.parse_args()
    parts = [
        "# The two-dimensional worlds\n",
        "Made by `python benchmarks/two_d.py`; every table is that of `orthoworld report`. R2 is held out: fitted on "
        "one half, scored on the other. The orthogonality error is `||A^T A - I||_F / sqrt 2`. The bound is that of "
        "Theorem 3, with the latents as control variates. Mean and standard deviation over seeds.\n",
    ]
    for preset in SECTIONS:
        parts.append(section(preset, arguments.out / preset))
    (ROOT / "docs" / "two-d.md").write_text("\n".join(parts))


def section(preset: str, out: Path) -> str:
    """Run one preset and return its part of the page."""
    description, assignments = SECTIONS[preset]
    command = ["run", "two-d", "--preset", preset, *assignments]
    program = str(Path(sys.executable).with_name("orthoworld"))
    subprocess.run([program, *command, "--out", str(out)], check=True)
    (report,) = write_reports(out / "two-d")
    figures = ROOT / "docs" / "figures"
    figures.mkdir(exist_ok=True)
    for name in ("recovered", "curves"):
        shutil.copy(report.folder / f"{name}.png", figures / f"two-d-{preset}-{name}.png")
    runs = collect(out / "two-d").runs
    return "\n".join(
        [
            f"## {preset}\n",
            f"{description} Runs: {len(runs)}.\n",
            f"```sh\northoworld {' '.join(command)}\n```\n",
            report.summary,
            f"![Latents, observations, recovered latents](figures/two-d-{preset}-recovered.png)\n",
            f"![Training curves](figures/two-d-{preset}-curves.png)\n",
        ]
    )


if __name__ == "__main__":
    main()
