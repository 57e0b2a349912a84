"""An environment that a field of the row chooses, for mixed data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from ppoctl.core.batch.prompts import Json
from ppoctl.core.errors import DataError
from ppoctl.core.recipe_table import RESULTS
from ppoctl.environments.environment_table import EnvironmentTable, EpisodeTable
from ppoctl.environments.python_environment import PythonEnvironment
from ppoctl.environments.tools import ToolsEnvironment

SINGLE: tuple[type[EnvironmentTable], ...] = (PythonEnvironment, ToolsEnvironment)
"""Tables that `[environment.cases.VALUE]` accepts."""

if TYPE_CHECKING:
    Case = EnvironmentTable
else:
    Case = Annotated[Union[SINGLE], Field(discriminator="kind")]  # noqa: UP007 - members are known at run time


class ChooseEnvironment(EpisodeTable):
    """A field of the row selects the environment. The limits of an episode are the same for all rows."""

    kind: Annotated[Literal["choose"], RESULTS]
    """A field of the row selects one of several environments."""
    field: Annotated[str, RESULTS] = "environment"
    """Field of the row that selects the environment."""
    cases: dict[str, Case] = Field(min_length=1)
    """Environment for each value of the field."""

    @property
    def kinds(self) -> Mapping[tuple[str, ...], EnvironmentTable]:
        # `loading.partial` replaces an invalid case by None.
        return {("cases", name): case for name, case in self.cases.items() if case is not None}

    def of_row(self, fields: Mapping[str, Json]) -> EnvironmentTable:
        chosen = fields.get(self.field)
        if isinstance(chosen, str) and chosen in self.cases:
            return self.cases[chosen]
        has = f"is `{chosen}`" if self.field in fields else "is missing"
        raise DataError(
            f"the field `{self.field}`, which selects the environment of a row, {has}; the cases of `[environment]` "
            f"are {', '.join(f'`{name}`' for name in self.cases)}",
            hint=f"add `[environment.cases.{chosen or 'NAME'}]`, or change the row",
        )
