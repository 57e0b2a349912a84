"""Events of a run for the charts: attempts, resumes, changed keys and health alarms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ppoctl.core.clock import duration
from ppoctl.recipe.schema import HealthTable
from ppoctl.show.report.formatting import moment, toml
from ppoctl.show.report.recipe_keys import differences
from ppoctl.show.report.run_reader import ReportedRun
from ppoctl.show.tracking.health import HealthAlarm, HealthMonitor
from ppoctl.store.outline import EVAL
from ppoctl.store.time_use import attempt_times

Kind = Literal["resume", "stop", "health", "change"]
DONE = ("finished", "unmet")


@dataclass(frozen=True)
class ChartEvent:
    """An event that the charts mark."""

    at: float
    """Position of the mark on the step axis. An event between two steps has a half, such as 2.5."""
    kind: Kind
    text: str


def events(run: ReportedRun, attempts: Sequence[Mapping[str, Any]]) -> list[ChartEvent]:
    """Return the events that the charts of a run mark, in step order."""
    found = [*_of_attempts(run, attempts), *_changes(run), *_alarms(run)]
    return sorted(found, key=lambda event: (event.at, event.kind, event.text))


def _of_attempts(run: ReportedRun, attempts: Sequence[Mapping[str, Any]]) -> list[ChartEvent]:
    found = []
    for attempt in attempts:
        steps = steps_of(run, attempt["attempt"])
        if not steps:
            continue
        name = f"attempt {attempt['attempt']}"
        if attempt["attempt"] != attempts[0]["attempt"]:
            found.append(ChartEvent(steps[0] - 0.5, "resume", f"{name} continues with step {steps[0]}"))
        if attempt["status"] not in (*DONE, "running"):
            found.append(
                ChartEvent(steps[-1] + 0.5, "stop", f"{name} ends {_end(run, attempt)}: {attempt['status']}")
            )
    return found


def _end(run: ReportedRun, attempt: Mapping[str, Any]) -> str:
    """Return where an attempt ended: in the stage that ran, or after the last stage that it committed."""
    own = [line for line in run.lines if line.get("attempt") == attempt["attempt"]]
    if (running := next((line["during"] for line in own if "during" in line), None)) is not None:
        return f"in `{running[1]}` of step {running[0]}"
    stages = [line for line in own if "stage" in line]
    newest = max(line["step"] for line in stages)
    last = [line for line in stages if line["step"] == newest][-1]  # a generation may be committed in the next step
    is_whole = last["stage"] in (run.outlines.at(last["step"]).last, EVAL)
    return f"{'after' if is_whole else 'in'} step {last['step']}"


def steps_of(run: ReportedRun, attempt: int) -> list[int]:
    """Return the steps in which the attempt committed a stage, in order."""
    return sorted({int(line["step"]) for line in run.lines if line.get("attempt") == attempt and "stage" in line})


def _changes(run: ReportedRun) -> list[ChartEvent]:
    return [
        ChartEvent(start - 0.5, "change", f"from step {start}: {key} {toml(before)} -> {toml(after)}")
        for start, key, before, after in changes(run)
    ]


def changes(run: ReportedRun) -> list[tuple[int, str, Any, Any]]:
    """Return the keys that changed during the run: (first step with the new value, key, old value, new value)."""
    pairs = pairwise(sorted(run.recipes))
    return [
        (later, *changed) for start, later in pairs for changed in differences(run.recipes[start], run.recipes[later])
    ]


def _alarms(run: ReportedRun) -> list[ChartEvent]:
    """Return the alarms of the health rules. Alarms of the same bound in consecutive steps become one event."""
    last: dict[str, list[HealthAlarm]] = {}
    stretches: list[list[HealthAlarm]] = []
    for alarm in _step_alarms(run):
        stretch = last.get(alarm.key)
        if stretch is None or stretch[-1].step + 1 != alarm.step:
            stretch = last[alarm.key] = []
            stretches.append(stretch)
        stretch.append(alarm)
    return [ChartEvent(each[0].step, "health", _alarm_text(each)) for each in stretches]


def _step_alarms(run: ReportedRun) -> Iterator[HealthAlarm]:
    """Yield the alarms of each step, in step order. Each step is checked with the health rules of its recipe.

    The number of consecutive steps out of bounds is counted from the first step of the run, as in a resume.
    """
    metrics: dict[int, dict[str, float]] = {}
    for name, points in run.series.items():
        for step, value in points:
            metrics.setdefault(step, {})[name] = value
    for start in sorted(run.recipes):
        ends = min((later for later in run.recipes if later > start), default=math.inf)
        monitor = HealthMonitor(HealthTable.model_validate(run.recipes[start]["health"]))
        for step in sorted(step for step in metrics if 0 < step < ends):
            yield from (alarm for alarm in monitor.check(step, metrics[step]) if step >= start)


def _alarm_text(stretch: Sequence[HealthAlarm]) -> str:
    until = f"; until step {stretch[-1].step}" if len(stretch) > 1 else ""
    return f"{stretch[0].text}, {stretch[0].action}{until}"


def attempt_rows(run: ReportedRun, attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one table row per attempt, with the columns `ATTEMPTS`."""
    ends = {line["attempt"]: line for line in run.lines if line.get("event") == "attempt_ended"}
    spends = {each.attempt: each for each in attempt_times(run.lines)}
    rows = []
    for attempt in attempts:
        number = attempt["attempt"]
        time_use, end, steps = spends[number], ends.get(number, {}), steps_of(run, number)
        code = f" ({attempt['exit_code']})" if "exit_code" in attempt else ""
        job = f", job {attempt['job']}" if "job" in attempt else ""
        times = (
            time_use.wall_s,
            time_use.kept_s,
            time_use.starting_s,
            end.get("replayed_s", 0.0),
            time_use.lost_s,
        )
        span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0]) if steps else "none"
        begins = f"{moment(float(attempt['at']))}, {attempt['host']}{job}"
        rows.append((str(number), begins, span, f"{attempt['status']}{code}", *map(duration, times)))
    return rows


ATTEMPTS = ("attempt", "began", "steps", "ended", "took", "kept", "starting", "replayed", "lost in total")
"""Headers of `attempt_rows`. Replayed time is included in lost time."""
