"""The list of samples: a line for each, cut to the terminal."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.store.sample_list import Before, Question, SampleFilter, Source
    from ppoctl.store.samples import SampleRow

Sort = Literal["row", "reward", "length", "advantage", "flipped"]

AROUND = 5
"""Lines of a screen that are no samples: headers, notes, and the prompt of the shell."""
LEAST_RESPONSE = 16
"""Columns that a response must have, if it is that long; for it others are left out."""
DROPPED = ("finish", "outcome", "sample", "set", "advantage", "tokens")
"""Columns that are left out where it is narrow, the first first."""


@dataclass(frozen=True)
class Form:
    """How the list is to be."""

    sort: Sort = "row"
    reverse: bool = False
    limit: int | None = None
    """None: what fits, all off a terminal."""
    grep: str | None = None
    """Text for whose sake a line of the response is chosen; None: its first."""
    says_step: bool = False
    """Whether each line says its step, although all may be of one."""


@dataclass(frozen=True)
class _Flips:
    """What sorting by `flipped` knows of prompts."""

    by_question: "dict[Question, float]"
    before: "dict[Question, Before]"


def show(source: "Source", rows: "list[SampleRow]", wanted: "SampleFilter", form: Form, *, as_json: bool) -> None:
    """Print those of the rows that are wanted."""
    from ppoctl.store.sample_list import flips, ordered

    kept = [row for row in rows if wanted.takes(row)]
    steps = sorted({row.step for row in rows})
    before = source.before(steps[0], kept) if form.sort == "flipped" and len(steps) == 1 else {}
    known = _Flips(flips(rows, before), before)
    kept = ordered(kept, form.sort, known.by_question, reverse=form.reverse)
    if as_json:
        shown = kept[: form.limit]
        render.json({"steps": steps, "samples": [_as_json(row, known, form) for row in shown], "found": len(kept)})
        return
    screen = shutil.get_terminal_size()
    limit = form.limit or (max(1, screen.lines - AROUND) if render.is_terminal() else len(kept))
    what = ("the evaluation after ", "evaluations after ") if source.evaluations else ("", "")
    place = f"{what[len(steps) > 1]}{'steps' if len(steps) > 1 else 'step'} {_spans(steps)}"
    if not kept:
        render.print_stderr(f"no sample is like that; {place} has {len(rows)}")
        return
    _print(kept[:limit], form, known, screen.columns if render.is_terminal() else None)
    further = f", {len(kept) - limit} more with --limit {len(kept)}" if len(kept) > limit else ""
    render.print_stderr(f"{min(limit, len(kept))} of {len(rows)} samples of {place}{further}")


Column = tuple[str, Callable[["SampleRow"], object]]


def _print(rows: "Sequence[SampleRow]", form: Form, known: _Flips, width: int | None) -> None:
    columns = _columns(rows, form, known)
    lines = [_line(row.response, form.grep) for row in rows]
    least = min(LEAST_RESPONSE, max(map(len, ("response", *lines))))
    left_out: list[str] = []
    while width is not None and width - _width(columns, rows) < least:
        there = [name for name in DROPPED if name in dict(columns)]
        if not there:
            break
        left_out.append(there[0])
        columns = [column for column in columns if column[0] != there[0]]
    room = None if width is None else max(8, width - _width(columns, rows))
    both = zip(rows, lines, strict=True)
    told = [(*(cell(row) for _, cell in columns), render.clipped(line, room)) for row, line in both]
    render.table(told, (*dict(columns), "response"))
    if left_out:
        render.print_stderr(f"no room for: {', '.join(left_out)}")


def _columns(rows: "Sequence[SampleRow]", form: Form, known: _Flips) -> list[Column]:
    """What is said of each row, without the response: what the same list says of no row is no column."""
    several = form.says_step or len({row.step for row in rows}) > 1
    columns: list[Column] = [("step", lambda row: row.step)] if several else []
    columns += [("row", lambda row: row.row)]
    columns += [("set", lambda row: render.printable(row.set))] if any(row.set for row in rows) else []
    columns += [
        ("prompt", lambda row: render.printable(row.prompt_id)),
        ("sample", lambda row: row.sample),
        ("score", lambda row: row.score),
        ("outcome", lambda row: row.outcome),
        ("tokens", lambda row: row.tokens),
        ("finish", lambda row: row.finish),
    ]
    if any(row.advantage is not None for row in rows):
        columns += [("advantage", lambda row: None if row.advantage is None else f"{row.advantage:+.3f}")]
    if form.sort == "flipped":
        columns += [("flip", lambda row: known.by_question.get((row.set, row.prompt_id)))]
        if known.before:
            columns += [("before", lambda row: _before(known.before.get((row.set, row.prompt_id))))]
    return columns


def _before(found: "Before | None") -> str:
    return "-" if found is None else f"{found.score:.3g} in {found.step}"


def _width(columns: Sequence[Column], rows: "Sequence[SampleRow]") -> int:
    """Columns of the terminal that all of these take, with the gap behind each."""
    return sum(2 + max(len(name), *(len(render.cell(cell(row))) for row in rows)) for name, cell in columns)


def _line(response: str, grep: str | None) -> str:
    """The first line with something in it, or the first that has what was searched for."""
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    found = next((line for line in lines if grep and grep in line), None)
    return render.printable(found or (lines[0] if lines else ""))


def _as_json(row: "SampleRow", known: _Flips, form: Form) -> dict[str, Any]:
    question = (row.set, row.prompt_id)
    flip = {"flip": known.by_question.get(question)} if form.sort == "flipped" else {}
    before = known.before.get(question)
    return {**vars(row), **flip, **({} if before is None else {"before": vars(before)})}


def _spans(steps: Sequence[int]) -> str:
    from ppoctl.store.samples import spans

    return spans(steps)
