"""A docstring makes sense in an editor's tooltip, without the name next to it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from conventions.conftest import modules, trees
from for_each import for_each

BEGINNINGS = ("Of ", "By ", "The same", "As ", "From ", "With ")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of the module, its classes, functions and their fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@for_each(modules())
def test_docstrings_name_their_subject(module: Path) -> None:
    found = [
        f"{module}:{line} {text[:60]}" for line, text in docstrings(trees()[module]) if text.startswith(BEGINNINGS)
    ]
    assert found == []
