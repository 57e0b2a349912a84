"""`ppoctl compare`: the differences between two runs and between their samples, or between two evaluations."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, found_run, run_names
from ppoctl.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.store.compare import Comparison
    from ppoctl.store.compare_evaluations import ComparedSet


def compare(
    run: RunArgument,
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", help="Another run.", callback=found_run, autocompletion=run_names)
    ],
    evaluations: Annotated[
        bool,
        typer.Option(
            "--eval",
            help="Compare evaluations: the newest of each run, or `80-eval` folders, or files from `eval --out`.",
        ),
    ] = False,
    shown: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="With --eval: list at most N changed prompts per set.")
    ] = 10,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with code 10 if samples (with --eval: scores) differ, else with code 0."
        ),
    ] = False,
    json: JsonOption = False,
) -> int | None:
    """Compare two runs, or two evaluations. For runs, prints the differences in recipe, sources, versions and
    metrics, and the first sample that differs, in ledger order. With --eval, compares evaluations prompt by prompt,
    and prints the difference of their scores with its confidence interval and p-value."""
    if evaluations:
        differ = _compare_evaluations(run, other, shown, as_json=json)
    else:
        differ = _compare_runs(run, other, as_json=json)
    return int(ExitCode.DIFFERENT) if exit_code and differ else None


def _compare_runs(run: Path, other: Path, *, as_json: bool) -> bool:
    """Print the differences between two runs, and return whether the samples of the runs differ."""
    from ppoctl.cli import differences
    from ppoctl.store import run_dir
    from ppoctl.store.compare import compare as side_by_side
    from ppoctl.store.run_paths import RunPaths

    left, right = RunPaths(run), RunPaths(other)
    for paths in (left, right):
        run_dir.facts(paths)
    found = differences.differences(left, right)
    samples = side_by_side(left.ledger, right.ledger)
    if as_json:
        render.json({**differences.as_json(found), **asdict(samples)})
    else:
        differences.print_differences(found, (run, other))
        _print_samples(samples, run, other)
    return samples.first is not None


def _print_samples(found: "Comparison", run: Path, other: Path) -> None:
    render.line(f"equal samples: {found.equal_samples} of {found.samples[0]} and {found.samples[1]}")
    render.line(f"equal steps: {found.last_equal_step}")
    for folder, steps in zip((run, other), found.lost_steps, strict=True):
        if steps:
            render.line(f"skipped, missing in the ledger of {folder}: {', '.join(map(str, steps))}")
    if found.first is None:
        render.line("no difference")
        return
    first = found.first
    prompt = render.printable(first.prompt)
    render.line(f"first difference: step {first.step}, prompt {prompt}, sample {first.sample}")
    render.table([(name, *map(str, values)) for name, values in first.what.items()], ("", str(run), str(other)))


def _compare_evaluations(left: Path, right: Path, shown: int, *, as_json: bool) -> bool:
    """Print the differences between two evaluations.

    Returns whether a score differs, or is in only one of the two evaluations.
    """
    from ppoctl.store import eval_samples
    from ppoctl.store.compare_evaluations import compare_evaluations, not_compared

    both = eval_samples.read(left), eval_samples.read(right)
    found = compare_evaluations(*both)
    alone = not_compared(*both, found)
    if as_json:
        render.json({"sets": [asdict(each) for each in found], "not_compared": alone})
    else:
        _print_evaluations(found, alone, (str(left), str(right)), shown)
    return bool(alone) or any(each.changed or each.left_out for each in found)


def _print_evaluations(
    found: "Sequence[ComparedSet]", alone: "Sequence[str]", sides: tuple[str, str], shown: int
) -> None:
    rows = []
    for each in found:
        difference = each.difference
        scores = (f"{score:.4g}" for score in each.scores)
        interval = "" if difference.low is None else f" [{difference.low:+.4f}, {difference.high:+.4f}]"
        effect = "-" if difference.effect is None else f"{difference.effect:+.2f}"
        numbers = (f"{difference.mean:+.4f}{interval}", effect, f"{difference.p_value:.2g}")
        rows.append((f"{each.set} {each.mode}", str(difference.pairs), *scores, *numbers))
    head = ("set", "prompts", *sides, "difference [95 %]", "effect", "p")
    render.table(rows, head)
    for each in found:
        pairs = each.difference
        render.line()
        left_out = f", {each.left_out} not compared (no score in one of the two)" if each.left_out else ""
        equal = pairs.pairs - pairs.better - pairs.worse
        render.line(f"{each.set} {each.mode}: {pairs.better} better, {pairs.worse} worse, {equal} equal{left_out}")
        changed = [
            (render.printable(row.prompt), *(f"{score:.4g}" for score in row.scores)) for row in each.changed[:shown]
        ]
        if changed:
            render.table(changed, ("prompt", *sides))
        if len(each.changed) > shown:
            render.line(f"and {len(each.changed) - shown} more: --show {len(each.changed)}")
    if alone:
        render.line()
        render.line(f"not compared, because no prompt has a score in both: {', '.join(alone)}")
