"""Commands in hints: each is parsed by the real command line, and the value of each setting by the real recipe."""

import re
import shlex
from contextlib import suppress
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from ppoctl.cli.app import app
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.layers import ROOT, _typed, path_of

COMMANDS = typer.main.get_command(app)
NAMES = "|".join(COMMANDS.commands)  # type: ignore[attr-defined]
_COMMAND = re.compile(rf"(?<=`)ppoctl (?=[a-z])|(?<![\w'/.-])ppoctl (?=(?:{NAMES})\b(?![\w./-]))")
_SET = re.compile(r"--set (?=['\w])")
PLACEHOLDER = re.compile(r"=\.\.\.|<\w+>|\b(?:RUN|RECIPE|NAME|STEP|OUT|BASE|CHECKPOINT|LR)\b")
"""Words that ppoctl could have replaced. Not FILE, FOLDER, COLUMN and HOST, which only the reader knows."""


def faults(hint: str) -> list[str]:
    """Return what is wrong with the commands and settings of a hint; empty: each can be typed as it is."""
    wrong = [f"`{match[0]}` is a placeholder" for match in PLACEHOLDER.finditer(hint)]
    for match in _COMMAND.finditer(hint):
        words = words_of(hint[match.end() :])
        why = not_parsed(words)
        # A sentence may name a command without its arguments.
        is_name = hint[: match.start()].endswith("`") or len(words) == 1
        if why is not None and not (is_name and why.startswith("Missing argument")):
            wrong.append(f"`ppoctl {shlex.join(words)}`: {why}")
    for setting in settings_of(hint):
        if (why := not_set(setting)) is not None:
            wrong.append(f"`--set {setting}`: {why}")
    return wrong


def settings_of(hint: str) -> list[str]:
    """Return the settings of a hint, as `--set` receives them."""
    found = ((words_of(hint[match.end() :]) or [""])[0] for match in _SET.finditer(hint))
    return [setting for setting in found if "=" in setting]


def words_of(text: str) -> list[str]:
    """Return the words of a command as a shell would split them, up to its end in a sentence."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";<>|&`")
    lexer.whitespace_split = True
    words: list[str] = []
    with suppress(ValueError):  # an apostrophe in a sentence
        for word in lexer:
            if set(word) <= set(";<>|&`"):
                break
            words.append(word.rstrip(",:"))
            if re.search(r"[,:]$|^[a-z-]+\.$", word):
                words[-1] = words[-1].rstrip(".")
                break
    return words


def not_parsed(words: list[str]) -> str | None:
    """Return why the command line refuses these words; None: it does not."""
    command, rest = COMMANDS, [word for word in words if word != "--help"]
    if rest != words:
        rest = rest[:1]  # `--help` needs no arguments
    context = typer.Context(command, info_name="ppoctl")
    try:
        while rest and hasattr(command, "resolve_command"):
            _, command, rest = command.resolve_command(context, rest)
            context = typer.Context(command, info_name=words[0], parent=context)
        for argument in command.params:
            argument.callback = None  # it looks up a run, which a test does not have
        if "--help" not in words:
            command.make_context(words[0], rest).close()
    except Exception as error:  # noqa: BLE001 - typer's errors of a command line have no public base class
        return error.format_message() if hasattr(error, "format_message") else str(error)
    return None


def not_set(setting: str) -> str | None:
    """Return why a recipe refuses a setting; None: one of its tables has the key, and the value has its type."""
    key, _, text = setting.partition("=")
    path = path_of(key)
    keys = tree.keys_at(ROOT, path) if path else []
    if not keys:
        return "no such key"
    value = _typed(text, path)
    problems = [_refused(each, value) for each in keys]
    return None if None in problems else problems[0]


def _refused(key: tree.RecipeKey, value: Any) -> str | None:
    annotated: Any = Annotated
    try:
        TypeAdapter(annotated[(key.field.annotation, None, *key.field.metadata)]).validate_python(value)
    except ValidationError as error:
        missing = all(each["type"] == "missing" for each in error.errors())
        return None if missing else error.errors()[0]["msg"]
    return None
