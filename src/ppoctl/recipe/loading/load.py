"""Load a recipe from its files, the environment and `--set`.

    load(files, sets) -> Loaded(recipe, origins)   raises one error that lists all problems
    from_resolved(json) -> Recipe                  the recipe that a run stored

Each value keeps its origin, and all problems are found in one pass.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppoctl.core.errors import RecipeError, quoted
from ppoctl.core.finding import Finding, once, problem, require_none
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.models.bundled_configs import recipes_folder
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.fingerprint import with_earlier_values
from ppoctl.recipe.loading.explain import problems_of
from ppoctl.recipe.loading.layers import SITE, Layers, site_file
from ppoctl.recipe.loading.partial import partial
from ppoctl.recipe.loading.rules.all_rules import violations
from ppoctl.recipe.loading.run_length import put_steps_for_epochs
from ppoctl.recipe.schema import Recipe

MOST_BYTES = 1 << 20
"""Largest size of a recipe file, in bytes. A larger file is not a recipe, and parsing it would take minutes."""

Judge = Callable[[Recipe, Callable[[KeyPath], str]], list[Finding]]
"""Function that receives a recipe and a function from a key to its origin, and returns the findings on the recipe."""


@dataclass(frozen=True)
class Loaded:
    """A valid recipe, with the origin of each value."""

    recipe: Recipe
    origins: dict[str, str]
    """Dotted key -> `file:line`, `environment PPOCTL_...`, `--set` or `default`, for every key of the recipe."""
    files: tuple[Path, ...]
    forced: bool = False
    """Whether a run starts from it although memory or disk seem too small (`--force`)."""

    def place(self, key: KeyPath) -> str:
        """Return the origin of a key, or of the first key of a table."""
        name = dotted(key)
        return self.origins.get(name) or next(
            (origin for below, origin in self.origins.items() if below.startswith(f"{name}.")), ""
        )

    def resolved(self) -> dict[str, Any]:
        """Return the complete recipe, with defaults, as JSON values. `from_resolved` reads them back."""
        return self.recipe.model_dump(mode="json", by_alias=True)


def load(files: Sequence[Path], sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Loaded:
    """Merge the site file, `files` from left to right, the environment and `sets`, and check the result.

    Raises RecipeError (exit 2) with one line per problem, or MissingAssetError (exit 3) if the first problem is only
    that something is missing on this machine.
    """
    loaded, found = examine(files, sets, environ)
    require_none(found)
    assert loaded is not None
    return loaded


def examine(
    files: Sequence[Path],
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    judges: Sequence[Judge] = (violations,),
) -> tuple[Loaded | None, list[Finding]]:
    """Return the recipe, or None if it has errors, and all findings. `load` raises the errors instead.

    The recipe is also returned if each error is only that something is missing on this machine. If the recipe has
    errors, the judges receive its usable part (`partial`).
    """
    layers = Layers(tuple(Path(file) for file in files), tuple(sets), environ, site_file(environ))
    unreadable = [finding for file in layers.files for finding in _unreadable(file)]
    if layers.site is not None:
        unreadable += _unreadable_site(layers.site)
    if unreadable or not files:
        return None, unreadable or [problem("no recipe given", hint="ppoctl recipes list")]
    wrong: list[Finding] = []
    layers.read()
    of_epochs = put_steps_for_epochs(layers)
    try:
        recipe = Recipe.model_validate(layers.written)
    except ValidationError as error:
        wrong = problems_of(error, layers)
        recipe = partial(layers.written, error)
    found = [*layers.problems, *wrong, *(finding for judge in judges for finding in judge(recipe, layers.place))]
    found = once((*found, *(() if of_epochs is None else (of_epochs,))))
    # A file that is missing on this machine may exist on the machine of the run: the recipe itself is valid.
    if "epochs" in layers.written or any(finding.is_error and not finding.is_missing for finding in found):
        return None, found
    origins = {dotted(entry.path): layers.place(entry.path) for entry in tree.values(recipe)}
    return Loaded(recipe, origins, layers.files), found


def from_resolved(resolved: Mapping[str, Any]) -> Recipe:
    """Return the recipe whose `Loaded.resolved` is `resolved`; it equals the original recipe. A key that the version
    of ppoctl that wrote it did not know has the value that means "as before".

    Raises RecipeError if this version of ppoctl does not know one of the keys.
    """
    try:
        return Recipe.model_validate(with_earlier_values(resolved))
    except ValidationError as error:
        layers = Layers((Path("recipe.resolved.json"),), (), {}, written=dict(resolved))
        hint = "resume it with the version of ppoctl that wrote it (run.json names it)"
        message = "\n".join(f"recipe.resolved.json: {finding.what}" for finding in problems_of(error, layers))
        raise RecipeError(message, hint=hint) from None


_SETTING = re.compile(r"[+~]*([A-Za-z_][\w.]*=.*)", re.DOTALL)
"""A word that other systems read as a setting, as Hydra does: `actor.optimizer.lr=1e-5`, `+key=value`."""


def _unreadable(file: Path) -> list[Finding]:
    """Return the reasons why a file cannot be read as TOML; empty: the file can be read."""
    try:
        if file.exists() and not file.is_file():
            return [problem("is not a regular file; a recipe is a `.toml` file", str(file), "ppoctl recipes list")]
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            message = f"has {file.stat().st_size} bytes; a recipe has at most {MOST_BYTES}"
            return [problem(message, str(file), f"ls -l {quoted(file)}")]
        text = file.read_text("utf-8-sig")
        tomllib.loads(text)
    except FileNotFoundError:
        if (setting := _SETTING.fullmatch(str(file))) is not None:
            text = f"`{file}` is no recipe; a setting is written with `--set`"
            return [problem(text, hint=f"--set {quoted(setting[1])}")]
        return [problem("no such recipe", str(file), _shipped(file))]
    except UnicodeDecodeError as error:
        kind = "utf-16" if file.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        convert = f"iconv -f {kind} -t utf-8 {quoted(file)} > {quoted(file.with_suffix('.utf8.toml'))}"
        return [problem(f"is not UTF-8 text (byte {error.start})", str(file), convert)]
    except OSError as error:
        return [problem(f"cannot be read: {error.strerror}", str(file))]
    except tomllib.TOMLDecodeError as error:
        return [_syntax(file, text, str(error))]
    except RecursionError:
        return [problem("not valid TOML: arrays or tables are nested too deep", str(file), _open(file, 1))]
    except ValueError as error:  # Python refuses to parse an integer with thousands of digits
        return [problem(f"not valid TOML: {str(error).split(';')[0]}", str(file), _open(file, 1))]
    return []


def _shipped(file: Path) -> str:
    """Return the command that copies the shipped recipe of this name, or the command that lists all shipped
    recipes."""
    folder, name = recipes_folder(), file.as_posix().removeprefix("recipes/").removesuffix(".toml")
    if folder is None or file.is_absolute() or not (folder / f"{name}.toml").is_file():
        return "ppoctl recipes list"
    return f"ppoctl recipes copy {name} my-recipes"


def _unreadable_site(site: Path) -> list[Finding]:
    """Return the reasons why the site file cannot be read as TOML.

    If the site file is missing, the environment variable named it: otherwise `site_file` returns only an existing
    file.
    """
    if not site.exists():
        return [problem(f"`{site}`: no such file", f"environment {SITE}", "export PPOCTL_SITE=  # no site file")]
    return _unreadable(site)


def _open(file: Path, line: int) -> str:
    return f"${{EDITOR:-vi}} +{line} {quoted(file)}"


def _syntax(file: Path, text: str, reason: str) -> Finding:
    lines = text.splitlines()
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", reason, re.DOTALL)
    what, line = (match[1], int(match[2] or len(lines))) if match else (reason, 1)
    written = lines[line - 1].strip() if line <= len(lines) else ""
    # tomllib shows the name of a table as a tuple.
    what = re.sub(r"\('(.*?)',?\)", lambda name: f"[{name[1].replace(chr(39) + ', ' + chr(39), '.')}]", what)
    what = _IN_WORDS.get(what, f"{what[0].lower()}{what[1:]}")
    shown = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in written)
    message = f"not valid TOML: {what} in `{shown}`{_first_occurrence(lines, line)}"
    if unseen := [char for char in written if not char.isprintable() and char != "\t"]:
        message += f"; `\\u{ord(unseen[0]):04x}` is {_UNSEEN.get(unseen[0], 'an invisible character')}: delete it"
    elif curly := [char for char in written if char in _CURLY]:
        message += f'; `{curly[0]}` is not a TOML quote: write `"`'
    return problem(message, f"{file}:{line}", _open(file, line))


_IN_WORDS = {
    "Illegal character '\\n'": "a string without its closing quote",
    "Cannot overwrite a value": "a second value for the same key",
    "Expected '=' after a key in a key/value pair": "no `=` after the key",
}
"""Errors of tomllib that name its internals -> plain wording."""
_UNSEEN = {"\ufeff": "a byte order mark", "\xa0": "a no-break space", "\u200b": "a zero-width space"}
_CURLY = "\u201c\u201d\u201e\u2018\u2019"


def _first_occurrence(lines: Sequence[str], line: int) -> str:
    """Return, in words, the line on which a repeated heading first occurs; empty: the line is not a repeated
    heading."""
    written = lines[line - 1].strip() if line <= len(lines) else ""
    first = next((number for number, text in enumerate(lines[: line - 1], 1) if text.strip() == written), None)
    return f" (first at line {first})" if first and written.startswith("[") else ""
