"""An environment that is a Python class or async function of the user, in a file or in an installed package."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ppoctl.environments.table import EnvironmentTable
from ppoctl.recipe_table import RESULTS
from ppoctl.user_functions import FUNCTION_PATTERN


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
