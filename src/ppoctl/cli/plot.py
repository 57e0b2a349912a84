"""`ppoctl plot`: plot metrics of runs over steps, on the terminal or as a picture."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, SeveralRuns, open_run
from ppoctl.core.errors import EnvironmentProblemError, RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.show.chart.drawing import Picture
    from ppoctl.show.chart.panel import Panel, Point
    from ppoctl.store.journal import JournalEvent

COLOURS = ("cyan", "bright_red", "green", "magenta", "yellow", "blue", "white", "bright_cyan")
PLAIN_WIDTH = 80
PLAIN_HEIGHT = 10
"""Height of a plot, in lines of text, if stdout is not a terminal."""
LEAST_HEIGHT, MOST_HEIGHT = 7, 16
"""Heights of a plot on a terminal, in lines of text. Seven lines have room for all labels of the values."""
AROUND = 4
"""Number of lines of a panel in addition to the plot: title, axis, labels of the axis, and an empty line."""


@dataclass(frozen=True)
class _Plotted:
    """One run to plot: its name in the legend, its metrics and its events."""

    name: str
    metrics: "Mapping[str, Sequence[Point]]"
    events: "Sequence[JournalEvent]"


def plot(
    runs: SeveralRuns,
    names: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Plot this metric, e.g. policy/clip_frac; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write a picture instead: FILE.svg or FILE.png.")
    ] = None,
    smooth: Annotated[
        int, typer.Option("--smooth", metavar="N", min=1, help="Plot the running mean of the last N values.")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """Plot metrics of runs over steps. By default, plots reward, evaluations, KL, explained variance and entropy.
    --metric selects other metrics (`ppoctl recipes metrics` lists all metrics). --json prints the values."""
    if out is not None and out.suffix not in (".svg", ".png"):
        raise RecipeError(f"`{out}` does not end with .svg or .png", hint=f"--out {quoted(out.with_suffix('.svg'))}")
    plotted = _read(runs)
    chosen = _chosen(plotted, names)
    panels = [_panel(plotted, name, smooth) for name in chosen]
    if out is not None:
        _write(out, panels, [run.name for run in plotted])
    if json:
        series = {panel.title: {plotted[curve.run].name: curve.points for curve in panel.curves} for panel in panels}
        events = {run.name: [vars(event) for event in run.events] for run in plotted}
        render.json({"series": series, "events": events, **({} if out is None else {"out": str(out)})})
    elif out is not None:
        render.line(str(out))
    else:
        _print(panels, plotted)


def _read(runs: Sequence[Path]) -> list[_Plotted]:
    """Return the runs to plot. If two runs have the same name, the runs are named by their paths.

    Raises RecipeError if a run has no metrics.
    """
    from ppoctl.show.report.expectations import history
    from ppoctl.store.journal import events

    plotted: list[_Plotted] = []
    names = [run.resolve().name for run in runs]
    for run, name in zip(runs, names, strict=True):
        lines = open_run(run).lines
        metrics = history(lines)
        if not metrics:
            raise RecipeError(f"run `{run}` has no metrics yet", hint=f"ppoctl status {quoted(run)}")
        plotted.append(
            _Plotted(render.printable(name if names.count(name) == 1 else str(run)), metrics, events(lines))
        )
    return plotted


def _chosen(runs: Sequence[_Plotted], requested: Sequence[str] | None) -> list[str]:
    """Return the metrics to plot. Raises RecipeError for a requested metric that no run has."""
    recorded = {name for run in runs for name in run.metrics}
    if not requested:
        return _default_metrics(recorded)
    from difflib import get_close_matches

    from ppoctl.core.metric_registry import find, unknown

    for name in requested:
        if name not in recorded:
            is_known = find(name) is not None
            near = get_close_matches(name, sorted(recorded), n=1, cutoff=0.6)
            message = f"metric `{name}` was not recorded" if is_known else unknown(name)
            if near and "did you mean" not in message:
                message += f"; did you mean `{near[0]}`?"
            list_group = f"ppoctl recipes metrics {quoted(name.partition('/')[0])}"
            raise RecipeError(message, hint=list_group if is_known else "ppoctl recipes metrics")
    return list(dict.fromkeys(requested))


def _default_metrics(recorded: set[str]) -> list[str]:
    """Return the metrics to plot if the user requests none: the default metrics that a run has recorded."""
    from ppoctl.core import metric_registry

    passed = sorted(name for name in recorded if metric_registry.find(name) is metric_registry.EVAL_PASS_AT_1)
    kinds = (
        [metric_registry.REWARD_SCORE_MEAN.name],
        passed,
        [metric_registry.KL_REFERENCE_MEAN.name, metric_registry.POLICY_APPROX_KL.name],
        [metric_registry.VALUE_EXPLAINED_VARIANCE.name],
        [metric_registry.POLICY_ENTROPY_MEAN.name, metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN.name],
    )
    available = [[name for name in kind if name in recorded] for kind in kinds]
    chosen = [
        name
        for kind, names in zip(kinds, available, strict=True)
        for name in (names if kind is passed else names[:1])
    ]
    return chosen or sorted(recorded)[:4]


def _panel(runs: Sequence[_Plotted], name: str, smooth: int) -> "Panel":
    """Return all curves of a metric. Raises RecipeError if none of its values is finite."""
    from ppoctl.core.metric_registry import find
    from ppoctl.show.chart.panel import Panel, curve

    curves = [curve(number, run.metrics.get(name, ()), smooth) for number, run in enumerate(runs)]
    with_points = tuple(each for each in curves if each.points)
    if not with_points:
        raise RecipeError(f"no value of `{name}` is a number", hint="ppoctl plot --help")
    prefix = {number: f"{run.name} " if len(runs) > 1 else "" for number, run in enumerate(runs)}
    events = tuple(
        (event.step, f"{prefix[number]}{event.what}") for number, run in enumerate(runs) for event in run.events
    )
    metric = find(name)
    return Panel(name, metric.unit if metric else "metric", with_points, name.startswith("eval/"), events)


def _write(out: Path, panels: "Sequence[Panel]", names: Sequence[str]) -> None:
    from ppoctl.show.chart.drawing import picture
    from ppoctl.store.output_file import write_output

    image = picture(panels, names)
    if out.suffix == ".svg":
        from ppoctl.show.chart.svg import svg

        data = svg(image, f"{', '.join(names)}: {', '.join(panel.title for panel in panels)}").encode()
    else:
        data = _png(image)
    write_output(out, data)


def _png(image: "Picture") -> bytes:
    try:
        from ppoctl.show.chart.png import png
    except ModuleNotFoundError as error:  # an environment without vLLM has no Pillow
        message = "a PNG requires Pillow, which is not installed"
        raise EnvironmentProblemError(
            message, hint="--out with a name that ends in .svg, or: pip install pillow"
        ) from error
    return png(image)


def _print(panels: "Sequence[Panel]", runs: Sequence[_Plotted]) -> None:
    from ppoctl.show.chart.panel import aligned
    from ppoctl.show.chart.terminal import Style, chart, margin, mark

    screen = shutil.get_terminal_size()
    width, height = PLAIN_WIDTH, PLAIN_HEIGHT
    if render.is_terminal():
        fits = (screen.lines - 2 - (len(runs) if len(runs) > 1 else 0)) // len(panels) - AROUND
        width, height = screen.columns, min(max(fits, LEAST_HEIGHT), MOST_HEIGHT)
    paint = (lambda run, text: render.styled(text, COLOURS[run % len(COLOURS)])) if render.is_coloured() else None
    style = Style(width, height, margin(panels, height), unicode=render.is_unicode(), paint=paint)
    if len(runs) > 1:
        for number, run in enumerate(runs):
            render.line(f"{mark(style, number, len(runs))} {run.name}")
        render.line()
    steps = aligned(panels)
    for number, panel in enumerate(panels):
        title, *lines = chart(panel, steps, style)
        render.heading(title)
        render.line("\n".join(lines) + ("\n" if number < len(panels) - 1 else ""))
    for run in runs:
        if run.events:
            render.print_stderr(f"{run.name}: {_summary(run.events)}")


def _summary(events: "Sequence[JournalEvent]") -> str:
    from ppoctl.store.stored_samples import spans

    kinds = dict.fromkeys(event.what for event in events)
    steps = {kind: sorted({event.step for event in events if event.what == kind}) for kind in kinds}
    return ", ".join(f"{kind} after step {spans(numbers)}" for kind, numbers in steps.items())
