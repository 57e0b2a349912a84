"""Checks of every row of the data, read as in training. The chat template is tried on each kind of row."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppoctl.batch.prompts import Json, Message
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.framing import Framing
from ppoctl.data.index import Counted, RowSet, read_set
from ppoctl.data.prompt_set import PromptSet
from ppoctl.data.rows import DatasetRow, require_enough, require_in_an_epoch, single_tables
from ppoctl.data.template import PromptTemplate, refused
from ppoctl.data.template_arguments import TemplateArguments
from ppoctl.data.tokenizer import light_tokenizer, load_tokenizer
from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.row_files import in_an_epoch
from ppoctl.recipe.rows import ColumnRows
from ppoctl.recipe.schema import AnyRows, EpisodeTable, SingleTable
from ppoctl.rewards.rows import RowCheck
from ppoctl.rewards.table import ScorerTable


class RowChecks:
    """Checks of the rows of a recipe. They also work if the folder of the model is missing."""

    def __init__(
        self, folder: Path | None, template: ChatTemplate | None, max_tokens: int | None, counted: Counted | None
    ) -> None:
        """Prepare the checks.

        `template` is the chat template of the model; None if it is missing or cannot be used. `max_tokens` is the
        maximum length of a prompt; None if the recipe does not set a maximum. `counted` is called with the number of
        rows that were read.
        """
        self._template, self._max_tokens, self._counted = template, max_tokens, counted
        tokenizer = None if folder is None or template is None else _tokenizer(folder, template)
        self._renderer = None if tokenizer is None else PromptTemplate(tokenizer)

    def require(
        self,
        table: AnyRows,
        name: str,
        *,
        at_least: int,
        key: str = "rollout.prompts_per_step",
        reward: ScorerTable | None = None,
        environment: EpisodeTable | None = None,
    ) -> Iterator[str]:
        """Yield notes on the rows of a table.

        Raises the errors of `data.index.read_set` and `data.prompt_set.PromptSet`. Raises DataError if there are
        fewer rows than `at_least` (the rows of a round, which `key` sets), or if the chat template rejects a row.
        Raises RewardError if `reward` cannot score a row. Raises the errors of `environment` if it rejects a row.
        """
        read, rows, scored = 0, 0, None if reward is None else RowCheck(reward, f"data.{name}")
        for source, (its, single) in single_tables(table, name=name).items():
            found = read_set(single, name=its, source=source, counted=self._counted)
            self._require_rendered(found, single, environment)
            if scored is not None:
                for row, times in found.different_rows():
                    scored.see(row.id, row.answer, row.fields, times)
            used = len(found)
            read += used
            if self._renderer is not None and self._max_tokens is not None:
                counts = PromptSet(found, single, self._renderer, self._max_tokens, environment).counts
                used = counts.used
                if remarks := counts.remarks():
                    yield f"`data.{its}`: {remarks}"
            require_in_an_epoch(its, used, single.weight)
            rows += in_an_epoch(used, single.weight)
        require_enough(rows, at_least, key)
        if scored is not None:
            scored.require()
            if scored.unscored:
                yield (
                    f"`data.{name}`: responses to {scored.unscored} of {read} rows are not scored: their reward "
                    f"requires a ground truth, and the rows have none{_column_hint(table, name)}"
                )

    def _require_rendered(self, rows: RowSet, table: SingleTable, environment: EpisodeTable | None) -> None:
        """Frame every question, and render one question for each sequence of chat roles.

        A chat template may reject some sequences of roles.
        """
        framing, tried = Framing(table, name=rows.name), set[tuple[str, ...]]()
        arguments = TemplateArguments(table, environment, name=rows.name)
        arguments.require_environments(rows)
        for row in rows.first_rows():
            chat = framing.chat(row)
            roles = tuple(message.role for message in chat)
            if self._template is not None and self._template.text is not None and roles not in tried:
                tried.add(roles)
                _require_rendered(self._template, chat, row, arguments.of(row))


def _tokenizer(folder: Path, template: ChatTemplate) -> Any:
    """Return the tokenizer of the model; None: the folder has none, or the check of the model reports why it cannot
    be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    try:
        return light_tokenizer(folder, template) or load_tokenizer(str(folder))
    except EnvironmentProblemError:
        return None


def _column_hint(table: AnyRows, name: str) -> str:
    has_no_column = isinstance(table, ColumnRows) and table.answer is None
    return f"; if there is a column: --set data.{name}.answer=COLUMN" if has_no_column else ""


def _require_rendered(
    template: ChatTemplate, chat: tuple[Message, ...], row: DatasetRow, arguments: Mapping[str, Json]
) -> None:
    try:
        text = template.render(chat, arguments)
        last = Message(chat[-1].role, f"{chat[-1].content} Or not?")
        other = template.render((*chat[:-1], last), arguments)
    except Exception as error:  # a chat template is code: it can fail in any way
        raise refused(row, error) from error
    if not text.strip():
        raise DataError(
            f"the model's chat template renders row `{row.id}` ({row.place}) as empty text",
            hint="fetch the model again",
        )
    if text == other:
        raise EnvironmentProblemError(
            f"the model's chat template omits the question of row `{row.id}` ({row.place})",
            hint="fetch the model again",
        )
