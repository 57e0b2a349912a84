"""Every recipe key is read by some code.

A key counts as read if code outside `recipe/`, `plan/` and `cli/` reads an attribute of that name or contains the
name as a string (`getattr`). The methods of a recipe table that build a part of the run count as such code. A tag
(`kind`, `place`, `format`) counts as read if code refers to the class of its table, or if the table has such a
method. Keys that are common words (`path`, `name`, `min`) are found too easily: this test is a coarse check, not a
proof.
"""

import ast
from collections.abc import Iterator
from functools import cache
from inspect import get_annotations
from pathlib import Path

from conventions.conftest import trees
from for_each import for_each
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

CALLED = {
    Path("algorithms/sizes.py"): (
        "microbatch_limit",
        "epochs",
        "minibatch_seqs",
        "updates_per_tick",
        "warmup_updates",
        "learning_rate_of",
    ),
    Path("recipe/loading/capabilities.py"): ("wanting",),
    Path("recipe/cadence.py"): ("evaluates", "saves"),
    Path("recipe/loading/rules/metrics_rules.py"): ("is_lower_better",),
}
"""The functions of `recipe/`, `plan/` and `algorithms/` that engines, wiring and loop call to read a key."""
BUILDERS = ("build", "build_correction", "weigh", "keeps", "_penalty", "shape", "trainable")
"""The methods and functions of table modules that build a part of the run from a table."""


def is_table_module(module: Path) -> bool:
    """Whether a module declares recipe tables, or answers questions about a recipe outside a run."""
    named = module.stem.endswith(("_table", "_tables")) or module.stem in ("role_model", "row_files")
    return named or (module.parts[0] == "recipe" and module.parts[1] != "loading")


def executed_nodes() -> Iterator[ast.AST]:
    """Yield the syntax trees of files that execute a run, and of the functions in CALLED."""
    for module, parsed in trees().items():
        if functions := CALLED.get(module):
            yield from (node for node in parsed.body if isinstance(node, ast.FunctionDef) and node.name in functions)
        elif is_table_module(module):
            methods = (node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef))
            yield from (node for node in methods if node.name in BUILDERS)
        elif module.parts[0] not in ("plan", "cli"):
            yield parsed


@cache
def read_names() -> frozenset[str]:
    """Return the attributes that are read, and the strings, in the code that executes a run."""
    names: set[str] = set()
    for part in executed_nodes():
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
    return frozenset(names)


def alternatives() -> list[tuple[str, str]]:
    """Return (key, class) of every table with alternatives that does not build its own part; a class without keys is
    represented by the base class that declares them. An alternative that no value of the tag selects is left out."""
    found: list[tuple[str, str]] = []
    for path, key in tree.walk(tree.of(Recipe)):
        choice = key.node.each if isinstance(key.node, tree.NamedTables) else key.node
        if isinstance(choice, tree.Choice):
            for name, table in choice.tables.items():
                if choice.tag is not None and name not in choice.tags:
                    continue
                written = next(each for each in table.model.__mro__ if get_annotations(each))
                if any(builder in vars(written) for builder in BUILDERS):
                    continue
                found.append((".".join(path), written.__name__))
    return found


TAGS = {"kind", "place", "format"}
KEYS = sorted({(".".join(path), key.attribute) for path, key in tree.walk(tree.of(Recipe)) if path[-1] not in TAGS})
# Classes that mean "off". Code need not name them, because it handles the alternatives.
ABSENCE = {"NoKl", "NoCorrection", "NoRejection", "NoTracking"}


@for_each(KEYS)
def test_every_recipe_key_is_read_by_code(key: str, attribute: str) -> None:
    assert attribute in read_names(), f"no code that executes a run reads `{key}`"


@for_each(alternatives())
def test_every_recipe_alternative_is_used_by_code(key: str, table: str) -> None:
    assert table in read_names() | ABSENCE, f"no code that executes a run uses `{table}` of `{key}`"
