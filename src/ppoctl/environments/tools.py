"""An environment that runs tools: each turn with tool calls is answered by their results; a turn without a call ends
the episode."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.environments.table import EnvironmentTable
from ppoctl.recipe_table import RESULTS, Array, AtLeastOne


class ToolsEnvironment(EnvironmentTable):
    """Tools that the actor may call. A turn with calls is answered by their results; a turn without a call ends the
    episode. A call that cannot be read is answered by an explanation."""

    kind: Annotated[Literal["tools"], RESULTS]
    """Tools that the actor may call."""
    tools: Annotated[tuple[str, ...], RESULTS, Array, Field(min_length=1)]
    """Names of tools: `calculator` (arithmetic), `python` (a program in the sandbox), or `path.py:name` and
    `module:name` of a Python function. The chat template receives the schema of each tool; that of a function is made
    from its signature, and its docstring is the description."""
    digests: Annotated[dict[str, str], RESULTS] = Field(default_factory=dict)
    """SHA-256 of the file of each tool that has one, written when the recipe is read."""
    sandbox: Annotated[Literal["namespaces", "user"], RESULTS] = "namespaces"
    """Sandbox of the tool `python` (see `reward.sandbox`)."""
    answer_chars: Annotated[int, RESULTS, AtLeastOne] = 2000
    """Maximum number of characters of one result; the middle of a longer result is replaced by a note."""
