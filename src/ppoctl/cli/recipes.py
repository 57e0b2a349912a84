"""`ppoctl recipes`: the recipes that ship with ppoctl, and the reference of keys, metrics and algorithms."""

import filecmp
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ppoctl.cli import render
from ppoctl.cli.help import Command, Commands
from ppoctl.cli.options import JsonOption, key_names
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.cli.manual.features import Feature
    from ppoctl.core.metric_registry import Metric

app = typer.Typer(
    cls=Commands,
    help="List, print and copy the recipes that ship with ppoctl, and explain their keys.",
    rich_markup_mode=None,
)

Page = Annotated[bool, typer.Option("--page", help="Print the complete page of docs/ instead.")]


def _names() -> list[str]:
    return [*shipped()]


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a recipe in `ppoctl recipes list`.", autocompletion=_names)
]


@app.command("list", cls=Command)
def list_(json: JsonOption = False) -> None:
    """Print the name and purpose of each recipe."""
    from ppoctl.cli.manual.header import header_of

    headers = {name: header_of(path.read_text("utf-8")) for name, path in shipped().items()}
    if json:
        rows = [{"name": name, "purpose": header.purpose, **header.parts} for name, header in headers.items()]
        render.json({"recipes": [{key.lower(): text for key, text in row.items()} for row in rows]})
    else:
        render.table([(name, header.purpose) for name, header in headers.items()])


@app.command("table", cls=Command)
def table() -> None:
    """Print the page of the shipped recipes (docs/recipes.md)."""
    from ppoctl.cli.manual.header import page

    render.line(page(shipped()).rstrip("\n"))


@app.command(cls=Command)
def show(name: Name, json: JsonOption = False) -> None:
    """Print a recipe as it is written."""
    path = find(name)
    text = path.read_text("utf-8")
    if json:
        render.json({"name": name, "path": str(path), "text": text})
    else:
        render.line(text.rstrip("\n"))


@app.command(cls=Command)
def copy(
    name: Name,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder, created if missing, or .toml file.")],
    json: JsonOption = False,
) -> None:
    """Copy a recipe, and the folder that it reads, next to it. Never overwrites a file."""
    source = find(name)
    target = destination if destination.suffix == ".toml" else destination / source.name
    # A folder keeps its name: the recipe refers to it.
    folders = [(folder, target.parent / folder.name) for folder in _folders_read_by(source)]
    pairs = [(source, target), *((old, new) for old, new in folders if not _is_copy(old, new))]
    for _, new in pairs:
        if new.exists():
            move = f"mv {quoted(new)} {quoted(f'{new}.old')}"
            raise RecipeError(f"`{new}` exists and is not overwritten", hint=move)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.read_text("utf-8").replace(_PARENT, '"'), "utf-8")
    for old, new in pairs[1:]:
        shutil.copytree(old, new, ignore=shutil.ignore_patterns(_BYTECODE))
    if json:
        render.json({"copied": [str(new) for _, new in pairs]})
        return
    for _, new in pairs:
        render.line(str(new))
    render.print_stderr(f"next: ppoctl validate {quoted(target)}")


_BYTECODE = "__pycache__"
_PARENT = '"../'
"""Prefix of the path of a folder that is not next to the recipe, but next to the recipe's folder."""


def _folders_read_by(recipe: Path) -> list[Path]:
    """Return the folders that the text of a recipe names, such as `quickstart` in `"quickstart/model"` and in
    `"../quickstart/model"`."""
    text, near = recipe.read_text("utf-8"), recipe.parent
    prefixes = {near: '"', near.parent: _PARENT}
    return [
        folder
        for parent, prefix in prefixes.items()
        for folder in sorted(parent.iterdir())
        if folder.is_dir() and f"{prefix}{folder.name}/" in text
    ]


def _is_copy(old: Path, new: Path) -> bool:
    """Whether a folder has all files of another, with equal bytes."""
    files = [file.relative_to(old) for file in old.rglob("*") if file.is_file() and _BYTECODE not in file.parts]
    return all((new / file).is_file() and filecmp.cmp(old / file, new / file, shallow=False) for file in files)


