"""Turn a question into chat messages: system message, prompt file, instruction."""

from pathlib import Path

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, MissingFileError, RecipeError, quoted
from ppoctl.data.row_tables import SingleTable
from ppoctl.data.rows import DatasetRow

SLOT = "{question}"


class Framing:
    """Framing of the rows of one table. `name` is the key of the table below `data`."""

    def __init__(self, table: SingleTable, *, name: str) -> None:
        """Read the prompt file, if there is one.

        Raises MissingFileError if the file cannot be read, and RecipeError if the file has no `{question}`.
        """
        self._table, self._name = table, name
        self.prompt_file = None if table.prompt_file is None else _prompt_file(table.prompt_file, name)
        """Text of the prompt file; None: there is no prompt file."""

    def chat(self, row: DatasetRow) -> tuple[Message, ...]:
        """Return the messages of a row: the chat in the row, or the system message and the framed question.

        Raises DataError if the row has a chat, and the table has an instruction, a prompt file or a system message
        that cannot be used with the chat.
        """
        table, name = self._table, self._name
        system = (Message("system", table.system),) if table.system else ()
        if isinstance(row.question, str):
            return (*system, Message("user", self._framed(row.question)))
        for key in ("instruction", "prompt_file"):
            if getattr(table, key):
                raise DataError(
                    f"`data.{name}.{key}` is set, but the prompt of row `{row.id}` ({row.place}) is a chat",
                    hint=f'--set data.{name}.instruction=""; a chat is used as it is'
                    if key == "instruction"
                    else f"remove `prompt_file` from [data.{name}]; a chat is used as it is",
                )
        if system and row.question[0].role == "system":
            raise DataError(
                f"`data.{name}.system` is set, but row `{row.id}` ({row.place}) already has a system message",
                hint=f'--set data.{name}.system=""',
            )
        return (*system, *row.question)

    def _framed(self, question: str) -> str:
        if self.prompt_file is not None:
            return self.prompt_file.replace(SLOT, question)
        return f"{question}\n{self._table.instruction}" if self._table.instruction else question


def _prompt_file(path: str, name: str) -> str:
    key = f"data.{name}.prompt_file"
    try:
        text = Path(path).read_text("utf-8-sig")  # without the byte order mark of some editors
    except OSError as error:
        raise MissingFileError(
            f"`{key}` is `{path}`: {str(error.strerror).lower()}", hint=f"ls -l {quoted(Path(path).parent)}"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"`{key}` is `{path}`: not UTF-8 text", hint=f"file {quoted(path)}") from error
    if SLOT not in text:
        raise RecipeError(
            f"`{key}` is `{path}`, which does not contain `{SLOT}`",
            hint=f"${{EDITOR:-vi}} {quoted(path)}  # write {SLOT} at the place of the question",
        )
    return text.rstrip("\n")
