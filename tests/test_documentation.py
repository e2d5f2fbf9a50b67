"""Every code block of the README and the docs runs, and what they promise exists."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from orthoworld import bench, cli
from orthoworld.experiments.config import load_experiment
from orthoworld.experiments.slurm import split_assignments

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


SMALL_BENCH = {"SHAPES": ((64, 2, 8),) * 2, "SECONDS": 0.0, "TURN_MS": 0.1, "TRAINING_STEPS": 1, "SWEEP_SEEDS": (0,)}
"""What `orthoworld bench` is cut down to."""


def blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text())]


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_q1_python_blocks_run(page, block, capsys):
    exec(compile(block, page, "exec"), {})
    assert "Traceback" not in capsys.readouterr().out


def shell_lines() -> list[str]:
    lines = [line.partition("#")[0].strip() for _, block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("line", shell_lines())
def test_q1_shell_lines_name_commands_that_exist(line, monkeypatch, capsys):
    program, *arguments = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
        return
    assert program == "orthoworld"
    if arguments[0] == "run":
        _, experiment, *rest = arguments
        options = {"--preset": "quick", "--executor": "local"}
        while rest and any(part.startswith("--") for part in rest):
            index = next(i for i, part in enumerate(rest) if part.startswith("--"))
            if rest[index] in ("--dry-run", "--json"):
                del rest[index]
                continue
            name, value = rest[index : index + 2]
            assert name in ("--preset", "--out", "--workers", "--executor", "--group")
            options[name] = value
            del rest[index : index + 2]
        described, _ = split_assignments(rest, options["--executor"])
        assert load_experiment(experiment, options["--preset"]).overridden(described).runs()
    elif arguments[0] == "report":
        assert len(arguments) == 2
    else:
        for name, small in SMALL_BENCH.items():
            monkeypatch.setattr(bench, name, small)
        monkeypatch.setattr("sys.argv", ["orthoworld", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
        assert capsys.readouterr().out


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_whole_chain_runs_in_a_dozen_lines(capsys):
    import orthoworld as ow

    world = ow.World(ow.Gaussian(2), ow.OU(rho=0.95), ow.Spiral())
    encoder = ow.MLP(2, 2, width=256, depth=4)
    run = ow.train(world, encoder, ow.WhitenedLeJEPA(shape=1.0), steps=2000, batch=512, seed=0)

    pairs = world.sample_pairs(20_000, generator=torch.Generator().manual_seed(1))  # .z .z_next .x .x_next .r
    h, h_next = run.encode(pairs.x), run.encode(pairs.x_next)
    print(ow.recovery(pairs.z, h))  # held-out R2 both ways, orthogonality, Procrustes, intervals
    print(ow.bound(h, h_next, rho=0.95))  # delta, epsilon, D, the bound, intervals, floors
    print(ow.audit(h, h_next))  # the verdict, without the latents

    assert run.status == "finished"
    assert ow.recovery(pairs.z, h).r2_hz > 0.999
    assert "verdict: undecided" in capsys.readouterr().out

    generator = torch.Generator().manual_seed(0)
    loss = ow.SIGReg(slices=256)(h, generator=generator)
    assert loss.isfinite()
    for name in ("sigreg", "alignment", "whitening", "infonce"):
        assert callable(getattr(ow.functional, name))
