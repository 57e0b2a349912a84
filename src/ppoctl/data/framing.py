"""The way from a question to the messages of a chat: system message, prompt file, instruction."""

from pathlib import Path

from ppoctl.batch.prompts import Message
from ppoctl.data.rows import DatasetRow
from ppoctl.errors import DataError, MissingAssetError, RecipeError, quoted
from ppoctl.recipe.rows import SingleTable

SLOT = "{question}"


class Framing:
    """Framing of the rows of one table. `name` is its key below `data`."""

    def __init__(self, table: SingleTable, *, name: str) -> None:
        """Read the prompt file, if there is one. Raises MissingAssetError where it cannot be read, RecipeError where
        it has no slot."""
        self._table, self._name = table, name
        self.prompt_file = None if table.prompt_file is None else _prompt_file(table.prompt_file, name)
        """The text of the prompt file; None: there is none."""

    def chat(self, row: DatasetRow) -> tuple[Message, ...]:
        """Messages of a row: its own, or system message and question as the table frames it. Raises DataError where
        the table frames a chat that frames itself."""
        table, name = self._table, self._name
        system = (Message("system", table.system),) if table.system else ()
        if isinstance(row.question, str):
            return (*system, Message("user", self._framed(row.question)))
        for key in ("instruction", "prompt_file"):
            if getattr(table, key):
                raise DataError(
                    f"`data.{name}.{key}` is set, and the prompt of row `{row.id}` ({row.place}) is a chat",
                    hint=f'--set data.{name}.instruction=""; a chat says everything itself'
                    if key == "instruction"
                    else f"remove `prompt_file` from [data.{name}]; a chat says everything itself",
                )
        if system and row.question[0].role == "system":
            raise DataError(
                f"`data.{name}.system` is set, and row `{row.id}` ({row.place}) has a system message of its own",
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
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise MissingAssetError(
            f"`{key}` is `{path}`: {str(error.strerror).lower()}", hint=f"ls -l {quoted(Path(path).parent)}"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"`{key}` is `{path}`: no UTF-8 text", hint=f"file {quoted(path)}") from error
    if SLOT not in text:
        raise RecipeError(
            f"`{key}` is `{path}`, and nowhere in it stands `{SLOT}`",
            hint=f"${{EDITOR:-vi}} {quoted(path)}  # write {SLOT} where the question belongs",
        )
    return text.rstrip("\n")
