"""A hint is a command that can be typed as it stands: nothing is left for the reader to fill in.

`RUN` is filled in: `wire.session` puts the run's path there, for rooms that do not know for which run they work.
"""

import ast
import re

from conventions.conftest import trees

PLACEHOLDER = re.compile(r"=\.\.\.|\bNAME\b|\bSTEP\b|<\w+>")
KNOW_THE_RUN = ("cli", "wire", "loop", "store", "tracking")


def text_of(node: ast.expr) -> str:
    """The constant parts of a string."""
    return "".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def test_hints_contain_no_placeholders() -> None:
    wrong = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                text = text_of(node.value)
                if PLACEHOLDER.search(text) or (re.search(r"\bRUN\b", text) and module.parts[0] in KNOW_THE_RUN):
                    wrong.append(f"{module}:{node.value.lineno} {text}")
    assert not wrong
