"""Imports go one way. The table is the law of DESIGN section 2; a new arrow is a decision made here."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.conftest import trees

# Room -> rooms it may import. Its own is always allowed, and `ppoctl.__version__` to everyone.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "metrics": set(),
    "clock": set(),
    "recipe": {"metrics", "errors"},
    "launch": {"recipe", "errors"},
    "ppo": set(),
    "batch": {"metrics", "errors"},
    "ports": {"batch"},
    "stages": {"ports", "batch", "ppo", "clock", "metrics", "errors"},
    "store": {"ports", "batch", "clock", "metrics", "errors"},
    "loop": {"stages", "store", "ports", "batch", "recipe", "metrics", "errors"},
    "data": {"ports", "batch", "recipe", "errors"},
    "rewards": {"ports", "batch", "recipe", "errors"},
    "tracking": {"ports", "batch", "recipe", "clock", "metrics", "errors"},
    "engines.turns": set(),
    "engines.loopback": set(),
    "weights": {"engines.loopback", "engines.turns", "batch", "errors"},
    "engines.megatron": {
        "convert", "weights", "engines.loopback", "engines.turns", "ports", "batch", "recipe", "errors",
    },
    "engines.vllm": {
        "clock", "weights", "engines.loopback", "engines.turns", "ports", "batch", "recipe", "errors",
    },
    "engines.ray": {"clock", "weights", "errors"},
    "convert": {"store", "batch", "recipe", "errors"},
    "preflight": {"convert", "data", "recipe", "errors"},
    "wire": {
        "convert", "data", "preflight", "engines.megatron", "engines.ray", "engines.turns", "engines.vllm", "launch",
        "loop", "rewards", "stages", "store", "tracking", "weights", "ports", "batch", "ppo", "recipe", "errors",
    },
    "cli": {"errors"},
    "__main__": {"cli"},
}  # fmt: skip

# What a command may import inside its function, when it has been chosen.
LATE: dict[str, set[str]] = {
    "cli": {"launch", "loop", "metrics", "preflight", "recipe", "store", "tracking", "wire"},
}

# Foreign packages by room; the standard library is allowed to all.
FOREIGN: dict[str, set[str]] = {
    "errors": set(),
    "launch": set(),
    "preflight": set(),
    "recipe": {"pydantic", "pydantic_core", "pydantic_settings"},
    "cli": {"typer", "rich"},
    "ppo": {"torch", "jaxtyping"},
    "ports": {"torch", "jaxtyping"},
    "stages": {"torch", "jaxtyping"},
    "loop": {"torch", "jaxtyping"},
    "batch": {"torch", "jaxtyping", "safetensors"},
    "weights": {"torch"},
}

# Foreign packages that live in one place only.
HOMES = {
    "megatron": {"engines.megatron"},
    "vllm": {"engines.vllm"},
    "ray": {"engines.ray"},
    "mlflow": {"tracking"},
    "typer": {"cli"},
    "pydantic_settings": {"recipe"},
}


def room(module: Path) -> str:
    parts = module.with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] == "engines" and parts[1] != "__init__" else parts[0]


def imports(tree: ast.AST, *, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported name, fully dotted, and whether a function imports it (type checking counts as late: it never
    runs)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", is_late) for alias in node.names)
        else:
            checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            inner = is_late or checked or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, is_late=inner)


MODULES = sorted(trees())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_follow_the_arrows(module: Path) -> None:
    here = room(module)
    if here in ("__init__", "engines"):
        assert not list(imports(trees()[module])), f"{module} is a name, not a room"
        return
    assert here in ARROWS, f"a new room `{here}`: say in ARROWS what it may import"
    for name, is_late in imports(trees()[module]):
        first, *rest = name.split(".")
        if first != "ppoctl" or rest in ([], ["__version__"]):
            continue
        there = ".".join(rest[:2]) if rest[0] == "engines" else rest[0]
        allowed = ARROWS[here] | {here} | (LATE.get(here, set()) if is_late else set())
        assert there in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_foreign_packages_stay_at_home(module: Path) -> None:
    here = room(module)
    for name, _ in imports(trees()[module]):
        package = name.split(".")[0]
        if package == "ppoctl" or package in sys.stdlib_module_names:
            continue
        assert here not in FOREIGN or package in FOREIGN[here], f"{module} imports {name}"
        assert package not in HOMES or here in HOMES[package], f"{module} imports {name}"


def test_the_arrows_never_turn_back() -> None:
    """No room reaches itself over others."""
    for start in ARROWS:
        seen: set[str] = set()
        edge = set(ARROWS[start])
        while edge:
            seen |= edge
            edge = {there for here in edge for there in ARROWS[here]} - seen
        assert start not in seen, start
