"""docs/findings.md and docs/reading-curves.md list every kind of finding."""

import ast
import re

from conventions.conftest import PACKAGE, ROOT

BUILDERS = {"Finding", "ok", "note", "warning", "problem", "wrong", "conflict", "from_error", "severity"}
"""Functions that return a finding; `kind` is a keyword."""
FIRST = {"_noted", "_tried"}
"""Functions of preflight whose first argument is the kind."""


def kinds_in_src() -> set[str]:
    """Return each kind of finding that the package can build, including the default kind."""
    found = {"recipe", "length", "scorer"}  # the last two are one expression
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text("utf-8")
        for call in (
            ast.walk(ast.parse(text)) if re.search(r"ppoctl\.core\.finding import|import .*symptom", text) else ()
        ):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            given = [each.value for each in call.keywords if each.arg == "kind" and call.func.id in BUILDERS]
            given += call.args[:1] if call.func.id in FIRST else []
            given += call.args[1:2] if call.func.id == "symptom" else []
            found |= {str(value.value) for value in given if isinstance(value, ast.Constant)}
    return found


def kinds_in_table(page: str) -> set[str]:
    """Return the kinds in the first column of the table of kinds on a page."""
    table = (ROOT / "docs" / page).read_text("utf-8").partition("| kind |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return {kind for cell in cells for kind in re.findall(r"`([\w-]+)`", cell)}


def test_pages_list_each_kind_of_finding() -> None:
    assert kinds_in_table("findings.md") | kinds_in_table("reading-curves.md") == kinds_in_src()