@app.command(cls=Command)
def keys(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]",
            help="Only this key and the keys below it, or all keys with this text in their name or meaning.",
            autocompletion=key_names,
        ),
    ] = "",
    page: Page = False,
    json: JsonOption = False,
) -> None:
    """Print every key that a recipe may have. Columns: type, default, range, effect of a change, meaning. Keys of the
    algorithm also have a formula, the source of the formula, and the origin of the default. --page prints
    docs/recipe.md."""
    from dataclasses import asdict

    from ppoctl.cli.manual.features import features
    from ppoctl.cli.manual.keys import key_lines
    from ppoctl.recipe import key_mappings
    from ppoctl.recipe.loading.explain import similar

    if page:
        from ppoctl.cli.manual.reference_pages import recipe

        _print_page(recipe(), json=json)
        return
    known = key_lines()
    chosen = [line for line in known if f"{line.key}.".startswith(f"{prefix}.") or not prefix]
    word = prefix.lower()
    chosen = chosen or [line for line in known if word in line.key]
    chosen = chosen or [line for line in known if word in line.meaning.lower()]
    if not chosen:
        path = tuple(prefix.split("."))
        mapped, suggestion = key_mappings.find(path), key_mappings.nearest(path)
        others = [answer.message() for answer in mapped] or ([suggestion.suggests] if suggestion else [])
        near = similar(prefix, [line.key for line in known]) or "".join(f"; {text}" for text in others)
        raise RecipeError(f"no key has `{prefix}` in its name{near}", hint="ppoctl recipes keys")
    # The features of a top-level table would be too long to print below its keys.
    owners = [feature for feature in features() if "." in prefix and feature.owns(prefix)]
    if json:
        render.json({"keys": [asdict(line) for line in chosen], "parts": [_as_json(feature) for feature in owners]})
        return
    rows = [(line.key, line.only, line.type, line.default, line.range, line.changes, line.meaning) for line in chosen]
    render.table(rows, ("key", "only with", "type", "default", "range", "changes", "meaning"))
    _print_features(owners, prefix)


@app.command(cls=Command)
def metrics(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Only this metric, or the metrics of this group.")
    ] = "",
    page: Page = False,
    json: JsonOption = False,
) -> None:
    """Print every metric that `[expect]`, `[until]` and `checkpoint.best` may name. For a single metric, also prints
    how to read it, what to do when it is unhealthy, and the settings that affect it. --page prints
    docs/metrics.md."""
    from ppoctl.cli.manual.features import features
    from ppoctl.cli.manual.guides import guide
    from ppoctl.core.metric_registry import METRICS, find, unknown

    if page:
        from ppoctl.cli.manual.reference_pages import metrics

        _print_page(metrics(), json=json)
        return
    group = f"{name.rstrip('/')}/"
    chosen = [metric for metric in METRICS if not name or metric is find(name) or metric.name.startswith(group)]
    if not chosen:
        raise RecipeError(unknown(name), hint="ppoctl recipes metrics")
    related = [feature for feature in features() if len(chosen) == 1 and feature.shows_in(chosen[0].name)]
    if json:
        fields = [{"name": m.name, "unit": m.unit, "says": m.description, "healthy": m.healthy} for m in chosen]
        guides = [{"read": found.read, "when": dict(found.when)} if (found := guide(m)) else {} for m in chosen]
        both = [{**field, **more} for field, more in zip(fields, guides, strict=True)]
        render.json({"metrics": both, "parts": [_as_json(feature) for feature in related]})
    elif len(chosen) == 1:
        _print_metric(chosen[0])
        _print_features(related)
    else:
        render.table(
            [(m.name, m.unit, m.description, m.healthy) for m in chosen], ("metric", "unit", "meaning", "healthy")
        )


def _print_page(text: str, *, json: bool) -> None:
    if json:
        render.json({"page": text})
    else:
        render.line(text.rstrip("\n"))


def _print_metric(metric: "Metric") -> None:
    """Print the description of one metric, and its guide."""
    from ppoctl.cli.manual.guides import guide

    render.heading(metric.name)
    render.prose(f"  {metric.description} ({metric.unit})")
    if metric.healthy:
        render.prose(f"  healthy: {metric.healthy}")
    if found := guide(metric):
        render.prose(f"  {found.read}")
        for symptom, action in found.when:
            render.prose(f"  - {symptom}: {action}")


