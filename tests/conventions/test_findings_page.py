"""docs/findings.md lists every kind of finding."""

import ast
import re

from conventions.conftest import PACKAGE, ROOT

BUILDERS = {"Finding", "ok", "note", "warning", "problem", "wrong", "conflict", "from_error", "severity"}
"""Functions that return a finding; `kind` is a keyword."""
FIRST = {"_noted", "_tried"}
"""Functions of preflight whose first argument is the kind."""


def kinds_in_src() -> set[str]:
    """Return each kind of finding that the package can build, including the default kind."""
    found = {"recipe"}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text("utf-8")
        for call in ast.walk(ast.parse(text)) if "ppoctl.finding import" in text else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            given = [each.value for each in call.keywords if each.arg == "kind" and call.func.id in BUILDERS]
            given += call.args[:1] if call.func.id in FIRST else []
            found |= {str(value.value) for value in given if isinstance(value, ast.Constant)}
    return found


def test_page_lists_each_kind_of_finding() -> None:
    page = (ROOT / "docs" / "findings.md").read_text("utf-8").partition("| kind |")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == kinds_in_src()
