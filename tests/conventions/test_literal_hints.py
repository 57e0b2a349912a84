"""A hint is a command that can be typed as is: no placeholder, and the real command line and recipe accept it.

Every text of the source that contains a command or a setting is checked, with a value of the right form in place of
each inserted value. Except `RUN` and `RECIPE`: `run.session` and `cli.app` replace them by paths, for packages that
do not know the run. The tests in `tests/recipe` and `tests/cli` check the hints of the errors that they raise
(`tests/hints.py`).
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from conventions.conftest import modules, nodes
from for_each import for_each
from hints import faults

KNOW_THE_RUN = ("cli", "wire", "loop", "store", "tracking")
NOT_HINTS = ("cli/help.py", "cli/options.py", "cli/manual/")
"""Modules whose texts are help or documentation."""
HAS_COMMAND = re.compile(r"\bppoctl [a-z]|--set ")
INSERTED = {
    "copying": "",
    "of_role": " --role critic",
    "role": "actor",
    "CRITIC": "critic",
    "name": "train",
    "self._name": "train",
    "key_of_k": "pass_at",
    "quoted(self.request or '')": "step",
    "formats['environment']": "hermes",
}
"""Inserted expressions that are not any word."""


def filled(node: ast.expr) -> str | None:
    """Return a text of the source with stand-ins for inserted values; None: a setting whose key is inserted."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    text = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else ():
        if isinstance(part, ast.Constant):
            text += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            expression = ast.unparse(part.value)
            if text.endswith(("--set ", "--set '", "=")) or re.search(r"--set '?[\w.]*$", text):
                text += "\0"  # a value or key of a setting, which is known at run time
            text += INSERTED.get(expression, "1")
    return re.sub(r"--set ('[^']*\0[^']*'|[^\s']*\0\S*)", "", text).replace("\0", "")


def texts(found: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string among these nodes that is not a docstring and has a command."""
    inner = {id(part) for node in found if isinstance(node, ast.JoinedStr) for part in node.values}
    bodies = [node.body for node in found if isinstance(getattr(node, "body", None), list)]
    docs = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
    for node in found:
        if isinstance(node, ast.Constant | ast.JoinedStr) and not {id(node)} & (inner | docs):
            text = filled(node)
            if text is not None and HAS_COMMAND.search(text):
                yield node.lineno, text


@for_each(modules())
def test_commands_of_hints_can_be_typed(module: Path) -> None:
    if str(module).startswith(NOT_HINTS):
        return
    names = () if module.parts[0] in KNOW_THE_RUN else ("RUN", "RECIPE")
    known = [f"`{name}` is a placeholder" for name in names]
    found = [(line, fault) for line, text in texts(nodes()[module]) for fault in faults(text)]
    assert not [f"line {line}: {fault}" for line, fault in found if fault not in known]


def test_faults_of_hints_are_found() -> None:
    assert faults("ppoctl resume runs/x --set ppo.truncated=terminal; or --set rollout.groups={}") == []
    assert faults("`ppoctl show x --foo`") == [
        "`ppoctl show x --foo`: No such option: --foo (Possible options: --colour)"
    ]
    assert faults("--set ppo.trunc=terminal") == ["`--set ppo.trunc=terminal`: no such key"]
    assert faults("ls RUN") == ["`RUN` is a placeholder"]
    assert len(faults("--set steps=many")) == len(faults("`ppoctl resum x`")) == 1
