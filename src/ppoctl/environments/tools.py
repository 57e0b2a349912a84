"""An environment that runs tools: each turn with tool calls is answered by their results; a turn without a call ends
the episode."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.core.errors import RecipeError
from ppoctl.core.recipe_table import RESULTS, Array, AtLeastOne
from ppoctl.core.user_functions import FUNCTION_PATTERN, import_command, require_function
from ppoctl.environments.described import schemas_of
from ppoctl.environments.environment_table import EnvironmentTable
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.sandbox.sandbox_client import require

BUILT_IN = ("calculator", "python")
ToolName = Annotated[str, Field(pattern=f"^(?:{'|'.join(BUILT_IN)})$|{FUNCTION_PATTERN}")]


class ToolsEnvironment(EnvironmentTable):
    """Tools that the actor may call. A turn with calls is answered by their results; a turn without a call ends the
    episode. A call that cannot be read is answered by an explanation."""

    has_state: ClassVar[bool] = False

    kind: Annotated[Literal["tools"], RESULTS]
    """Tools that the actor may call."""
    tools: Annotated[tuple[ToolName, ...], RESULTS, Array, Field(min_length=1)]
    """Names of tools: `calculator` (arithmetic), `python` (a program in the sandbox), or `path.py:name` and
    `module:name` of a Python function. The chat template receives the schema of each tool; that of a function is made
    from its signature, and its docstring is the description."""
    digests: Annotated[dict[str, str], RESULTS] = Field(default_factory=dict)
    """SHA-256 of the file of each tool that has one, written when the recipe is read."""
    sandbox: Annotated[Literal["namespaces", "user"], RESULTS] = "namespaces"
    """Sandbox of the tool `python` (see `reward.sandbox`)."""
    answer_chars: Annotated[int, RESULTS, AtLeastOne] = 2000
    """Maximum number of characters of one result; the middle of a longer result is replaced by a note."""

    @property
    def answers_by(self) -> ScorerSpec:
        options = {
            "tools": list(self.tools),
            "sandbox": self.sandbox,
            "seconds": self.seconds,
            "answer_chars": self.answer_chars,
        }
        functions = self._functions
        hint = import_command(functions[0]) if functions else "python -c 'import ppoctl.environments.tool_set'"
        return ScorerSpec("ppoctl.environments.tool_set:opened", options, known_as=", ".join(self.tools), hint=hint)

    @property
    def _functions(self) -> list[str]:
        """Tools that are functions of the user."""
        return [tool for tool in self.tools if tool not in BUILT_IN]

    def schemas(self) -> Sequence[dict[str, Any]]:
        return schemas_of(self.answers_by, self._functions)

    def require_there(self, key: str = "environment") -> None:
        """Raise MissingAssetError if this machine lacks a file of a tool or a safe sandbox, and RecipeError if a file
        has changed since the recipe was read. `key` is the key of this table."""
        setting = f"{key}.tools={json.dumps(self.tools)}"
        for tool in self._functions:
            digest = self.digests.get(tool, "")
            require_function(tool, digest, whose="tool's", setting=setting, changed=RecipeError)
        if "python" in self.tools:
            require(self.sandbox, key=key)
