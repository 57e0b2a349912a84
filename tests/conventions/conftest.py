"""The syntax trees of ppoctl, parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ppoctl"


@cache
def modules() -> list[Path]:
    """Return the path of every module below `src/ppoctl`."""
    return sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the tree of every module by its path. Only tests call it: each worker collects all test files."""
    return {module: ast.parse((PACKAGE / module).read_text("utf-8")) for module in modules()}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every tree, in the order of `ast.walk`: a walk takes a second for all trees."""
    return {module: list(ast.walk(tree)) for module, tree in trees().items()}
