"""Arguments of the chat template for each row: those of the recipe, and the tools of the row's environment."""

from collections.abc import Callable, Mapping
from typing import Any

from ppoctl.core.batch.prompts import Json
from ppoctl.core.errors import DataError, RecipeError
from ppoctl.data.index import RowSet
from ppoctl.data.row_tables import SingleTable
from ppoctl.data.rows import DatasetRow
from ppoctl.environments.environment_table import EnvironmentTable, EpisodeTable

EnvironmentOf = Callable[[str], EpisodeTable | None]
"""Function that returns the environment of a set, by its key below `data` (`train`, `eval.NAME`); None: its responses
have one turn."""


class TemplateArguments:
    """Arguments of the chat template for the rows of one table. `name` is the key of the table below `data`, and
    `environment` is None if the rows have none."""

    def __init__(self, table: SingleTable, environment: EpisodeTable | None, *, name: str) -> None:
        self._table, self._name, self.environment = table, name, environment
        self._known: dict[int, Mapping[str, Json]] = {}
        self._shown = set[int]()

    def of(self, row: DatasetRow) -> Mapping[str, Json]:
        """Return `template_args` of the table, and `tools` if the row's environment has tools.

        Raises DataError if the row has no environment, and the errors of `EnvironmentTable.schemas`.
        """
        if self.environment is None:
            return self._table.template_args
        own = self.environment.of_row(row.fields)
        if id(own) not in self._known:  # the recipe keeps its tables, so their addresses stay theirs
            tools = tools_of(own)
            self._known[id(own)] = {**self._table.template_args, **({"tools": tools} if tools else {})}
        return self._known[id(own)]

    def require_environments(self, rows: RowSet) -> None:
        """Raise DataError if rows have no environment, with their number and the first of them."""
        if self.environment is None or () in self.environment.kinds:
            return
        faults: list[tuple[DatasetRow, int, DataError]] = []
        for row, times in rows.different_rows():
            try:
                self.environment.of_row(row.fields)
            except DataError as error:
                faults.append((row, times, error))
        if faults:
            first, _, why = faults[0]
            raise DataError(
                f"{sum(times for _, times, _ in faults)} of {len(rows)} rows of `data.{self._name}` have no "
                f"environment, first `{first.id}` ({first.place}): {why.message}",
                hint=why.hint,
            )

    def require_shown(self, row: DatasetRow, text: str) -> None:
        """Raise RecipeError if the prompt of a row does not contain the names of the tools. Only the first row of
        each environment is checked."""
        arguments = self.of(row)
        if id(arguments) in self._shown:
            return
        self._shown.add(id(arguments))
        tools: Any = () if self.environment is None else arguments.get("tools", ())
        for tool in tools:
            name = tool.get("function", tool)["name"]
            if name not in text:
                raise RecipeError(
                    f"the environment of `data.{self._name}` has the tool `{name}`, but the prompt of row `{row.id}` "
                    f"({row.place}) does not name it: the model's chat template does not show tools",
                    hint="use a model whose chat template shows tools, or describe them yourself: "
                    f'--set data.{self._name}.system="You can call {name} ..."',
                )


def tools_of(environment: EnvironmentTable) -> list[Json]:
    """Return the schemas of the tools in the form that chat templates read; empty: no tools."""
    return [dict(schema) for schema in environment.schemas()]


def no_environment(name: str) -> None:
    """Return None: a recipe without environments."""
