"""A docstring makes sense in an editor's tooltip, without the name next to it."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from conventions.conftest import modules, nodes
from for_each import for_each

BEGINNINGS = ("Of ", "By ", "The same", "As ", "From ", "With ")


def docstrings(found: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring among these nodes: of the module, its classes, functions and fields."""
    for node in found:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@for_each(modules())
def test_docstrings_name_their_subject(module: Path) -> None:
    found = [
        f"{module}:{line} {text[:60]}" for line, text in docstrings(nodes()[module]) if text.startswith(BEGINNINGS)
    ]
    assert found == []
