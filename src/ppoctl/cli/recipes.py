"""`ppoctl recipes`: the recipes that ship with ppoctl, and everything that a recipe may say."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json
from ppoctl.errors import RecipeError, quoted

app = typer.Typer(help="List, print and copy the recipes that ship with ppoctl.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `ppoctl recipes list` prints it.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """Print the name and purpose of each recipe."""
    found = {path.stem: describe(path) for path in sorted(folder().glob("*.toml"))}
    if json:
        render.json({"recipes": [{"name": name, "description": text} for name, text in found.items()]})
    else:
        render.table([(name, text.partition("\n")[0]) for name, text in found.items()])


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Print a recipe as it is written."""
    path = find(name)
    text = path.read_text("utf-8")
    if json:
        render.json({"name": name, "path": str(path), "text": text})
    else:
        render.line(text.rstrip("\n"))


@app.command()
def copy(
    name: Name,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder, made when missing, or .toml file.")],
    json: Json = False,
) -> None:
    """Copy a recipe, and the folder of the same name that it reads, to edit it. Nothing is overwritten."""
    source = find(name)
    target = destination if destination.suffix == ".toml" else destination / source.name
    # The folder keeps its name: the recipe refers to it.
    pairs = [(source, target)]
    if source.with_suffix("").is_dir():
        pairs.append((source.with_suffix(""), target.parent / name))
    for _, new in pairs:
        if new.exists():
            aside = f"mv {quoted(new)} {quoted(f'{new}.old')}"
            raise RecipeError(f"`{new}` exists, and a copy never overwrites", hint=aside)
    target.parent.mkdir(parents=True, exist_ok=True)
    for old, new in pairs:
        if old.is_dir():
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(old, new)
    if json:
        render.json({"copied": [str(new) for _, new in pairs]})
        return
    for _, new in pairs:
        render.line(str(new))
    render.say(f"next: ppoctl validate {quoted(target)}")


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(metavar="[KEY]", help="Only the keys at or below this one.")] = "",
    json: Json = False,
) -> None:
    """Print every key a recipe may have: type, default, range, what it changes, what it means."""
    from dataclasses import asdict

    from ppoctl.recipe.explain import similar
    from ppoctl.recipe.keys import key_lines

    known = key_lines()
    chosen = [line for line in known if f"{line.key}.".startswith(f"{prefix}.") or not prefix]
    if not chosen:
        inside = [line.key for line in known if prefix in line.key.split(".")]
        near = f"; did you mean `{inside[0]}`?" if inside else similar(prefix, [line.key for line in known])
        raise RecipeError(f"no key begins with `{prefix}`{near}", hint="ppoctl recipes keys")
    if json:
        render.json({"keys": [asdict(line) for line in chosen]})
        return
    rows = [(line.key, line.only, line.type, line.default, line.range, line.changes, line.meaning) for line in chosen]
    render.table(rows, ("key", "only with", "type", "default", "range", "changes", "meaning"))


@app.command()
def metrics(json: Json = False) -> None:
    """Print every metric that `[expect]` and `checkpoint.best` may name."""
    from ppoctl.metrics import METRICS

    if json:
        fields = [{"name": m.name, "unit": m.unit, "says": m.says, "healthy": m.healthy} for m in METRICS]
        render.json({"metrics": fields})
    else:
        render.table([(m.name, m.unit, m.says, m.healthy) for m in METRICS], ("metric", "unit", "meaning", "healthy"))


def folder() -> Path:
    """Folder of the shipped recipes: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_recipes", package.parents[1] / "recipes"):
        if candidate.is_dir():
            return candidate
    raise RecipeError("this installation has no recipes", hint="pip install --force-reinstall ppoctl")


def find(name: str) -> Path:
    """File of a shipped recipe. Raises RecipeError with the nearest name when there is none."""
    path = folder() / f"{name.removesuffix('.toml')}.toml"
    if path.is_file() and path.parent == folder():
        return path
    from ppoctl.recipe.explain import similar

    near = similar(name, [other.stem for other in folder().glob("*.toml")])
    raise RecipeError(f"no recipe is called `{name}`{near}", hint="ppoctl recipes list")


def describe(path: Path) -> str:
    """The comment a recipe begins with; its first line says what it is for."""
    lines: list[str] = []
    for text in path.read_text("utf-8").splitlines():
        if not text.startswith("#"):
            break
        lines.append(text.lstrip("# ").strip())
    return "\n".join(lines)
