"""Time use of a run: the seconds of each stage in each step, and the time of all attempts by activity.

The module imports no torch, vLLM or Megatron.
"""

from collections import defaultdict
from dataclasses import asdict
from math import isfinite
from statistics import median
from typing import Any

from ppoctl.core.clock import duration
from ppoctl.show.chart.axis import step_axis, value_axis
from ppoctl.show.report.formatting import rounded, share
from ppoctl.show.report.run_reader import ReportedRun
from ppoctl.show.report.stage_table import stage_rows, table
from ppoctl.store.journal import JournalLine
from ppoctl.store.outline import EVAL
from ppoctl.store.time_use import attempt_times

Json = dict[str, Any]

BARS = 120
"""Maximum number of bars of a timeline. If there are more steps, a bar is the mean of several steps."""


def stages_of(run: ReportedRun) -> list[str]:
    """Return the stages that the run has committed, in the order of the recorded stage lists (outlines).

    All rounds of a stage are one stage."""
    names = [name for outline in run.outlines.by_start.values() for name in outline.names]
    done = {_name(line) for line in run.stage_lines}
    return [name for name in dict.fromkeys([*names, EVAL]) if name in done]


def _name(line: JournalLine) -> str:
    """Return the stage of a line; all rounds of a stage have one name."""
    return str(line["stage"]).partition(".")[0]


def timeline(run: ReportedRun, number: int) -> Json:
    """Return the seconds of each stage in each step, for the chart of the page."""
    names = stages_of(run)
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in run.stage_lines:
        seconds[int(line["step"])][_name(line)] += float(line["seconds"])
    steps = sorted(seconds)
    per_bar = -(-len(steps) // BARS) or 1
    bars = [steps[at : at + per_bar] for at in range(0, len(steps), per_bar)]

    def mean(stage: str, bar: list[int]) -> float | None:
        return rounded(sum(seconds[step].get(stage, 0.0) for step in bar) / len(bar))

    rows = [[mean(name, bar) for bar in bars] for name in names]
    totals = [sum(value or 0.0 for value in column) for column in zip(*rows, strict=True)]
    return {
        "run": number,
        "stages": names,
        "bars": [[bar[0], bar[-1]] for bar in bars],
        "seconds": rows,
        "axis": asdict(value_axis([0.0, *totals])),
        "ticks": step_axis(steps).ticks,
    }


def shares(run: ReportedRun) -> Json:
    """Return the time of all attempts by activity. The rows add up to the wall time of the attempts."""
    spends = attempt_times(run.lines)
    ends = [line for line in run.lines if line.get("event") == "attempt_ended"]
    wall_s = sum(each.wall_s for each in spends)
    by_stage: dict[str, float] = defaultdict(float)
    for line in run.stage_lines:
        by_stage[_name(line)] += float(line["seconds"])
    replayed, abandoned = (sum(float(end.get(key, 0.0)) for end in ends) for key in ("replayed_s", "abandoned_s"))
    lost = sum(each.lost_s for each in spends)
    starting = sum(each.starting_s for each in spends)
    rest = max(wall_s - sum(by_stage.values()) - starting - lost, 0.0)
    rows = [(name, by_stage[name]) for name in stages_of(run)]
    rows += [
        ("starting", starting),
        ("replayed", replayed),
        ("abandoned", abandoned),
        ("repeated", max(lost - replayed - abandoned, 0.0)),
        ("saving, and between stages", rest),
    ]
    total = sum(seconds for _, seconds in rows)
    gpu_hours = sum(each.kept_gpu_hours for each in spends), sum(each.lost_gpu_hours for each in spends)
    return {
        "label": run.label,
        "stages": median_stages(run),
        "whole": duration(wall_s),
        "gpu_hours": "" if sum(gpu_hours) <= 0 else f"{gpu_hours[0]:.3g} GPU-hours kept, {gpu_hours[1]:.3g} lost",
        "rows": [
            {"name": name, "took": duration(seconds), "share": share(seconds, total), "width": _width(seconds, total)}
            for name, seconds in rows
            if seconds > 0
        ],
    }


def median_stages(run: ReportedRun) -> Json:
    """Return the table of the stages with the median of each metric over the steps, and the number of steps."""
    finite = {name: [value for _, value in points if isfinite(value)] for name, points in run.series.items()}
    medians = {name: median(values) for name, values in finite.items() if values}
    headers, cells = table(stage_rows(stages_of(run), run.outlines.roles, medians))
    rows = [[name, *(value if isinstance(value, str) else f"{value:.6g}" for value in row)] for name, *row in cells]
    return {"headers": headers, "rows": rows, "steps": len({line["step"] for line in run.stage_lines} - {0})}


def _width(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.2f}%" if whole > 0 else "0%"
