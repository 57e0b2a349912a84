"""Contents of a report of limited size: texts and tables for the template, metrics and samples for the script."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.show.chart.axis import step_axis
from ppoctl.show.report import report_curves, report_samples, report_time
from ppoctl.show.report.events import ATTEMPTS, ChartEvent, attempt_rows, changes, events
from ppoctl.show.report.formatting import moment, toml
from ppoctl.show.report.overview import head
from ppoctl.show.report.recipe_keys import as_text, side_by_side
from ppoctl.show.report.run_reader import ReportedRun
from ppoctl.show.report.waiting_bars import chart, longer_side, table_rows
from ppoctl.show.report.who_waited import newest_steps

Json = dict[str, Any]


STEPS_OF_WAITS = 5
"""Number of newest steps of which the page shows who waited for whom."""


@dataclass(frozen=True)
class Contents:
    """Contents of the page."""

    words: Json
    """Input of the template."""
    data: Json
    """Input of the script."""
    shown: int
    """Number of samples on the page."""
    left_out: tuple[str, ...]
    """Descriptions of samples, tokens and points that are not on the page."""


def contents(runs: Sequence[ReportedRun], *, steps: int, room: int) -> Contents:
    """Return the contents for these runs, in about `room` bytes, with samples of `steps` steps of each run."""
    heads = [head(run) for run in runs]
    run_events = [events(run, overview["attempts"]) for run, overview in zip(runs, heads, strict=True)]
    waits = [newest_steps(run.lines, run.outlines, at_most=STEPS_OF_WAITS) for run in runs]
    lists = report_curves.Steps()
    grouped = [
        (title, [report_curves.chart(name, runs, lists, fewest=_fewest(title)) for name in names])
        for title, names in report_curves.groups(runs)
    ]
    charts = [chart for _, group in grouped for chart in group]
    data = {
        "runs": [run.label for run in runs],
        "steps": lists.lists,
        "axis": asdict(step_axis(step for steps_of in lists.lists for step in steps_of)),
        "charts": [chart.pop("data") for chart in charts],
        "marks": [mark for number, found in enumerate(run_events) for mark in _marks(number, found)],
        "stages": [report_time.timeline(run, number) for number, run in enumerate(runs)],
        "waits": [chart(run_steps) for run_steps in waits],
    }
    words = {
        "title": " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared",
        "made": moment(time.time()),
        "heads": heads,
        "events": run_events,
        "groups": grouped,
        "further": report_curves.FURTHER,
        "shares": [report_time.shares(run) for run in runs],
        "waits": [{"says": longer_side(run_steps), "rows": table_rows(run_steps)} for run_steps in waits],
        "attempts": [attempt_rows(run, overview["attempts"]) for run, overview in zip(runs, heads, strict=True)],
        "attempt_headers": ATTEMPTS,
        "changes": [[(step, key, toml(a), toml(b)) for step, key, a, b in changes(run)] for run in runs],
        "recipes": [as_text(run.recipe) for run in runs],
        "side_by_side": side_by_side([run.recipe for run in runs]) if len(runs) > 1 else [],
    }
    sets, troubles = _samples(runs, steps)
    dropped = fit(sets, room - _size(data) - _size(words))
    shown = sum(len(each["items"]) for each in sets)
    return Contents(
        {**words, "sets": len(sets)},
        {**data, "sets": sets},
        shown,
        (*troubles, *_left_out(charts, sets, dropped, runs[0].label)),
    )


def _fewest(title: str) -> int:
    return 2 if title == report_curves.FURTHER else report_curves.FEWEST


def _samples(runs: Sequence[ReportedRun], steps: int) -> tuple[list[Json], list[str]]:
    """Return the sets of samples of all runs, and messages about sets that could not be read."""
    sets: list[Json] = []
    troubles = []
    for number, run in enumerate(runs):
        try:
            sets += report_samples.rollouts(run, number, steps)
        except EnvironmentProblemError as error:  # the model's tokenizer is not on this machine
            troubles.append(f"samples of the steps of {run.label}: {error.message}")
        sets += report_samples.evaluations(run, number) if steps else []
    return sets, troubles


def _marks(number: int, found: Sequence[ChartEvent]) -> list[Json]:
    return [
        {"run": number, "at": event.at, "kind": event.kind, "text": event.text.replace("`", "")} for event in found
    ]


def fit(sets: Sequence[Json], room: int) -> int:
    """Remove samples from the sets until the sets fit into `room` bytes, and return the number of removed samples.

    The first sample of every kind is kept before the second sample of any kind.
    """
    wanted = sorted(
        ((item.pop("rank"), at, row) for at, each in enumerate(sets) for row, item in enumerate(each["items"])),
    )
    kept: set[tuple[int, int]] = set()
    for _, at, row in wanted:
        size = _size(sets[at]["items"][row])
        if size <= room:
            room -= size
            kept.add((at, row))
    for at, each in enumerate(sets):
        each["items"] = [item for row, item in enumerate(each["items"]) if (at, row) in kept]
    return len(wanted) - len(kept)


def _left_out(charts: Sequence[Json], sets: Sequence[Json], dropped: int, run: str) -> tuple[str, ...]:
    found = []
    is_cut = sum(bool(item.get("cut")) for each in sets for item in each["items"])
    is_thinned = sum(chart["is_thinned"] for chart in charts)
    total, shown = sum(each["total"] for each in sets), sum(len(each["items"]) for each in sets)
    if dropped:
        found.append(f"{dropped} of {dropped + shown} chosen samples, to stay below 2 MB")
    if is_cut:
        found.append(f"tokens after the first {report_samples.MOST_TOKENS} in {is_cut} samples")
    if total > shown:
        found.append(
            f"{total - shown} of {total} samples (`ppoctl show {quoted(run)} --list` prints all of a step, with "
            "`--eval` all of an evaluation)"
        )
    if is_thinned:
        found.append(f"points between extremes of {is_thinned} long curves")
    return tuple(found)


def _size(value: Any) -> int:
    """Return the approximate number of bytes that the value takes on the page."""
    return len(json.dumps(value, separators=(",", ":"), default=vars)) + 2