@app.command(cls=Command)
def algorithms(json: JsonOption = False) -> None:
    """Print the page of algorithms (docs/algorithms.md). Every setting has a formula, the source of the formula, and
    the origin of the default."""
    from ppoctl.cli.manual.algorithm_pages import algorithms
    from ppoctl.cli.manual.features import features

    if json:
        render.json({"parts": [_as_json(feature) for feature in features()]})
    else:
        render.line(algorithms().rstrip("\n"))


@app.command("coming-from", cls=Command)
def coming_from(
    system: Annotated[str, typer.Argument(metavar="[SYSTEM]", help="Only this system, e.g. `verl`.")] = "",
    defaults: Annotated[
        bool,
        typer.Option(
            "--defaults", help="Print a recipe with its defaults that differ from ppoctl's, to put before yours."
        ),
    ] = False,
    algorithm: Annotated[
        Literal["ppo", "grpo"], typer.Option("--algorithm", help="Algorithm of --defaults.")
    ] = "ppo",
    json: JsonOption = False,
) -> None:
    """Print which ppoctl keys replace the keys of other systems, with pitfalls (docs/coming-from.md)."""
    from dataclasses import asdict

    from ppoctl.cli.manual.algorithm_pages import coming_from, defaults_of
    from ppoctl.recipe.key_mappings import systems
    from ppoctl.recipe.loading.explain import similar

    chosen = [each for each in systems() if system.lower() in ("", each.name.lower())]
    if not chosen:
        message = f"there is no key table for `{system}`{similar(system, [each.name for each in systems()])}"
        raise RecipeError(message, hint="ppoctl recipes coming-from")
    if defaults:
        if not system or chosen[0].defaults is None:
            listed = ", ".join(f"`{each.name}`" for each in systems() if each.defaults)
            message = f"`--defaults` requires one of the systems whose defaults are listed: {listed}"
            raise RecipeError(message, hint="ppoctl recipes coming-from verl --defaults")
        text = defaults_of(chosen[0], algorithm)
        if json:
            render.json({"system": chosen[0].name, "algorithm": algorithm, "toml": text})
        else:
            render.line(text.rstrip("\n"))
        return
    if json:
        render.json({"systems": [asdict(each) for each in chosen]})
    else:
        render.line(coming_from([each.name for each in chosen] if system else ()).rstrip("\n"))


def _print_features(chosen: Sequence["Feature"], prefix: str = "") -> None:
    """Print the sections of the algorithms page for these features, below the table of their keys."""
    from ppoctl.cli.manual.algorithm_pages import rendered_rows as lines_of

    for feature in chosen:
        render.line()
        render.heading(", ".join(feature.names))
        for word, text in lines_of(feature, prefix):
            render.prose(f"  {word}: {text}" if word else f"  {text}")


def _as_json(feature: "Feature") -> dict[str, object]:
    text = feature.docstring
    fields = {"says": text.prose, "formula": text.formula, "source": text.source, "default_of": text.default_of}
    keys = [name for key in feature.keys for name in key.names]
    return {"names": feature.names, **fields, "metrics": text.metrics, "keys": keys}


def folder() -> Path:
    """Return the folder of the shipped recipes. Raises RecipeError if there is none."""
    from ppoctl.models.bundled_configs import recipes_folder

    if (found := recipes_folder()) is None:
        raise RecipeError("this installation has no recipes", hint="pip install --force-reinstall ppoctl")
    return found


def shipped() -> dict[str, Path]:
    """Return the files of all shipped recipes by name: `quickstart`, or `verl/gemma` for a recipe in a folder.

    Recipes outside folders come first.
    """
    files = sorted(folder().rglob("*.toml"), key=lambda file: (len(file.parts), file.with_suffix("")))
    return {file.relative_to(folder()).with_suffix("").as_posix(): file for file in files}


def find(name: str) -> Path:
    """Return the file of a shipped recipe. For an unknown name, raises RecipeError with a similar name."""
    known, wanted = shipped(), name.removesuffix(".toml")
    if wanted in known:
        return known[wanted]
    from ppoctl.recipe.loading.explain import similar

    # Scripts of other systems have names such as `run_NAME.sh`, where NAME is the name of the recipe.
    bare = wanted.rpartition("/")[2].removeprefix("run_").removesuffix(".sh")
    inside = next((each for each in known if each.rpartition("/")[2] == bare), None)
    near = f"; did you mean `{inside}`?" if inside else similar(name, list(known))
    raise RecipeError(f"there is no recipe `{name}`{near}", hint="ppoctl recipes list")
