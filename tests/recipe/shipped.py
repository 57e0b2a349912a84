"""All bundled recipes as they are resolved, in one text: `python tests/recipe/shipped.py` writes it again.

`[all]` has the most common value of each key, defaults included; each recipe then lists its differences. A changed
default is one changed line of `[all]`, and one line in each recipe that keeps the old value.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ppoctl.core.key_path import dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SNAPSHOT = Path(__file__).with_name("shipped.txt")
ABSENT = "(absent)"


def load_without_data(file: Path) -> Recipe:
    return load([file], (), {"PPOCTL_DATA": "/data"}).recipe


def values(recipe: Recipe) -> dict[str, str]:
    """Return every value of a recipe by key, as text that is the same on all machines."""
    return {dotted(entry.path): repr(entry.value).replace(str(RECIPES), "recipes") for entry in tree.values(recipe)}


def snapshot(files: list[Path], recipe_of: Callable[[Path], Recipe] = load_without_data) -> str:
    """Return the text of all files."""
    recipes = {file.relative_to(RECIPES).with_suffix("").as_posix(): values(recipe_of(file)) for file in files}
    keys = list(dict.fromkeys(key for recipe in recipes.values() for key in recipe))
    usual = {
        key: Counter(recipe.get(key, ABSENT) for recipe in recipes.values()).most_common(1)[0][0] for key in keys
    }
    lines = ["[all]", *(f"{key} = {usual[key]}" for key in keys)]
    for name, recipe in recipes.items():
        own = {key: recipe.get(key, ABSENT) for key in keys}
        lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in own.items() if value != usual[key])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(sorted(RECIPES.rglob("*.toml"))), "utf-8")
