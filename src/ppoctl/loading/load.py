"""A recipe from its files, the environment and `--set`; every value with its origin, every error in one pass.

load(files, sets) -> Loaded(recipe, origins)        raises one RecipeError that lists all problems
from_resolved(json) -> Recipe                       what a run stored, as it was
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppoctl.errors import RecipeError, quoted
from ppoctl.loading.explain import problems_of
from ppoctl.loading.layers import SITE, Layers, site_file
from ppoctl.loading.partial import partial
from ppoctl.loading.problems import Problem, as_error
from ppoctl.loading.rules.across_tables import violations
from ppoctl.loading.run_length import put_steps_for_epochs
from ppoctl.model.bundled_configs import recipes_folder
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe

MOST_BYTES = 1 << 20
"""Largest size of a recipe file, in bytes; a larger file is no recipe, and would be read for minutes."""

Judge = Callable[[Recipe, Callable[[KeyPath], str]], list[Problem]]
"""A judge takes a recipe and a function that says where a key was set, and returns what is wrong."""


@dataclass(frozen=True)
class Loaded:
    """A recipe that keeps all rules, and where each of its values was set."""

    recipe: Recipe
    origins: dict[str, str]
    """`file:line`, `environment PPOCTL_...`, `--set` or `default`, by dotted key; every key of the recipe is here."""
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    """What came of settings that stand for others."""

    def resolved(self) -> dict[str, Any]:
        """The whole recipe, defaults included, as JSON; `from_resolved` reads it back."""
        return self.recipe.model_dump(mode="json", by_alias=True)


def load(files: Sequence[Path], sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Loaded:
    """Compose the site's file, files left to right, then environment, then `--set`, and check the result.

    Raises RecipeError (exit 2) with one line per problem, MissingAssetError (exit 3) where all that is wrong is an
    environment variable that is not set.
    """
    loaded, problems = examine(files, sets, environ)
    if loaded is None or problems:
        raise as_error(problems)
    return loaded


def examine(
    files: Sequence[Path],
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    judges: Sequence[Judge] = (violations,),
) -> tuple[Loaded | None, list[Problem]]:
    """The recipe that `load` would give, or None, and all problems instead of an error. A recipe is there when all
    that is wrong is something missing on this machine. Each judge also sees a recipe with errors, as far as it is
    usable (`partial`)."""
    layers = Layers(tuple(Path(file) for file in files), tuple(sets), environ, site_file(environ))
    unreadable = [problem for file in layers.files for problem in _unreadable(file)]
    if layers.site is not None:
        unreadable += _unreadable_site(layers.site)
    if unreadable or not files:
        return None, unreadable or [Problem("", "no recipe given", "ppoctl recipes list")]
    wrong: list[Problem] = []
    layers.read()
    note = put_steps_for_epochs(layers)
    try:
        recipe = Recipe.model_validate(layers.written)
    except ValidationError as error:
        wrong = problems_of(error, layers)
        recipe = partial(layers.written, error)
    problems = [
        *layers.problems,
        *wrong,
        *(found for judge in judges for found in judge(recipe, layers.place)),
    ]
    # Something that is only missing here may be there where the run will be: the recipe itself is right.
    if "epochs" in layers.written or not all(problem.is_missing for problem in problems):
        return None, problems
    origins = {dotted(found.path): layers.place(found.path) for found in tree.values(recipe)}
    return Loaded(recipe, origins, layers.files, () if note is None else (note,)), problems


def from_resolved(resolved: Mapping[str, Any]) -> Recipe:
    """The recipe that `Loaded.resolved` wrote; equal to the one that was written.

    Raises RecipeError when this version of ppoctl does not know a key of it.
    """
    try:
        return Recipe.model_validate(resolved)
    except ValidationError as error:
        layers = Layers((Path("recipe.resolved.json"),), (), {}, written=dict(resolved))
        hint = "resume it with the version of ppoctl that wrote it (run.json names it)"
        message = "\n".join(f"recipe.resolved.json: {problem.message}" for problem in problems_of(error, layers))
        raise RecipeError(message, hint=hint) from None


def _unreadable(file: Path) -> list[Problem]:
    """Problems that keep a file from being a TOML document; empty: it is one."""
    try:
        if file.exists() and not file.is_file():
            return [Problem(str(file), "is no file; a recipe is a `.toml` file", "ppoctl recipes list")]
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            says = f"has {file.stat().st_size} bytes; a recipe has at most {MOST_BYTES}"
            return [Problem(str(file), says, f"ls -l {quoted(file)}")]
        text = file.read_text("utf-8-sig")
        tomllib.loads(text)
    except FileNotFoundError:
        return [Problem(str(file), "no such recipe", _shipped(file))]
    except UnicodeDecodeError as error:
        kind = "utf-16" if file.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        again = f"iconv -f {kind} -t utf-8 {quoted(file)} > {quoted(file.with_suffix('.utf8.toml'))}"
        return [Problem(str(file), f"is no UTF-8 text (byte {error.start})", again)]
    except OSError as error:
        return [Problem(str(file), f"cannot be read: {error.strerror}")]
    except tomllib.TOMLDecodeError as error:
        return [_syntax(file, text, str(error))]
    except RecursionError:
        return [Problem(str(file), "not valid TOML: arrays or tables are nested too deep", _open(file, 1))]
    except ValueError as error:  # an integer of thousands of digits, which Python refuses to read
        return [Problem(str(file), f"not valid TOML: {str(error).split(';')[0]}", _open(file, 1))]
    return []


def _shipped(file: Path) -> str:
    """Command that leads from the name of a shipped recipe to its file."""
    folder, name = recipes_folder(), file.as_posix().removeprefix("recipes/").removesuffix(".toml")
    if folder is None or file.is_absolute() or not (folder / f"{name}.toml").is_file():
        return "ppoctl recipes list"
    return f"ppoctl recipes copy {name} my-recipes"


def _unreadable_site(site: Path) -> list[Problem]:
    """Problems that keep the site's file from being a TOML document. One that is not there was named by the variable:
    where nobody names one, it is read only if it is there."""
    if not site.exists():
        return [Problem(f"environment {SITE}", f"`{site}`: no such file", "export PPOCTL_SITE=  # no site's file")]
    return _unreadable(site)


def _open(file: Path, line: int) -> str:
    return f"${{EDITOR:-vi}} +{line} {quoted(file)}"


def _syntax(file: Path, text: str, message: str) -> Problem:
    lines = text.splitlines()
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.DOTALL)
    what, line = (found[1], int(found[2] or len(lines))) if found else (message, 1)
    written = lines[line - 1].strip() if line <= len(lines) else ""
    # tomllib shows a table's name as a tuple.
    what = re.sub(r"\('(.*?)',?\)", lambda name: f"[{name[1].replace(chr(39) + ', ' + chr(39), '.')}]", what)
    what = _IN_WORDS.get(what, f"{what[0].lower()}{what[1:]}")
    shown = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in written)
    says = f"not valid TOML: {what} in `{shown}`{_where_first(lines, line)}"
    if unseen := [char for char in written if not char.isprintable() and char != "\t"]:
        says += f"; `\\u{ord(unseen[0]):04x}` is {_UNSEEN.get(unseen[0], 'a character that nobody sees')}: delete it"
    elif curly := [char for char in written if char in _CURLY]:
        says += f'; `{curly[0]}` is no quote of TOML: write `"`'
    return Problem(f"{file}:{line}", says, _open(file, line))


_IN_WORDS = {
    "Illegal character '\\n'": "a text without its closing quote",
    "Cannot overwrite a value": "a second value for what has one",
    "Expected '=' after a key in a key/value pair": "no `=` behind the key",
}
"""What tomllib says that is meant for who reads tomllib."""
_UNSEEN = {"\ufeff": "a byte order mark", "\xa0": "a space that breaks no line", "\u200b": "a space without width"}
_CURLY = "\u201c\u201d\u201e\u2018\u2019"


def _where_first(lines: Sequence[str], line: int) -> str:
    """The end of the sentence where a heading stands a second time."""
    written = lines[line - 1].strip() if line <= len(lines) else ""
    first = next((number for number, text in enumerate(lines[: line - 1], 1) if text.strip() == written), None)
    return f" (first at line {first})" if first and written.startswith("[") else ""
