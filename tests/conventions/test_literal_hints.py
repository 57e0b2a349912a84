"""A hint is a command that can be typed as is, without a placeholder for the reader to fill in.

Except `RUN`: `runs.session` replaces it by the path of the run, for packages that do not know the run.
"""

import ast
import re

from conventions.conftest import trees

PLACEHOLDER = re.compile(r"=\.\.\.|\bNAME\b|\bSTEP\b|<\w+>")
KNOW_THE_RUN = ("cli", "wire", "loop", "store", "tracking")


def text_of(node: ast.expr) -> str:
    """Return the constant parts of a string."""
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
