"""An environment that is a Python class or async function of the user, in a file or in an installed package."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ppoctl.core.errors import RecipeError
from ppoctl.core.recipe_table import RESULTS
from ppoctl.core.user_functions import FUNCTION_PATTERN, import_command, require_function
from ppoctl.environments.described import schemas_of
from ppoctl.environments.environment_table import EnvironmentTable
from ppoctl.rewards.function import ScorerSpec


class PythonEnvironment(EnvironmentTable):
    """Your own class with the methods `open`, `step` and `close`, or your own async function."""

    kind: Annotated[Literal["python"], RESULTS]
    """Your own Python class or async function."""
    path: Annotated[str, RESULTS, Field(pattern=FUNCTION_PATTERN)]
    """`path.py:Name`, with a path relative to the recipe file, or `module:Name` of an installed package. A class is
    created with `options` as keyword arguments, once for each episode; an async function is called with the row, the
    seed, a function that returns the actor's next turn, and `options`."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the file, written when the recipe is read. A run does not continue with a changed file, unless
    `path` is set again. Empty for an installed package."""

    @property
    def answers_by(self) -> ScorerSpec:
        options = {"path": self.path, "options": dict(self.options)}
        hint = import_command(self.path)
        return ScorerSpec("ppoctl.environments.user:opened", options, known_as=self.path, hint=hint)

    def schemas(self) -> Sequence[dict[str, Any]]:
        return schemas_of(self.answers_by, [self.path])

    def require_there(self, key: str = "environment") -> None:
        """Raise MissingFileError if the file does not exist, and RecipeError if it has changed since the recipe was
        read. `key` is the key of this table."""
        setting = f"{key}.path={self.path}"
        require_function(self.path, self.digest, whose="environment's", setting=setting, changed=RecipeError)
