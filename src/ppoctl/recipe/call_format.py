"""Format of the tool calls that the engines of a run parse."""

import json
from pathlib import Path

from ppoctl.core.errors import RecipeError
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.environments.tools import ToolsEnvironment
from ppoctl.models.families import FAMILIES
from ppoctl.models.folder import read_config
from ppoctl.recipe.schema import Recipe

CALL_TOKENS: dict[str, str] = {
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
}
"""Token that vLLM's parser of a format requires in the vocabulary. The other formats are ordinary text."""


def call_format_of(recipe: Recipe, folder: Path) -> str | None:
    """Return the format of a recipe's tool calls; `folder` contains the model. None: responses are not parsed.

    An environment without tools may have a model that writes no calls. Raises RecipeError if an environment with
    tools has no format, if the tokenizer lacks the token of a format that the recipe sets, and if training and
    evaluations have different formats: one engine serves both.
    """
    tables = {"environment": recipe.environment}
    if recipe.eval_environment is not recipe.environment:
        tables["eval.environment"] = recipe.eval_environment
    formats = {key: _format(table, key, folder) for key, table in tables.items() if table is not None}
    chosen = {form for form in formats.values() if form is not None}
    if len(chosen) > 1:
        raise RecipeError(
            f"`environment` and `eval.environment` have different formats of tool calls: {', '.join(sorted(chosen))}",
            hint=f"set the same format in both: --set 'eval.environment.call_format=\"{formats['environment']}\"'",
        )
    return chosen.pop() if chosen else None


def _format(table: EpisodeTable, key: str, folder: Path) -> str | None:
    written = table.call_format
    if written is not None and not _has_token(folder, written):
        raise RecipeError(
            f"`{key}.call_format` is `{written}`, which needs the token `{CALL_TOKENS[written]}`; the tokenizer of "
            f"`{folder}` lacks it",
            hint=_hint(key),
        )
    form = written or _format_of_family(folder)
    if form is None and any(isinstance(kind, ToolsEnvironment) for kind in table.kinds.values()):
        raise RecipeError(
            f"`{key}` has tools, but the model in `{folder}` has no format of tool calls", hint=_hint(key)
        )
    return form


def _hint(key: str) -> str:
    return f"choose a format that is ordinary text: --set '{key}.call_format=\"hermes\"'"


def _format_of_family(folder: Path) -> str | None:
    """Return the format of the model's family. None: the family has none, or this tokenizer lacks its token, as those
    of models that were published before the family had tools."""
    family = FAMILIES.get(str(read_config(folder).get("model_type")))
    form = None if family is None else family.call_format
    return form if form is not None and _has_token(folder, form) else None


def _has_token(folder: Path, form: str) -> bool:
    """Whether the tokenizer has the token of a format. The files are searched as text, because parsing a vocabulary
    takes longer; a quoted token occurs only in a vocabulary or a list of added tokens. `tokenizer.model` has no
    quotes."""
    token = CALL_TOKENS.get(form)
    if token is None:
        return True
    quoted = [json.dumps(token, ensure_ascii=ascii).encode() for ascii in (True, False)]
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    wanted = {**dict.fromkeys(names, quoted), "tokenizer.model": [token.encode()]}
    found = {name: (folder / name).read_bytes() for name in wanted if (folder / name).is_file()}
    return any(text in content for name, content in found.items() for text in wanted[name])
