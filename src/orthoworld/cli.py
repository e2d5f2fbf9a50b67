"""The command line: a thin front. Torch is imported when a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from orthoworld.errors import ArgumentError, MissingExtraError, OrthoworldError

if TYPE_CHECKING:
    from orthoworld.experiments.config import RunSpec
    from orthoworld.experiments.sweep import Executor
    from orthoworld.results.store import StoredRun
    from orthoworld.results.sweep import Sweep

FAILURE, MISUSE, INTERRUPTED = 1, 2, 130
"""Exit codes: something failed; the user asked for what does not exist; stopped by a signal."""

app = typer.Typer(
    name="orthoworld",
    help="Train encoders that recover the state of a world, and measure how far any encoder is from it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, and nothing else.")]


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turn the package's errors into one line on standard error and an exit code; others too, unless debugging."""
    try:
        yield
    except BrokenPipeError:
        # The reader, `head` say, has what it wanted; Python must not write to the pipe once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if debug or isinstance(error, (typer.Exit, typer.Abort)):
            raise
        known = isinstance(error, OrthoworldError)
        text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        print(f"orthoworld: {' '.join(text.split())}", file=sys.stderr)
        raise typer.Exit(MISUSE if isinstance(error, (ArgumentError, MissingExtraError)) else FAILURE) from None


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment; `orthoworld list` shows them.")],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Such as seeds=[0,1], mixings=spiral, train.steps=2000; with --executor slurm also slurm.partition, "
            "slurm.time, slurm.account, slurm.cpus, slurm.mem, slurm.gpus and others.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="quick, paper or best.")] = "quick",
    executor: Annotated[Literal["local", "slurm"], typer.Option(help="Processes here, or jobs of SLURM.")] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, by default one for each processor; or jobs at a time, by default all."),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(min=1, help="Small runs trained as one program at most; 1 trains each as if it were alone."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it costs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Carry out the runs of an experiment that are not there yet, and print what they found."""
    with one_line_errors(debug):
        from orthoworld.experiments.config import load_experiment
        from orthoworld.experiments.slurm import check_devices, split_assignments
        from orthoworld.experiments.sweep import StopFlag, default_workers
        from orthoworld.results.slurm import slurm_is_here
        from orthoworld.results.sweep import Sweep, executor_of

        described, options = split_assignments(assignments or [], executor)
        specs = load_experiment(experiment, preset).overridden(described).runs()
        _check(specs, here=options is None)
        if options is not None:
            check_devices(specs, options)
        at_a_time = workers or (default_workers(specs) if options is None else None)
        sweep = Sweep(specs, out.absolute(), at_a_time, **({} if group is None else {"most": group}))
        if dry_run:
            _print_plan(sweep, executor, as_json)
            return
        if options is not None:
            slurm_is_here()
        _prepare(out)
        chosen = executor_of(sweep, options)
        with StopFlag().installed() as stop:
            found, failures = _carry_out(sweep, chosen, stop, as_json)
        if not as_json:
            _print_runs(found)
            print("* Theorem 3, with the latents as control variates; `bound` in metrics.json does without them")
            print(f"runs are kept in {out / specs[0].experiment}")
        for result in found:
            if result.metrics["status"] != "finished":
                reason = f"{result.metrics['status']}: {result.metrics['status_reason']}"
                print(f"orthoworld: {result.spec.run_id} {reason}", file=sys.stderr)
        _print_failures(failures, as_json)
        if stop():
            print(f"orthoworld: interrupted; {chosen.farewell()}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED)
        if failures or any(result.metrics["status"] == "diverged" for result in found):
            raise typer.Exit(FAILURE)


def _prepare(out: Path) -> None:
    """Make the folder of all runs."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out {out}: expected a folder that can be written ({error.strerror})") from None


def _check(specs: list[RunSpec], *, here: bool) -> None:
    """Build every part of the runs once, so that a bad option is told before the first step of the first run."""
    from orthoworld.devices import device_of
    from orthoworld.experiments.build import build_encoder, build_objective, build_recipes, build_world

    encoders: set[str] = set()
    for spec in specs:
        if here:  # a job may be on a machine with other devices
            device_of(spec.train.device)
        parts = f"{spec.world} {spec.encoder} {spec.out_dim}"
        if parts not in encoders:  # with other seeds they have the same options
            encoders.add(parts)
            build_encoder(spec, build_world(spec.world, spec.seed))
        build_objective(spec)
        build_recipes(spec)


def _carry_out(
    sweep: Sweep, executor: Executor, stop: Callable[[], bool], as_json: bool
) -> tuple[list[StoredRun], dict[str, str]]:
    """Carry out a sweep with a live table on standard error; return the finished runs, and why others failed."""
    from orthoworld.results.live import LiveTable

    found: dict[str, StoredRun] = {}
    failures: dict[str, str] = {}
    with LiveTable(sweep.specs) as table:
        for event in sweep.carry_out(executor, stop):
            table.update(event)
            if event.kind == "failed":
                failures[event.run_id] = event.value.strip().splitlines()[0].removeprefix("ResultError: ")
            elif event.kind == "done":
                found[event.run_id] = event.value
                if as_json:
                    print(json.dumps(_row(event.value), allow_nan=False), flush=True)
    order = [spec.run_id for spec in sweep.specs]
    if as_json:
        for spec in sweep.specs:
            if spec.run_id in failures:
                print(json.dumps(_failed_row(spec, failures[spec.run_id])), flush=True)
    return [found[run] for run in order if run in found], {run: failures[run] for run in order if run in failures}


def _row(result: StoredRun) -> dict[str, Any]:
    """Return the JSON object of a run: its id, every field of its spec under its dotted key, and every metric."""
    from orthoworld.results.tables import flatten

    return {"run_id": result.spec.run_id, **dict(flatten(result.spec.resolved())), **result.metrics}


def _failed_row(spec: RunSpec, reason: str) -> dict[str, Any]:
    """Return the JSON object of a run that has no metrics."""
    from orthoworld.results.tables import flatten

    return {"run_id": spec.run_id, **dict(flatten(spec.resolved())), "status": "failed", "status_reason": reason}


def _print_failures(failures: dict[str, str], as_json: bool) -> None:
    """Say which runs failed and why, in a table on standard error, or a line each."""
    if as_json or not failures:
        for run_id, reason in failures.items():
            print(f"orthoworld: {run_id} failed: {reason}", file=sys.stderr)
        return
    table = Table("failed", "why", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"
    for run_id, reason in failures.items():
        table.add_row(run_id, reason)
    Console(stderr=True, width=None if sys.stderr.isatty() else 250).print(table)


def _print_plan(sweep: Sweep, executor: str, as_json: bool) -> None:
    """Print what a sweep would do."""
    from orthoworld.results.live import duration
    from orthoworld.results.sweep import plan_of

    plan = plan_of(sweep, executor)
    if as_json:
        print(json.dumps(plan, allow_nan=False))
        return
    at_a_time = "all at a time" if plan["workers"] is None else f"{plan['workers']} at a time"
    print(f"{plan['experiment']}: {plan['runs']} runs, {plan['finished']} finished, {plan['missing']} to do")
    print(f"{plan['groups']} groups ({plan['together']} runs trained together), {at_a_time}, {plan['executor']}")
    if plan["estimate_reason"]:
        print(f"no estimate: {plan['estimate_reason']}")
    else:
        print(
            f"training takes about {duration(plan['wall_s'])}, {duration(plan['compute_s'])} of computing: an estimate"
        )
        print(f"from a few steps here of {plan['measured']} of {plan['kinds']} kinds of groups, without evaluations")


def _print_runs(results: list[StoredRun]) -> None:
    table = Table("mixing", "objective", "seed", "status", box=box.SIMPLE_HEAD)
    for heading in ("R2(h->z)", "orth. error", "bound*", "true error", "seconds"):
        table.add_column(heading, justify="right")
    for column in table.columns:
        column.no_wrap = True
    for result in results:
        spec, metrics = result.spec, result.metrics
        numbers = [metrics.get(key) for key in ("r2_hz", "orth_err", "bound_controlled", "true_error")]
        table.add_row(
            spec.world.mixing.name,
            spec.objective.name,
            str(spec.seed),
            metrics["status"],
            *("-" if number is None else f"{number:.5f}" for number in numbers),
            f"{metrics['wall_s']:.0f}",
        )
    # A pipe has no width of its own: nothing is cut off there.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, such as runs or runs/two-d.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when the folder holds what is no finished run.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write tables (csv, md, tex), figures (pdf, png) and index.html beside the runs, and print the table."""
    with one_line_errors(debug):
        from orthoworld.results.report import write_reports

        incomplete = False
        for written in write_reports(folder):
            incomplete |= bool(written.skipped)
            if as_json:
                summary = {"experiment": written.experiment, "folder": str(written.folder), "runs": written.runs}
                print(json.dumps({**summary, "skipped": written.skipped}))
                continue
            print(written.summary)
            print(f"{written.runs} finished runs; tables and index.html are in {written.folder}")
            print(f"figure: {written.folder / 'recovered.png'}")
            for name, why in written.skipped.items():
                print(f"left out: {name}: {why}", file=sys.stderr)
        if strict and incomplete:
            raise typer.Exit(FAILURE)


@app.command("list")
def list_everything(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show the experiments, worlds, mixings, objectives and encoders there are, with their options."""
    with one_line_errors(debug):
        from orthoworld.experiments import config

        experiments = {name: config.experiment_description(name) for name in config.experiment_names()}
        registries = {
            "sources": config.SOURCES,
            "transitions": config.TRANSITIONS,
            "mixings": config.MIXINGS,
            "encoders": config.ENCODERS,
            "objectives": config.OBJECTIVES,
            "optimizers": config.OPTIMIZERS,
            "schedules": config.SCHEDULES,
        }
        options = {
            kind: {name: _options(choice) for name, choice in registry.items()} for kind, registry in registries.items()
        }
        if as_json:
            print(json.dumps({"experiments": experiments, **options}))
            return
        print("experiments")
        for name, description in experiments.items():
            print(f"  {name:<24}{description}")
        for kind, choices in options.items():
            print(kind)
            for name, values in choices.items():
                print(f"  {name:<24}{', '.join(f'{key}={value}' for key, value in values.items())}".rstrip())


def _options(choice: Any) -> dict[str, Any]:
    """Return the options of a named part with their defaults; `required` where there is none."""
    fields = {key: field for key, field in choice.model_fields.items() if key != "name"}
    return {key: "required" if field.is_required() else field.default for key, field in fields.items()}


@app.command()
def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show versions and devices, and how to get what is missing."""
    with one_line_errors(debug):
        from orthoworld.doctor import examine

        findings = examine()
        if as_json:
            print(json.dumps(findings))
            return
        for section, entries in findings.items():
            print(section)
            for name, value in entries.items():
                print(f"  {name:<24}{value}")


@app.command()
def bench(
    sections: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION]...", help="kernel, memory, step, ensemble, experiment; all by default."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time us against the textbook form and installed peers; every ratio is of medians taken in turn."""
    with one_line_errors(debug):
        import torch

        from orthoworld import bench

        if threads is not None:
            torch.set_num_threads(threads)
        if not as_json:
            print(", ".join(f"{name} {value}" for name, value in bench.machine().items()))
        for row in bench.run(sections or []):
            if as_json:
                print(json.dumps(_finite({**dataclasses.asdict(row), **bench.machine()}), allow_nan=False), flush=True)
                continue
            times = "" if row.peak_mb is not None else f"{row.ours_ms:.2f} ms, {row.against} {row.textbook_ms:.2f} ms, "
            peers = "".join(f", {name} {ratio:.1f}" for name, ratio in row.peers.items())
            note = f" ({row.note})" if row.note else ""
            print(f"{row.section:<12}{row.case:<36}{times}ratio {row.ratio:.1f}{peers}{note}", flush=True)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with null in the place of what was not measured."""
    return {key: None if value != value else value for key, value in row.items()}


def main() -> None:
    """Run the command line; a misuse typer finds is told in one line, as all others are."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        if message:  # without a command the help has been shown, and there is nothing to add
            print(f"orthoworld: {message}", file=sys.stderr)
        code = MISUSE
    except typer.Abort:
        code = INTERRUPTED
    sys.exit(code)
