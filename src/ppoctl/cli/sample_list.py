"""The list of samples: one line per sample, shortened to the width of the terminal."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.store.sample_query import Before, Question, SampleFilter, Source
    from ppoctl.store.stored_samples import SampleRow

Sort = Literal["row", "reward", "length", "advantage", "flipped"]

AROUND = 5
"""Number of lines on a screen that are not samples: headers, notes, and the shell prompt."""
LEAST_RESPONSE = 16
"""Minimum width of the response column, in characters. Other columns are left out to make the response fit."""
LONGEST_TRUTH = 12
"""Maximum width of the column with the ground truth, in characters, on a terminal."""
DROPPED = ("finish", "outcome", "sample", "set", "advantage", "turns", "tokens", "truth", "end")
"""Columns that are left out on a narrow terminal, in this order."""


@dataclass(frozen=True)
class Form:
    """Order, length and columns of the list."""

    sort: Sort = "row"
    reverse: bool = False
    limit: int | None = None
    """Maximum number of lines. None: as many as fit on the terminal or, without a terminal, all lines."""
    grep: str | None = None
    """Text to find in a response. The list shows the last line that contains the text. None: the last line, which
    usually has the answer."""
    says_step: bool = False
    """Whether each line shows its step, even if all samples have the same step."""


@dataclass(frozen=True)
class _Flips:
    """Values of each prompt that the order `flipped` sorts by."""

    by_question: "dict[Question, float]"
    before: "dict[Question, Before]"


def show(source: "Source", rows: "list[SampleRow]", wanted: "SampleFilter", form: Form, *, as_json: bool) -> None:
    """Print a list of the rows that pass the filter."""
    from ppoctl.store.sample_query import flips, ordered
    from ppoctl.store.stored_samples import spans

    kept = [row for row in rows if wanted.takes(row)]
    steps = sorted({row.step for row in rows})
    before = source.before(steps[0], kept) if form.sort == "flipped" and len(steps) == 1 else {}
    flipped = _Flips(flips(rows, before), before)
    kept = ordered(kept, form.sort, flipped.by_question, reverse=form.reverse)
    if as_json:
        shown = kept[: form.limit]
        render.json({"steps": steps, "samples": [_as_json(row, flipped, form) for row in shown], "found": len(kept)})
        return
    screen = shutil.get_terminal_size()
    limit = form.limit or (max(1, screen.lines - AROUND) if render.is_terminal() else len(kept))
    what = ("the evaluation after ", "evaluations after ") if source.evaluations else ("", "")
    place = f"{what[len(steps) > 1]}{'steps' if len(steps) > 1 else 'step'} {spans(steps)}"
    if not kept:
        render.print_stderr(f"no sample matches; {place} has {len(rows)}")
        return
    _print(kept[:limit], form, flipped, screen.columns if render.is_terminal() else None)
    further = f", {len(kept) - limit} more with --limit {len(kept)}" if len(kept) > limit else ""
    render.print_stderr(f"{min(limit, len(kept))} of {len(rows)} samples of {place}{further}")


Column = tuple[str, Callable[["SampleRow"], object]]


def _print(rows: "Sequence[SampleRow]", form: Form, flipped: _Flips, width: int | None) -> None:
    columns = _columns(rows, form, flipped, None if width is None else LONGEST_TRUTH)
    lines = [_line(row.response, form.grep) for row in rows]
    least = min(LEAST_RESPONSE, max(map(len, ("response", *lines))))
    left_out: list[str] = []
    while width is not None and width - _width(columns, rows) < least:
        droppable = [name for name in DROPPED if name in dict(columns)]
        if not droppable:
            break
        left_out.append(droppable[0])
        columns = [column for column in columns if column[0] != droppable[0]]
    response_width = None if width is None else max(8, width - _width(columns, rows))
    both = zip(rows, lines, strict=True)
    cells = [(*(cell(row) for _, cell in columns), render.clipped(line, response_width)) for row, line in both]
    render.table(cells, (*dict(columns), "response"))
    if left_out:
        render.print_stderr(f"columns that do not fit: {', '.join(left_out)}")


def _columns(rows: "Sequence[SampleRow]", form: Form, flipped: _Flips, longest: int | None) -> list[Column]:
    """Return the columns of the list, without the response. A column that would be empty in every row is left out."""
    several = form.says_step or len({row.step for row in rows}) > 1
    columns: list[Column] = [("step", lambda row: row.step)] if several else []
    columns += [("row", lambda row: row.row)]
    columns += [("round", lambda row: row.round)] if any(row.round > 1 for row in rows) else []
    columns += [("set", lambda row: render.printable(row.set))] if any(row.set for row in rows) else []
    columns += [
        ("prompt", lambda row: render.printable(row.prompt_id)),
        ("sample", lambda row: row.sample),
        ("score", lambda row: row.score),
        ("outcome", lambda row: row.outcome),
        ("tokens", lambda row: row.tokens),
        ("finish", lambda row: row.finish),
    ]
    if any(row.turns is not None for row in rows):
        columns += [("turns", lambda row: row.turns), ("end", lambda row: row.end)]
    if any(row.advantage is not None for row in rows):
        columns += [("advantage", lambda row: None if row.advantage is None else f"{row.advantage:+.3f}")]
    if any(row.truth for row in rows):
        columns += [("truth", lambda row: render.clipped(_line(row.truth or "", None), longest))]
    if form.sort == "flipped":
        columns += [("flip", lambda row: flipped.by_question.get((row.set, row.prompt_id)))]
        if flipped.before:
            columns += [("before", lambda row: _before(flipped.before.get((row.set, row.prompt_id))))]
    return columns


def _before(earlier: "Before | None") -> str:
    return "-" if earlier is None else f"{earlier.score:.3g} in {earlier.step}"


def _width(columns: Sequence[Column], rows: "Sequence[SampleRow]") -> int:
    """Return the width of these columns on the terminal, in characters, including the gap after each column."""
    return sum(2 + max(len(name), *(len(render.cell(cell(row))) for row in rows)) for name, cell in columns)


def _line(text: str, grep: str | None) -> str:
    """Return the last line that contains `grep`, or else the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return render.printable(next((line for line in reversed(lines) if grep and grep in line), (lines or [""])[-1]))


def _as_json(row: "SampleRow", flipped: _Flips, form: Form) -> dict[str, Any]:
    question = (row.set, row.prompt_id)
    flip = {"flip": flipped.by_question.get(question)} if form.sort == "flipped" else {}
    before = flipped.before.get(question)
    only_if = {
        "truth": row.truth is not None,
        "round": row.round > 1,
        "turns": row.turns is not None,
        "end": row.end is not None,
    }
    fields = {name: value for name, value in vars(row).items() if only_if.get(name, True)}
    return {**fields, **flip, **({} if before is None else {"before": vars(before)})}
