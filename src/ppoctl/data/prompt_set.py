"""Prompts of one set of rows, rendered when they are drawn; which rows are used, and how many are not.

A prompt that is too long must be known at the start, and no row needs its tokens for that: equal questions are
rendered once, and most texts have fewer bytes than the limit has tokens.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import overload

from ppoctl.batch.prompts import Prompt
from ppoctl.data.framing import Framing
from ppoctl.data.index import RowSet
from ppoctl.data.rows import DatasetRow
from ppoctl.data.template import PromptTemplate
from ppoctl.errors import DataError
from ppoctl.recipe.rows import SingleTable

_FEW = 10
"""One row in so many, or fewer, is few."""
_TOKENIZED_TOGETHER = 512
_KEPT_PROMPTS = 8192
"""Prompts of a set that are not rendered again when they come again."""


@dataclass(frozen=True)
class Counts:
    """Numbers of rows of one table."""

    read: int
    repeated: int
    """Rows with the question and the ground truth of an earlier one."""
    too_long: int
    """Rows, of those that are left, whose prompt has more than the most tokens."""
    dropped: int
    cut: int

    @property
    def used(self) -> int:
        return self.read - self.dropped

    def as_dict(self) -> dict[str, int]:
        """The counts by name, with the rows that are used."""
        return {**asdict(self), "used": self.used}

    def remarks(self) -> str:
        """What is not usual about the rows, in words; empty: nothing."""
        said = []
        if self.repeated:
            said.append(f"{self.repeated} of {self.read} rows repeat an earlier one")
        if self.too_long:
            said.append(f"{self.too_long} are too long" + (" and are cut" if self.cut else ""))
        return "; ".join([*said, f"{self.used} are used"]) if said else ""


class PromptSet(Sequence[Prompt]):
    """Prompts of the rows of one table that are used, in file order.

    Raises what `Framing.chat` and the template raise, and DataError on a prompt without tokens, and on one that is
    too long where that is an error.
    """

    def __init__(self, rows: RowSet, table: SingleTable, template: PromptTemplate, max_tokens: int) -> None:
        self.rows, self.weight = rows, table.weight
        self._table, self._template, self._max_tokens = table, template, max_tokens
        self._framing = Framing(table, name=rows.name)
        self._prompt = lru_cache(_KEPT_PROMPTS)(self._made)
        self.lengths = self._long_questions()
        """Tokens of each question that is too long, by its number."""
        drops_repeated, drops_long = table.duplicates == "drop", table.long_prompts == "drop"
        left = [n for n, repeated in enumerate(self.rows.repeats) if not (repeated and drops_repeated)]
        too_long = [n for n in left if self.rows.questions[n] in self.lengths] if self.lengths else []
        if too_long and table.long_prompts == "error":
            raise self._too_long(too_long, len(left))
        self.used = array(
            "I", [n for n in left if self.rows.questions[n] not in self.lengths] if drops_long else left
        )
        """Positions of the rows that are used."""
        if not self.used:
            raise DataError(
                f"every row of `data.{rows.name}` has more than {max_tokens} prompt tokens "
                "(`rollout.max_prompt_tokens`)",
                hint=f"--set rollout.max_prompt_tokens={min(self.lengths.values())}",
            )
        self.counts = Counts(
            read=len(self.rows),
            repeated=sum(self.rows.repeats),
            too_long=len(too_long),
            dropped=len(self.rows) - len(self.used),
            cut=0 if drops_long else len(too_long),
        )

    def __len__(self) -> int:
        return len(self.used)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        return self._prompt(self.used[index])

    def _made(self, position: int) -> Prompt:
        row = self.rows.row(position)
        chat = self._framing.chat(row)
        text = self._template.text(chat, row, self._table.template_args)
        (ids,) = self._template.token_ids([text])
        if len(ids) > self._max_tokens:
            opening = self._template.opening
            ids = (*opening, *ids[len(ids) - self._max_tokens + len(opening) :])
        return Prompt(row.id, ids, text, row.answer, chat, row.fields)

    def _long_questions(self) -> dict[int, int]:
        found: dict[int, int] = {}
        unsure = self._unsure()
        while some := list(islice(unsure, _TOKENIZED_TOGETHER)):
            ids = self._template.token_ids([text for _, _, text in some])
            for (number, row, _), its in zip(some, ids, strict=True):
                if not its:
                    raise DataError(
                        f"row `{row.id}` ({row.place}) renders to no tokens", hint="look at the chat template"
                    )
                if len(its) > self._max_tokens:
                    found[number] = len(its)
        return found

    def _unsure(self) -> Iterator[tuple[int, DatasetRow, str]]:
        """Number, first row and text of each question whose length its bytes do not tell."""
        for number, row in enumerate(self.rows.first_rows()):
            text = self._template.text(self._framing.chat(row), row, self._table.template_args)
            bound = self._template.most_tokens(text)
            if not text or bound is None or bound > self._max_tokens:
                yield number, row, text

    def _too_long(self, positions: Sequence[int], rows: int) -> DataError:
        longest = max(positions, key=lambda position: self.lengths[self.rows.questions[position]])
        row, tokens = self.rows.row(longest), self.lengths[self.rows.questions[longest]]
        longer, key = f"--set rollout.max_prompt_tokens={tokens}", f"data.{self.rows.name}.long_prompts"
        # A few rows are rather left out than given a window that every prompt then takes.
        few = _FEW * len(positions) <= rows
        return DataError(
            f"row `{row.id}` ({row.place}) has {tokens} prompt tokens, and `rollout.max_prompt_tokens` is "
            f"{self._max_tokens}; {len(positions)} of {rows} rows of `data.{self.rows.name}` are over it",
            hint=f"--set {key}=drop  # cut keeps their ends; or {longer}"
            if few
            else f"{longer}, or leave such rows out: --set {key}=drop",
        )


class Mixed(Sequence[Prompt]):
    """Prompts of several sets, one set after another."""

    def __init__(self, sets: Sequence[PromptSet]) -> None:
        self._sets = sets
        self._ends = list(accumulate(map(len, sets)))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index % len(self))
        return self._sets[number][index % len(self) - self._ends[number] + len(self._sets[number])]
