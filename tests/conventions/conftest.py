"""The syntax trees of ppoctl, parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ppoctl"


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the tree of every module by its path below `src/ppoctl`."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE): ast.parse(file.read_text("utf-8")) for file in files}
