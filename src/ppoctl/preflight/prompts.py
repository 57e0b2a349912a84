"""Checks of every row of the data, read as training reads it, and of the chat template on each kind of row."""

from collections.abc import Callable

from ppoctl.batch.prompts import Message
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.rows import Row, require_enough, stream_rows
from ppoctl.data.template import chat_of, refused
from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.schema import ColumnRows, Gsm8kRows

Counted = Callable[[str, int], None]
"""Callback that hears how many rows of a dataset have been read, every `EVERY_ROWS` of them."""
EVERY_ROWS = 10_000


def require_rows(
    table: Gsm8kRows | ColumnRows,
    name: str,
    template: ChatTemplate | None,
    *,
    at_least: int,
    counted: Counted | None = None,
) -> None:
    """Raise what `data.rows.stream_rows` raises, and DataError on fewer rows than `at_least` (those of a step) or on
    a row that the template refuses. One row for each sequence of roles is rendered, as templates refuse sequences of
    roles."""
    tried: set[tuple[str, ...]] = set()
    number = 0
    for number, row in enumerate(stream_rows(table, name=name), start=1):
        chat = chat_of(row, table, name=name)
        roles = tuple(message.role for message in chat)
        if template is not None and template.text is not None and roles not in tried:
            tried.add(roles)
            _require_rendered(template, chat, row)
        if counted is not None and number % EVERY_ROWS == 0:
            counted(name, number)
    require_enough(number, at_least)


def _require_rendered(template: ChatTemplate, chat: tuple[Message, ...], row: Row) -> None:
    try:
        text = template.render(chat)
        last = Message(chat[-1].role, f"{chat[-1].content} Or not?")
        other = template.render((*chat[:-1], last))
    except Exception as error:  # a template is code: it can fail in any way
        raise refused(row, error) from error
    if not text.strip():
        raise DataError(
            f"the model's chat template says nothing of row `{row.id}` ({row.place})", hint="fetch the model again"
        )
    if text == other:
        raise EnvironmentProblemError(
            f"the model's chat template leaves out the question of row `{row.id}` ({row.place})",
            hint="fetch the model again",
        )
