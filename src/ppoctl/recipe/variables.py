"""Environment variables named `PPOCTL_...` that set no key of a recipe.

A misspelt one would be ignored without a word. Those that set a key are read by `layers`.
"""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.problems import Problem
from ppoctl.recipe.schema import Recipe

PREFIX = "PPOCTL_"
NESTED = "__"
NO_KEYS = {"PPOCTL_DATA": "folder of data sets, where recipes and tests look for real rows"}
"""Our variables that set no key of a recipe, with their meaning."""


def sets_a_key(name: str) -> bool:
    """Whether a variable sets a key or means to: a key at the top has its name, any other has `__` between tables."""
    first, *rest = name.upper().removeprefix(PREFIX).lower().split(NESTED)
    key = tree.of(Recipe).keys.get(first)
    return name.upper().startswith(PREFIX) and (bool(rest) or (key is not None and isinstance(key.node, tree.Leaf)))


def unknown_variables(environ: Mapping[str, str], used: Collection[str]) -> Iterator[Problem]:
    """A problem for each variable with our prefix that sets no key, is none of `NO_KEYS` and is not used by a path of
    the recipe."""
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and not sets_a_key(name) and name not in NO_KEYS and name not in used:
            near = _nearest(name.upper())
            mended = f"; did you mean `{near}`?" if near else ""
            yield Problem(f"environment {name}", f"no key of a recipe is set by it{mended}", f"unset {name}")


def _nearest(name: str) -> str | None:
    """The variable of a key that was probably meant (one underscore for two, or misspelt); None: none is near."""
    paths = (path for path, key in tree.walk(tree.of(Recipe)) if isinstance(key.node, tree.Leaf))
    known = list(dict.fromkeys(PREFIX + NESTED.join(path).upper() for path in paths if tree.ANY_NAME not in path))
    exact = [variable for variable in known if variable.replace(NESTED, "_") == name.replace(NESTED, "_")]
    # Without the prefix, which would make everything near.
    ends = [variable.removeprefix(PREFIX) for variable in (*known, *NO_KEYS)]
    near = get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.7)
    return next(iter(exact or [PREFIX + end for end in near]), None)
