"""Time everything and write `docs/performance.md`.

Usage: python benchmarks/performance.py

About ten minutes; leave the machine alone meanwhile.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from orthoworld.bench import medians

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = (
    ["bench", "kernel", "memory", "step", "experiment", "--threads", "1"],
    ["bench", "kernel", "ensemble", "--threads", "2"],
)

SINE_AND_COSINE = 24
"""Operations of the two series and of the block's test of its angles."""

KNOT_FORWARD = 8
KNOT_BACKWARD = 8
"""A complex product has six operations; forward adds two sums, backward two coefficients."""

INTRODUCTION = """# Performance

Made by `python benchmarks/performance.py` from the commands below. A ratio is one of medians of calls that take turns
in one process; forward and backward, float32, 17 knots. The textbook form builds the tensor of all rows, slices and
knots. `orthoworld run` carries out as many runs at a time as there are processors, with one thread each.
"""

WHOLE_RUN = """## A whole run

`python benchmarks/whole_run.py` times the published spiral run of 20,000 steps, evaluation included, and the same run
with the textbook's SIGReg, one thread, one after the other: 265 s and 1,365 s, a ratio of 5.2.
"""
"""Half an hour: not made anew with the page."""

WHY = """## Why it is so

- The knots are equally spaced, so one sine and cosine of a projection give all of them, and the gradient is a
  trigonometric polynomial. Powers of `exp(ix)` follow by complex multiplication and the gradient by Horner's rule: as
  many operations as Chebyshev's and Clenshaw's recurrences take, and no loss of digits near 0, where a collapsing
  embedding ends, or near pi. Angles beyond pi/4 are reduced in float64. `python benchmarks/accuracy.py` compares value
  and gradient with float64 at a hundred thousand random shapes and scales.
- numba compiles the loops (extra `fast`): a block of rows stays in the first-level cache, and sums over blocks are
  float64. Every other device and type has torch's operations; inductor would need a compiler at run time. On a GPU
  Triton's programs do the same in one pass over the projections; `python benchmarks/gpu.py` checks and times them.
- Two threads are those of torch's own pool. Threads of our own would share the processors with it: its threads wait
  busily after each operation.
- Projections are made for as many slices as a cache holds, and again for the gradient, which costs less than keeping
  them. Up to four dimensions the loops project by themselves.
- An ensemble shares the cost of a step in the interpreter and in torch among its runs, so it pays for small encoders.
"""


def main() -> None:
    """Time and write the page."""
    parts = [INTRODUCTION]
    rows: list[dict[str, Any]] = []
    for command in COMMANDS:
        measured = run([*command, "--json"])
        rows += measured
        parts.append(section(command, measured))
    parts += [WHOLE_RUN, roofline([row for row in rows if row["threads"] == "1"]), WHY]
    (ROOT / "docs" / "performance.md").write_text("\n".join(parts))


def run(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of `orthoworld ARGUMENTS`."""
    program = str(Path(sys.executable).with_name("orthoworld"))
    answer = subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def section(command: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the page that shows the output of a command."""
    facts = rows[0]
    machine = f"{facts['processor']}, {facts['cpus']} CPUs, torch {facts['torch']}, threads {facts['threads']}"
    lines = [
        f"## {facts['threads']} thread{'s' if facts['threads'] != '1' else ''}\n",
        f"```sh\northoworld {' '.join(command)}\n```\n",
        f"{machine}; kernel `{facts['kernel']}`; absent: {facts['absent']}.\n",
        "| section | case | ms | beside | ms | ratio | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(table_row, rows)]) + "\n"


def table_row(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    peers = [f"{name} takes {ratio:.1f} times as long" for name, ratio in row["peers"].items()]
    notes = "; ".join([*peers, *([row["note"]] if row["note"] else [])])
    ours, theirs = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("ours_ms", "textbook_ms"))
    cells = [row["section"], row["case"], ours, row["against"], theirs, f"{row['ratio']:.1f}", notes]
    return f"| {' | '.join(cells)} |"


def roofline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the task needs beside what one thread takes for it."""
    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    (ms,) = medians([lambda: a @ a], seconds=2)
    rate = 2 * 1024**3 / ms / 1e6
    lines = [
        "## How far from the machine's limit\n",
        f"One thread multiplies 1024 x 1024 matrices at {rate:.0f} GFLOP/s, which stands for the limit of arithmetic.",
        "For n rows, d dimensions and S slices the task needs two matrix products, 4 n d S operations, and for each",
        f"projection {SINE_AND_COSINE} for sine and cosine, forward and again backward, and "
        f"{KNOT_FORWARD + KNOT_BACKWARD} for each of 16 knots.",
        "It must read and write 8 n d bytes, which is nothing beside them.\n",
        "| case | operations | bytes | at the limit | measured | share |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["section"] != "kernel" or " x " not in row["case"]:
            continue
        n, rest = row["case"].split(" x ")
        d, slices = rest.removesuffix(" slices").split(", ")
        projections = int(n) * int(slices)
        work = 4 * projections * int(d) + projections * (2 * SINE_AND_COSINE + 16 * (KNOT_FORWARD + KNOT_BACKWARD))
        least_ms = work / rate / 1e6
        needed = f"{work / 1e6:.0f} million | {8 * int(n) * int(d) / 1e6:.2f} million | {least_ms:.2f} ms"
        lines.append(f"| {row['case']} | {needed} | {row['ours_ms']:.2f} ms | {least_ms / row['ours_ms']:.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
