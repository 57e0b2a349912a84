"""A hint is pasted into a shell: values from users or machines are quoted by `errors.quoted`."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from conventions.conftest import modules, nodes
from for_each import for_each

COMMAND = re.compile(r"\b(ppoctl|ls|rm|mv|cp|df|less|mkdir|export) [^`:]*$")
"""Text in which a command has begun, so that the next inserted value is part of it."""

PLAIN = {
    "name", "role", "step", "row", "of_role", "steps[-1]", "recorded.step", "path[0]", "version_of('ppoctl')",
    "PARENT", "2 * steps", "2 * report['steps_planned']", "healthy[-1]", "FORMAT", "done", "max(most // 2, 1)", "key",
    "nearest", "VISIBLE", "TEMPORARY", "','.join(map(str, usable))", "math.ceil(fraction * 100) / 100",
    "' '.join(map(quoted, redo))", "step - 1",
}  # fmt: skip
"""Values that need no quoting: Python names, numbers and ppoctl's own words."""

NOT_YET = ("data/",)


def unquoted(found: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the unquoted values in commands of these messages that may contain any character."""
    for text in (node for node in found if isinstance(node, ast.JoinedStr)):
        before = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                expression = ast.unparse(part.value)
                if COMMAND.search(before) and not expression.startswith("quoted(") and expression not in PLAIN:
                    yield f"line {text.lineno}: {expression}"
                before += "WORD"


@for_each(modules())
def test_hint_commands_quote_inserted_values(module: Path) -> None:
    if str(module).startswith(NOT_YET):
        return
    assert not list(unquoted(nodes()[module]))


def test_hint_check_detects_unquoted_path() -> None:
    assert list(unquoted(ast.walk(ast.parse('hint = f"look: rm -r {a} and {quoted(b)}"')))) == ["line 1: a"]
    assert not list(unquoted(ast.walk(ast.parse('message = f"`{a}` is gone; ls {quoted(b)}"'))))
