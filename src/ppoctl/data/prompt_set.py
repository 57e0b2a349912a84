"""Prompts of one set of rows. A prompt is rendered when it is used.

The module decides which rows are used, and counts the rows that are not. Prompts that are too long must be found at
startup. This tokenizes only few rows: equal questions are rendered once, and most texts have fewer bytes than the
limit has tokens.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import overload

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.errors import DataError
from ppoctl.data.framing import Framing
from ppoctl.data.index import RowSet
from ppoctl.data.row_faults import RowFaults
from ppoctl.data.row_tables import SingleTable
from ppoctl.data.rows import DatasetRow
from ppoctl.data.template import PromptTemplate
from ppoctl.data.template_arguments import TemplateArguments
from ppoctl.environments.environment_table import EpisodeTable

_FEW = 10
"""The rows whose prompts are too long are considered few if they are at most 1 in this number of rows."""
_TOKENIZED_TOGETHER = 512
_KEPT_PROMPTS = 8192
"""Number of rendered prompts of a set that are cached."""


@dataclass(frozen=True)
class Counts:
    """Numbers of rows of one table."""

    read: int
    repeated: int
    """Rows with the question and the ground truth of an earlier row."""
    too_long: int
    """Rows whose prompt exceeds the limit. Dropped repetitions are not counted."""
    dropped: int
    cut: int
    """Rows whose prompt is truncated."""

    @property
    def used(self) -> int:
        return self.read - self.dropped

    def as_dict(self) -> dict[str, int]:
        """Return name -> count, including the rows that are used."""
        return {**asdict(self), "used": self.used}

    def remarks(self) -> str:
        """Return a sentence about rows that are repeated or too long; empty: there are no such rows."""
        parts = []
        if self.repeated:
            parts.append(f"{self.repeated} of {self.read} rows repeat an earlier one")
        if self.too_long:
            parts.append(f"{self.too_long} are too long" + (" and are truncated" if self.cut else ""))
        return "; ".join([*parts, f"{self.used} are used"]) if parts else ""


class PromptSet(Sequence[Prompt]):
    """Prompts of the used rows of one table, in file order. Chat templates receive the tools of `environment`.

    Equal questions are measured once, with the tools of the first row. A longer prompt of another row is truncated.
    Raises the errors of `Framing.chat` and of the chat template. Raises DataError if a row has no environment, if a
    prompt has no tokens, or if a prompt is too long and `long_prompts` is `"error"`.
    """

    def __init__(
        self,
        rows: RowSet,
        table: SingleTable,
        template: PromptTemplate,
        max_tokens: int,
        environment: EpisodeTable | None = None,
    ) -> None:
        self.rows, self.weight = rows, table.weight
        self._table, self._template, self._max_tokens = table, template, max_tokens
        self._framing = Framing(table, name=rows.name)
        self._arguments = TemplateArguments(table, environment, name=rows.name)
        self._arguments.require_environments(rows)
        self._prompt = lru_cache(_KEPT_PROMPTS)(self._render)
        self.lengths = self._long_questions()
        """Question number -> number of tokens, for each question that is too long."""
        drops_repeated, drops_long = table.duplicates == "drop", table.long_prompts == "drop"
        kept = [n for n, repeated in enumerate(self.rows.repeats) if not (repeated and drops_repeated)]
        too_long = [n for n in kept if self.rows.questions[n] in self.lengths] if self.lengths else []
        if too_long and table.long_prompts == "error":
            raise self._too_long(too_long, len(kept))
        self.used = array(
            "I", [n for n in kept if self.rows.questions[n] not in self.lengths] if drops_long else kept
        )
        """Positions in the file of the rows that are used."""
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

    def _render(self, position: int) -> Prompt:
        row = self.rows.row(position)
        chat = self._framing.chat(row)
        arguments = self._arguments.of(row)
        text = self._template.text(chat, row, arguments)
        (ids,) = self._template.token_ids([text])
        if len(ids) > self._max_tokens:
            opening = self._template.opening
            ids = (*opening, *ids[len(ids) - self._max_tokens + len(opening) :])
        has_turns = self._arguments.environment is not None
        return Prompt(row.id, ids, text, row.answer, chat, row.fields, arguments if has_turns else {})

    def _long_questions(self) -> dict[int, int]:
        lengths: dict[int, int] = {}
        unsure = self._unsure()
        while batch := list(islice(unsure, _TOKENIZED_TOGETHER)):
            ids = self._template.token_ids([text for _, _, text in batch])
            for (number, row, _), tokens in zip(batch, ids, strict=True):
                if not tokens:
                    raise DataError(
                        f"row `{row.id}` ({row.place}) renders to no tokens", hint="check the chat template"
                    )
                if len(tokens) > self._max_tokens:
                    lengths[number] = len(tokens)
        return lengths

    def _unsure(self) -> Iterator[tuple[int, DatasetRow, str]]:
        """Yield number, first row and text of each question that may be too long, judging by its number of bytes.

        At the end, raises DataError for all questions that cannot be rendered.
        """
        faults = RowFaults()
        for number, row in enumerate(self.rows.first_rows()):
            arguments = self._arguments.of(row)
            try:
                text = self._template.text(self._framing.chat(row), row, arguments)
            except DataError as error:
                faults.add(error, row.place, row.id)
                continue
            self._arguments.require_shown(row, text)
            bound = self._template.most_tokens(text)
            if not text or bound is None or bound > self._max_tokens:
                yield number, row, text
        faults.require_none()

    def _too_long(self, positions: Sequence[int], rows: int) -> DataError:
        longest = max(positions, key=lambda position: self.lengths[self.rows.questions[position]])
        row, tokens = self.rows.row(longest), self.lengths[self.rows.questions[longest]]
        longer, key = f"--set rollout.max_prompt_tokens={tokens}", f"data.{self.rows.name}.long_prompts"
        # If few rows are too long, suggest dropping these rows: a larger limit would cost memory for every prompt.
        few = _FEW * len(positions) <= rows
        return DataError(
            f"row `{row.id}` ({row.place}) has {tokens} prompt tokens, but `rollout.max_prompt_tokens` is "
            f"{self._max_tokens}; {len(positions)} of {rows} rows of `data.{self.rows.name}` exceed it",
            hint=f"--set {key}=drop  # cut keeps the end of each prompt; or {longer}"
            if few
            else f"{longer}, or drop these rows: --set {key}=drop",
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
