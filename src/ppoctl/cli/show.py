"""`ppoctl show`: print one sample of a step or an evaluation in full, or a list of samples."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppoctl.cli import pager, render, sample_list, sample_screen
from ppoctl.cli.options import JsonOption, RunArgument, open_run
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.sample_query import SampleFilter, Source
    from ppoctl.store.stored_samples import SampleRow

# These names equal the names in `batch.scores`. A test compares them.
Finish = Literal["terminated", "truncated"]
Outcome = Literal["ok", "timeout", "error", "unreachable", "refused"]
Extreme = Literal["worst", "best"]

Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        min=1,
        help="Maximum number of lines of the list. Default: as many as fit on the terminal.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", metavar="ID", help="Only samples of this prompt, in all steps unless --step is given."),
]
EvalSet = Annotated[
    str | None,
    typer.Option(
        "--eval-set",
        metavar="SET",
        help="Only samples of this evaluation set, or of its greedy responses (SET/greedy).",
    ),
]
AtLeast = Annotated[
    float | None, typer.Option("--min-reward", metavar="SCORE", help="Only samples with at least this score.")
]
AtMost = Annotated[
    float | None, typer.Option("--max-reward", metavar="SCORE", help="Only samples with at most this score.")
]
Grep = Annotated[
    str | None, typer.Option("--grep", metavar="TEXT", help="Only samples with this text in the response.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Step. Default: the last step with samples.")
]
RowOption = Annotated[int | None, typer.Option("--sample", metavar="N", help="Row of the step, from 0. Default: 0.")]
SortOption = Annotated[
    sample_list.Sort,
    typer.Option(
        "--sort",
        metavar="ORDER",
        help="Order: row, reward, length, advantage or flipped (prompts whose score varies). Highest first.",
    ),
]
FinishOption = Annotated[
    Finish | None, typer.Option("--finish", metavar="END", help="Only samples that are terminated or truncated.")
]
Scored = Annotated[
    Outcome | None,
    typer.Option(
        "--outcome",
        metavar="WORD",
        help="Only samples with this scoring outcome: ok, timeout, error, unreachable or refused.",
    ),
]
EvaluationOption = Annotated[
    bool, typer.Option("--eval", help="List the samples of an evaluation instead of a step.")
]
Colour = Annotated[
    sample_screen.TokenMetric,
    typer.Option("--colour", metavar="METRIC", help="Metric that colours the tokens: advantage, value or kl."),
]


def show(
    run: RunArgument,
    step: StepOption = None,
    sample: RowOption = None,
    worst: Annotated[bool, typer.Option("--worst", help="Show the sample with the lowest reward.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Show the sample with the highest reward.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the samples of the step, one per line.")] = False,
    sort: SortOption = "row",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order of the list.")] = False,
    limit: Limit = None,
    prompt: PromptOption = None,
    finish: FinishOption = None,
    outcome: Scored = None,
    min_reward: AtLeast = None,
    max_reward: AtMost = None,
    grep: Grep = None,
    evaluation: EvaluationOption = False,
    set_: EvalSet = None,
    by: Colour = "advantage",
    no_pager: Annotated[bool, typer.Option("--no-pager", help="Print without $PAGER.")] = False,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Print the manifests of the step instead of samples.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show samples with their scores, and with the value and advantage of each token. Shows one sample in full; with
    --list, --eval or a filter, a list of samples."""
    from ppoctl.store.sample_query import SampleFilter, Source

    source = Source(open_run(run), evaluations=evaluation or set_ is not None)
    if manifest:
        step = source.last() if step is None else step
        render.json({"step": step, "manifests": _manifests(source.run, step)})
        return
    wanted = SampleFilter(finish, outcome, min_reward, max_reward, grep, prompt, set_)
    one = [] if sample is None else ["--sample"]
    one += ["--worst"] * worst + ["--best"] * best
    several = ["--list"] * list_ + ["--sort"] * (sort != "row") + ["--reverse"] * reverse
    several += [] if limit is None else ["--limit"]
    _require_one_form(one, several, wanted)
    extreme: Extreme | None = "worst" if worst else "best" if best else None
    with pager.paged(wanted=not no_pager and not json):
        if extreme is not None:
            row = _extreme(_rows(source, step, wanted), wanted, extreme)
            sample_screen.show(source, row.step, row.row, by, as_json=json)
        elif one or not (several or source.evaluations or wanted != SampleFilter()):
            at = source.last() if step is None else step
            sample_screen.show(source, at, sample or 0, by, as_json=json)
        else:
            form = sample_list.Form(sort, reverse, limit, grep, prompt is not None)
            sample_list.show(source, _rows(source, step, wanted), wanted, form, as_json=json)


def _require_one_form(one: list[str], several: list[str], wanted: "SampleFilter") -> None:
    """Raise RecipeError if options conflict: one sample and a list, or a row number and a filter."""
    from ppoctl.store.sample_query import SampleFilter

    options = [*one, *several] if several else one
    if len(options) > 1 and one:
        raise RecipeError(f"`{options[0]}` and `{options[1]}` cannot be combined", hint="ppoctl show --help")
    low, high = wanted.min_reward, wanted.max_reward
    if low is not None and high is not None and low > high:
        raise RecipeError(f"no reward is at least `{low:g}` and at most `{high:g}`", hint="ppoctl show --help")
    if one == ["--sample"] and wanted != SampleFilter(set=wanted.set):
        raise RecipeError("`--sample` selects one row and cannot be combined with filters", hint="ppoctl show --help")


def _rows(source: "Source", step: int | None, wanted: "SampleFilter") -> "list[SampleRow]":
    """Return the samples of a step, or of a prompt in all steps.

    Raises RecipeError if there are none, or if the evaluation set does not exist.
    """
    if wanted.prompt_id is not None and step is None:
        rows = source.of_prompt(wanted.prompt_id)
    else:
        rows = source.rows(source.last() if step is None else step)
    sets = sorted({name for row in rows for name in (row.set, row.set.rpartition("/")[0])})
    if wanted.set is not None and wanted.set not in sets:
        raise RecipeError(
            f"the evaluation has no set `{wanted.set}`; it has {', '.join(sets)}",
            hint=f"ppoctl show {quoted(source.run.paths.root)} --eval-set {quoted(sets[0])}",
        )
    return rows


def _extreme(rows: "list[SampleRow]", wanted: "SampleFilter", extreme: Extreme) -> "SampleRow":
    """Return the matching sample with the lowest or highest score. Raises RecipeError if none has a score."""
    scored = [(row.score, row) for row in rows if row.score is not None and wanted.takes(row)]
    if not scored:
        message = "no matching sample has a score" if any(map(wanted.takes, rows)) else "no sample matches"
        raise RecipeError(message, hint="ppoctl show --help")
    return (min if extreme == "worst" else max)(scored, key=lambda pair: pair[0])[1]


def _manifests(run: "RecordedRun", step: int) -> dict[str, Any]:
    from dataclasses import asdict

    from ppoctl.store.outline import EVAL

    paths, names = run.paths, (stage.name for stage in run.stages(step))
    found = {stage: run.manifest(step, stage) for stage in (*names, EVAL)}
    shown = {stage: asdict(item) for stage, item in found.items() if item is not None}
    if not shown:
        raise RecipeError(f"step {step} of `{paths.root}` has no artifacts", hint=f"ls {quoted(paths.steps)}")
    return shown
