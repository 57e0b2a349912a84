"""Imports go one way. The table is the law of DESIGN section 2; a new arrow is a decision made here."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from every import of_every
from house.conftest import trees

# Room -> rooms it may import. Its own is always allowed, and `ppoctl.__version__` to everyone.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "metrics": set(),
    "clock": set(),
    "doing": {"clock"},
    "versions": set(),
    "units": set(),
    "table": set(),
    "chart": set(),
    "nvml": set(),
    "device": {"nvml", "errors"},
    "cuda_memory": set(),
    "http_client": set(),
    "recipe": {"rewards", "table", "model", "metrics", "errors"},
    "plan": {"loop", "store", "convert", "ppo", "rewards", "recipe", "table", "model", "errors"},
    "launch": {"clock", "errors"},
    "slurm": {"recipe", "store", "clock", "errors"},
    "ppo": set(),
    "batch": {"model", "metrics", "errors"},
    "ports": {"batch"},
    "stages": {"ports", "batch", "ppo", "clock", "doing", "metrics", "errors"},
    "store": {"ports", "batch", "clock", "doing", "units", "errors"},
    "loop": {"store", "batch", "recipe", "metrics", "errors"},
    "data": {"batch", "recipe", "model", "errors"},
    "rewards": {"batch", "table", "http_client", "units", "errors"},
    "tracking": {"store", "batch", "recipe", "clock", "doing", "metrics", "versions", "errors"},
    "engines.turns": set(),
    "engines.loopback": set(),
    "engines.child": {"doing", "errors"},
    "weights": {"cuda_memory", "device", "engines.loopback", "engines.turns", "batch", "errors"},
    "engines.megatron": {
        "convert", "cuda_memory", "device", "doing", "weights", "engines.loopback", "engines.turns", "ports", "batch",
        "recipe", "model", "errors",
    },
    "engines.vllm": {
        "device", "weights", "engines.child", "engines.loopback", "ports", "batch", "recipe", "errors",
    },
    "engines.ray": {"clock", "doing", "weights", "engines.child", "errors"},
    "convert": {"batch", "model", "errors"},
    "preflight": {
        "batch", "convert", "data", "plan", "recipe", "rewards", "store", "model", "device", "nvml", "units",
        "errors",
    },
    "doctor": {"preflight", "recipe", "store", "device", "http_client", "nvml", "errors"},
    "conversion": {
        "convert", "engines.megatron", "store", "wire", "batch", "model", "versions", "errors",
    },
    "wire": {
        "convert", "data", "plan", "preflight", "engines.child", "engines.megatron", "engines.ray", "engines.turns",
        "engines.vllm", "launch", "loop", "rewards", "slurm", "stages", "store", "tracking", "weights", "ports",
        "batch", "ppo", "recipe", "report", "model", "clock", "device", "doing", "nvml", "units", "versions",
        "errors",
    },
    "report": {
        "loop", "metrics", "recipe", "slurm", "store", "tracking", "clock", "errors",
    },
    "cli": {"doing", "units", "errors"},
    "api": set(),
    "__main__": {"cli"},
}  # fmt: skip

# What a command may import inside its function, when it has been chosen.
LATE: dict[str, set[str]] = {
    "cli": {
        "chart", "clock", "conversion", "doctor", "launch", "loop", "metrics", "model", "plan", "preflight", "recipe",
        "report", "slurm", "store", "tracking", "wire",
    },
    "report": {"wire"},
    "api": {"batch", "cli", "launch", "loop", "recipe", "slurm", "store", "tracking", "wire"},
}  # fmt: skip

# Foreign packages by room; the standard library is allowed to all.
FOREIGN: dict[str, set[str]] = {
    "errors": set(),
    "model": set(),
    "plan": set(),
    "launch": set(),
    "slurm": set(),
    "chart": {"PIL"},
    "preflight": set(),
    "device": {"torch"},
    "doctor": {"packaging"},
    "recipe": {"pydantic", "pydantic_core", "pydantic_settings", "pyarrow"},
    "table": {"pydantic"},
    "rewards": {"pydantic", "torch", "jaxtyping", "math_verify"},
    "report": {"jinja2", "markupsafe"},
    "cli": {"typer", "rich"},
    "ppo": {"torch", "jaxtyping"},
    "ports": {"torch", "jaxtyping"},
    "stages": {"torch", "jaxtyping", "numpy"},
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
    "pynvml": {"nvml"},
    "math_verify": {"rewards"},
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


def rooms_imported(module: Path) -> Iterator[tuple[str, str, bool]]:
    """Room, name, and whether late, of every import of the product by a file."""
    for name, is_late in imports(trees()[module]):
        first, *rest = name.split(".")
        if first == "ppoctl" and rest not in ([], ["__version__"]):
            yield ".".join(rest[:2]) if rest[0] == "engines" else rest[0], name, is_late


@of_every(MODULES)
def test_imports_follow_the_arrows(module: Path) -> None:
    here = room(module)
    if here in ("__init__", "engines"):
        of_api = {name for name, is_late in imports(trees()[module]) if is_late and name.startswith("ppoctl.api.")}
        assert {name for name, _ in imports(trees()[module])} <= of_api | {"typing.TYPE_CHECKING", "typing.Any"} | {
            "importlib.import_module"
        }, f"{module} is a name, not a room"
        return
    assert here in ARROWS, f"a new room `{here}`: say in ARROWS what it may import"
    for there, name, is_late in rooms_imported(module):
        allowed = ARROWS[here] | {here} | (LATE.get(here, set()) if is_late else set())
        assert there in allowed, f"{module} imports {name}"


def test_an_allowed_arrow_is_used() -> None:
    """What nobody needs is not allowed: the table is how the rooms are, not how they might be."""
    at_once, late = defaultdict(set), defaultdict(set)
    for module in MODULES:
        for there, _, is_late in rooms_imported(module):
            here = room(module)
            (late if is_late and there not in ARROWS.get(here, set()) else at_once)[here].add(there)
    for used, table in ((at_once, ARROWS), (late, LATE)):
        assert {(here, there) for here, allowed in table.items() for there in allowed - used[here]} == set()


def test_no_file_imports_itself_over_others() -> None:
    """Late and type-only imports included: a circle of files is one file in pieces."""
    edges = {dotted(module): set(files_imported(module)) for module in MODULES}
    while leaves := {file for file, there in edges.items() if not there & edges.keys()}:
        edges = {file: there for file, there in edges.items() if file not in leaves}
    assert {file: sorted(there & edges.keys()) for file, there in edges.items()} == {}


def dotted(module: Path) -> str:
    return ".".join(("ppoctl", *module.with_suffix("").parts)).removesuffix(".__init__")


def files_imported(module: Path) -> Iterator[str]:
    """The modules that a file imports; of `from package import name` the module `name`, if it is one, else the
    package. Its own package is no import: it runs before the file does."""
    known = {dotted(other) for other in MODULES} - {"ppoctl"}
    for name, _ in imports(trees()[module]):
        found = name if name in known else name.rpartition(".")[0]
        if found in known:
            yield found


@of_every(MODULES)
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
