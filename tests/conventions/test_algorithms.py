"""Algorithms are plain and light, and only they and the recipe name the roles that train."""

import ast
import subprocess
import sys
from pathlib import Path

from conventions.conftest import PACKAGE, modules, nodes
from for_each import for_each

ROLES = ("actor", "critic")
LITERAL_ALLOWED = {
    "core/batch/fields.py": "the record of log-probs has a field `actor`, which is part of format 3",
    "store/stored_samples.py": "reads that field",
    "models/trainable_tables.py": "the recipe key `critic.on` has the value `actor`",
}
"""File -> reason why it may contain the name of a role as a string."""
IMPURE = {"time", "datetime", "random", "os", "uuid", "secrets", "socket"}
"""Modules whose values change between a run and its replay."""
MODULES = modules()


@for_each(MODULES)
def test_roles_are_named_by_recipe_and_algorithm_only(module: Path) -> None:
    if module.parts[0] in ("recipe", "algorithms") or module.as_posix() in LITERAL_ALLOWED:
        return
    found = [node.lineno for node in nodes()[module] if isinstance(node, ast.Constant) and node.value in ROLES]
    assert not found, f"{module} names a role as a string in lines {found}: use recipe.trained, POLICY, or a head"


@for_each([module for module in MODULES if module.parts[0] == "algorithms" and len(module.parts) == 2])
def test_algorithms_import_nothing_that_differs_in_a_replay(module: Path) -> None:
    imported = {
        name.split(".")[0]
        for node in nodes()[module]
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert not imported & IMPURE, f"{module} imports {imported & IMPURE}"


def test_algorithms_import_neither_torch_nor_numpy() -> None:
    modules = [
        f"ppoctl.{'.'.join(m.with_suffix('').parts)}"
        for m in MODULES
        if m.parts[0] == "algorithms" and len(m.parts) == 2
    ]
    script = f"import sys; import {', '.join(modules)}; print({{'torch', 'numpy'}} & set(sys.modules))"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "set()"
