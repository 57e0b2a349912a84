"""Records of the rows that a selection selects."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppoctl.core.batch.fields import FIELDS
from ppoctl.core.batch.record import Record
from ppoctl.core.batch.records import Rewards, Rollouts, Selection
from ppoctl.core.batch.sequences import require

AnyRecord = TypeVar("AnyRecord", bound=Record[Any])

Place = tuple[int, int]
"""Round of a sample, from 1, and its row in the rollouts of that round, from 0."""


def select(
    rollouts: Sequence[Rollouts], places: Sequence[Place], *, is_full: bool, summary: Mapping[str, float]
) -> Selection:
    """Return the selection of these samples of the rollouts of all rounds, in this order."""
    return Selection(
        rounds=torch.tensor([number for number, _ in places], dtype=torch.int64),
        rows=torch.tensor([row for _, row in places], dtype=torch.int64),
        prompt_ids=[rollouts[number - 1].prompt_ids[row] for number, row in places],
        sample_indices=[rollouts[number - 1].sample_indices[row] for number, row in places],
        is_full=is_full,
        summary=dict(summary),
    )


def every_row(rollouts: Sequence[Rollouts]) -> Selection:
    """Return the selection of every sample, in the order of generation."""
    places = [(number, row) for number, each in enumerate(rollouts, start=1) for row in range(each.num_seqs)]
    return select(rollouts, places, is_full=True, summary={})


def within(selection: Selection, among: Selection) -> Selection:
    """Return the same samples as rows of a record whose rows are those of `among`, which has each sample once.

    Raises ValueError if `among` does not have a sample.
    """
    rows = {place: row for row, place in enumerate(_places(among))}
    require(all(place in rows for place in _places(selection)), "every selected sample is in the other selection")
    return replace(
        selection,
        rounds=torch.ones_like(selection.rounds),
        rows=torch.tensor([rows[place] for place in _places(selection)], dtype=torch.int64),
    )


def _places(selection: Selection) -> list[Place]:
    return list(zip(selection.rounds.tolist(), selection.rows.tolist(), strict=True))


def take(selection: Selection, records: Sequence[AnyRecord]) -> AnyRecord:
    """Return a record of the selected rows, in the order of the selection.

    `records` are of one kind, one for each round, in order. Rows are padded with 0 to the width R of the widest
    record of which a row is selected, so that records of different kinds get the same width. Values of a whole record
    are those of the first selected round; `summary` is empty, because it describes other rows. If a scorer returned
    scores of tokens in some rounds only, those of the other rounds are NaN (see `Rewards.token_scores`), and the grid
    may be narrower than R. The result is never committed; its identity is the digest of its content, as for any
    record.

    Raises ValueError if a selected row does not exist, or if only some of the selected rounds have an optional field.
    """
    places = _places(selection)
    rounds = [number for number, _ in places]
    require(max(rounds, default=1) <= len(records), "there is a record of every selected round")
    numbers = sorted(set(rounds)) or [1]
    sources: dict[int, Any] = dict(zip(numbers, _aligned([records[number - 1] for number in numbers]), strict=True))
    counts = {number: _num_rows(record) for number, record in sources.items()}
    offsets = {number: sum(counts[other] for other in counts if other < number) for number in counts}
    index = [offsets[number] + row for number, row in places]
    cls: type[AnyRecord] = type(next(iter(sources.values())))
    values: dict[str, Any] = {}
    for field in FIELDS[cls.kind]:
        columns = [getattr(record, field.name) for record in sources.values()]
        absent = [column is None for column in columns]
        require(len(set(absent)) == 1, f"{field.name} is present in all selected rounds or in none")
        if absent[0]:
            continue
        if field.axes == "":
            values[field.name] = {} if field.name == "summary" else columns[0]
            continue
        require(all(row < counts[number] for number, row in places), "every selected row exists")
        if field.axes == "T":
            prompts = [record.prompt_lengths.tolist() for record in sources.values()]
            split = [part for ids, lengths in zip(columns, prompts, strict=True) for part in ids.split(lengths)]
            values[field.name] = torch.cat([columns[0][:0], *(split[at] for at in index)])
        elif field.axes == "N E":
            tokens = [record.input_lengths.tolist() for record in sources.values()]
            parts = [part for each, counts_of in zip(columns, tokens, strict=True) for part in each.split(counts_of)]
            values[field.name] = torch.cat([columns[0][:0], *(parts[at] for at in index)])
        elif isinstance(columns[0], dict):
            names = sorted({name for column in columns for name in column})
            empty = [[None] * count for count in counts.values()]
            filled = {n: [col.get(n, e) for col, e in zip(columns, empty, strict=True)] for n in names}
            values[field.name] = {name: _rows(parts, index) for name, parts in filled.items()}
        else:
            values[field.name] = _rows(columns, index)
    return cls(**values)


def _aligned(records: Sequence[Any]) -> Sequence[Any]:
    """Return the records, all with a grid of token scores if one of them has it."""
    is_whole = [isinstance(each, Rewards) and each.token_scores is None for each in records]
    if all(is_whole):
        return records
    return [
        replace(each, token_scores=torch.where(each.valid, torch.nan, 0.0)[:, None]) if is_missing else each
        for each, is_missing in zip(records, is_whole, strict=True)
    ]


def _num_rows(record: Record[Any]) -> int:
    """Return the number of rows, B; 0 if no field of the record has rows."""
    columns = (getattr(record, field.name) for field in FIELDS[record.kind] if field.axes in ("B", "B R"))
    return next((len(column) for column in columns if isinstance(column, Tensor | list)), 0)


def _rows(columns: Sequence[Any], index: Sequence[int]) -> Any:
    """Return rows of a column that is split over several records. Grids are padded to the widest of them."""
    if not isinstance(columns[0], Tensor):
        joined = [value for column in columns for value in column]
        return [joined[at] for at in index]
    width = max(column.shape[-1] for column in columns)
    padded = [pad(column, (0, width - column.shape[1])) if column.dim() == 2 else column for column in columns]
    return torch.cat(padded)[torch.tensor(index, dtype=torch.int64)]
