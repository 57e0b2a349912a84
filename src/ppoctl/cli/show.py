"""`ppoctl show`: samples of a step or of an evaluation, one in full or all in a list."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppoctl.cli import pager, render, sample_list, sample_screen
from ppoctl.cli.options import JsonOption, RunArgument
from ppoctl.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.store.run_paths import RunPaths
    from ppoctl.store.sample_list import SampleFilter, Source
    from ppoctl.store.samples import SampleRow

# The names are those of `batch.scores`, which a test holds.
Finish = Literal["terminated", "truncated"]
Outcome = Literal["ok", "timeout", "error", "unreachable", "refused"]
Extreme = Literal["worst", "best"]

Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Lines of the list; default: what fits.")
]
PromptOption = Annotated[
    str | None, typer.Option("--prompt", metavar="ID", help="Only of this prompt, over all steps unless --step.")
]
EvalSet = Annotated[
    str | None, typer.Option("--eval-set", metavar="SET", help="Only of this evaluation set, or SET/greedy.")
]
AtLeast = Annotated[
    float | None, typer.Option("--min-reward", metavar="SCORE", help="Only those with at least this score.")
]
AtMost = Annotated[
    float | None, typer.Option("--max-reward", metavar="SCORE", help="Only those with at most this score.")
]
Grep = Annotated[
    str | None, typer.Option("--grep", metavar="TEXT", help="Only those with this text in the response.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="PPO step; default: the last that has samples.")
]
RowOption = Annotated[int | None, typer.Option("--sample", metavar="N", help="Row of the step, from 0; default: 0.")]
SortOption = Annotated[
    sample_list.Sort,
    typer.Option(
        "--sort",
        metavar="ORDER",
        help="row, reward, length, advantage or flipped (prompts whose score varies); the most first.",
    ),
]
FinishOption = Annotated[
    Finish | None, typer.Option("--finish", metavar="END", help="Only those that are terminated or truncated.")
]
Scored = Annotated[
    Outcome | None,
    typer.Option(
        "--outcome",
        metavar="WORD",
        help="Only those whose scoring was ok, timeout, error, unreachable or refused.",
    ),
]
EvaluationOption = Annotated[bool, typer.Option("--eval", help="List samples of an evaluation instead.")]
Colour = Annotated[
    sample_screen.TokenMetric,
    typer.Option("--colour", metavar="FIGURE", help="advantage, value or kl: what colours the tokens of a response."),
]


def show(
    run: RunArgument,
    step: StepOption = None,
    sample: RowOption = None,
    worst: Annotated[bool, typer.Option("--worst", help="The sample with the lowest reward.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The sample with the highest reward.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the samples of the step, a line each.")] = False,
    sort: SortOption = "row",
    reverse: Annotated[bool, typer.Option("--reverse", help="Turn the order of the list round.")] = False,
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
    manifest: Annotated[bool, typer.Option("--manifest", help="Print the manifests of the step instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Show samples: what was drawn, what it scored, and what each token was worth. One sample, or with --list, a
    filter or --eval a list of them."""
    from ppoctl.store.sample_list import SampleFilter, Source

    source = Source(_layout(run), evaluations=evaluation or set_ is not None)
    if manifest:
        step = source.last() if step is None else step
        render.json({"step": step, "manifests": _manifests(source.paths, step)})
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
            found = _extreme(_rows(source, step, wanted), wanted, extreme)
            sample_screen.show(source, found.step, found.row, by, as_json=json)
        elif one or not (several or source.evaluations or wanted != SampleFilter()):
            at = source.last() if step is None else step
            sample_screen.show(source, at, sample or 0, by, as_json=json)
        else:
            form = sample_list.Form(sort, reverse, limit, grep, prompt is not None)
            sample_list.show(source, _rows(source, step, wanted), wanted, form, as_json=json)


def _require_one_form(one: list[str], several: list[str], wanted: "SampleFilter") -> None:
    """Raise RecipeError unless one sample is asked for, or a list; a row by its number leaves nothing to filter."""
    from ppoctl.store.sample_list import SampleFilter

    asked = [*one, *several] if several else one
    if len(asked) > 1 and one:
        raise RecipeError(f"`{asked[0]}` and `{asked[1]}` ask for different things", hint="ppoctl show --help")
    low, high = wanted.min_reward, wanted.max_reward
    if low is not None and high is not None and low > high:
        raise RecipeError(f"no reward is at least `{low:g}` and at most `{high:g}`", hint="ppoctl show --help")
    if one == ["--sample"] and wanted != SampleFilter(set=wanted.set):
        raise RecipeError("`--sample` names a row, and filters choose among all", hint="ppoctl show --help")


def _rows(source: "Source", step: int | None, wanted: "SampleFilter") -> "list[SampleRow]":
    """Samples among which to look: of a step, or of a prompt over all steps. Raises RecipeError where there are none,
    or none of the evaluation set that is asked for."""
    if wanted.prompt_id is not None and step is None:
        rows = source.of_prompt(wanted.prompt_id)
    else:
        rows = source.rows(source.last() if step is None else step)
    sets = sorted({name for row in rows for name in (row.set, row.set.rpartition("/")[0])})
    if wanted.set is not None and wanted.set not in sets:
        raise RecipeError(
            f"the evaluation has no set `{wanted.set}`; it has {', '.join(sets)}",
            hint=f"ppoctl show {quoted(source.paths.root)} --eval-set {quoted(sets[0])}",
        )
    return rows


def _extreme(rows: "list[SampleRow]", wanted: "SampleFilter", extreme: Extreme) -> "SampleRow":
    """The lowest or the highest score of those that are wanted. Raises RecipeError where none has one."""
    scored = [(row.score, row) for row in rows if row.score is not None and wanted.takes(row)]
    if not scored:
        says = "no sample of these is scored" if any(map(wanted.takes, rows)) else "no sample is like that"
        raise RecipeError(says, hint="ppoctl show --help")
    return (min if extreme == "worst" else max)(scored, key=lambda pair: pair[0])[1]


def _layout(run: Path) -> "RunPaths":
    from ppoctl.store import run_dir
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths(run)
    run_dir.facts(paths)
    return paths


def _manifests(paths: "RunPaths", step: int) -> dict[str, Any]:
    from dataclasses import asdict

    from ppoctl.store import manifest as manifests
    from ppoctl.store.outline import EVAL, outlines_of

    names = (*outlines_of(paths).at(step).names, EVAL)
    found = {stage: manifests.read(paths.stage(step, stage)) for stage in names}
    shown = {stage: asdict(item) for stage, item in found.items() if item is not None}
    if not shown:
        raise RecipeError(f"step {step} of `{paths.root}` has no artifacts", hint=f"ls {quoted(paths.steps)}")
    return shown
