"""Imports between packages follow the table ARROWS; a new arrow is a decision that is made here."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from conventions.conftest import modules, trees
from for_each import for_each

# Package -> packages that it may import. A package may always import itself and `ppoctl.__version__`.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "finding": {"errors"},
    "clock": set(),
    "units": set(),
    "metric": set(),
    "evaluation_metrics": {"metric"},
    "metric_registry": {"metric", "evaluation_metrics"},
    "step_metrics": {"metric_registry"},
    "recipe_table": set(),
    "http_network": set(),
    "http_client": {"http_network", "errors"},
    "chart": set(),
    "ppo": set(),
    "user_functions": {"errors"},
    "activity": {"clock"},
    "machine": {"errors"},
    "model": {"errors"},
    "shutdown": {"clock", "errors"},
    "batch": {"model", "metric_registry", "errors"},
    "ports": {"batch"},
    "estimators": {"recipe_table", "metric_registry", "user_functions"},
    "rewards": {"finding", "batch", "recipe_table", "http_client", "units", "errors", "user_functions"},
    "environments": {"batch", "rewards", "recipe_table", "units", "errors", "user_functions"},
    "recipe": {
        "environments", "estimators", "rewards", "recipe_table", "metric_registry", "model", "errors",
        "user_functions",
    },
    "loading": {
        "finding", "algorithm", "convert", "environments", "recipe", "rewards", "recipe_table", "model",
        "metric_registry", "errors",
    },
    "manual": {"loading", "recipe", "recipe_table", "metric_registry"},
    "algorithm": {
        "batch", "convert", "environments", "estimators", "store", "ppo", "recipe", "rewards", "metric_registry",
        "errors",
    },
    "convert": {"batch", "model", "weights", "errors"},
    "data": {"user_functions", "batch", "environments", "recipe", "model", "errors"},
    "stages": {
        "finding", "ports", "batch", "ppo", "activity", "clock", "metric_registry", "errors", "user_functions",
    },
    "store": {"ports", "batch", "activity", "clock", "units", "errors"},
    "loop": {"algorithm", "store", "batch", "recipe", "metric_registry", "step_metrics", "errors"},
    "plan": {
        "algorithm", "batch", "store", "convert", "environments", "rewards", "recipe", "recipe_table", "machine",
        "model", "errors",
    },
    "slurm": {"finding", "loading", "recipe", "store", "clock", "errors"},
    "tracking": {
        "store", "batch", "recipe", "activity", "clock", "machine", "metric_registry", "step_metrics", "errors",
    },
    "engines.child": {"activity", "errors"},
    "weights": {"machine", "batch", "errors"},
    "engines.megatron": {
        "convert", "activity", "machine", "weights", "ports", "batch",
        "recipe", "model", "units", "errors",
    },
    "engines.vllm": {
        "convert", "data", "machine", "weights", "engines.child", "ports", "batch", "recipe",
        "errors",
    },
    "engines.ray": {"activity", "clock", "weights", "engines.child", "errors"},
    "preflight": {
        "finding", "batch", "convert", "data", "environments", "estimators", "loading", "plan", "recipe",
        "recipe_table", "rewards", "store", "model", "machine", "units", "errors",
    },
    "doctor": {"finding", "preflight", "loading", "recipe", "store", "machine", "errors"},
    "wire": {
        "algorithm", "convert", "data", "plan", "engines.child", "engines.megatron", "engines.ray",
        "engines.vllm", "environments", "loading", "loop", "rewards", "slurm", "stages", "store", "weights", "ports",
        "batch", "recipe", "model", "activity", "machine", "errors",
    },
    "diagnose": {"finding", "metric_registry", "report", "store", "errors"},
    "report": {
        "chart", "batch", "data", "loading", "loop", "metric_registry", "recipe", "slurm", "store", "tracking",
        "clock", "units", "errors",
    },
    "runs": {
        "finding", "algorithm", "wire", "convert", "data", "estimators", "engines.megatron", "engines.ray",
        "loading", "loop", "plan", "preflight", "report", "rewards", "shutdown", "slurm", "stages", "store",
        "tracking", "ports", "batch", "recipe", "model", "clock", "machine", "units", "user_functions", "activity",
        "errors",
    },
    "cli": {"activity", "finding", "units", "errors"},
    "api": set(),
    "__main__": {"cli"},
}  # fmt: skip

# Packages that a command may import inside its function, after it has been chosen, and a recipe table inside the
# method that builds its part of a run.
LATE: dict[str, set[str]] = {
    "algorithm": {"ports", "stages"},
    "estimators": {"ppo", "stages"},
    "rewards": {"stages"},
    "recipe": {"ppo", "stages"},
    "cli": {
        "chart", "clock", "diagnose", "doctor", "loading", "loop", "machine", "manual",
        "metric_registry", "model", "plan", "preflight", "recipe", "report", "runs", "shutdown", "slurm",
        "step_metrics", "store", "tracking", "wire",
    },
    "preflight": {"http_client"},
    "api": {"batch", "report", "loading", "loop", "runs", "shutdown", "slurm", "store", "tracking", "wire"},
}  # fmt: skip

# Third-party packages by package; the standard library is allowed everywhere.
FOREIGN: dict[str, set[str]] = {
    "errors": set(),
    "model": set(),
    "plan": set(),
    "shutdown": set(),
    "slurm": set(),
    "chart": {"PIL"},
    "preflight": set(),
    "machine": {"torch", "pynvml", "psutil"},
    "doctor": {"packaging"},
    "http_network": {"httpcore"},
    "http_client": {"httpcore"},
    "estimators": {"pydantic", "torch"},
    "recipe": {"pydantic", "pyarrow"},
    "loading": {"pydantic", "pydantic_core", "pydantic_settings", "pyarrow"},
    "manual": {"pydantic"},
    "recipe_table": {"pydantic"},
    "environments": {"pydantic"},
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

# Third-party packages that are imported in one package only.
HOMES = {
    "megatron": {"engines.megatron"},
    "vllm": {"engines.vllm"},
    "ray": {"engines.ray"},
    "mlflow": {"tracking"},
    "typer": {"cli"},
    "pynvml": {"machine"},
    "math_verify": {"rewards"},
    "httpcore": {"http_network", "http_client"},
}


def package_of_file(module: Path) -> str:
    parts = module.with_suffix("").parts
    return package_of(parts)


def package_of(parts: Sequence[str]) -> str:
    """Return the package of a dotted name: one level, or two where a subpackage has import rules of its own."""
    is_split = parts[0] == "engines" and parts[1:2] != ("__init__",)
    return ".".join(parts[:2]) if is_split else parts[0]


def imports(tree: ast.AST, *, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield every imported name, fully dotted, and whether a function imports it. Imports for type checking count as
    late, because they never run."""
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


MODULES = modules()


@cache
def imports_of(module: Path) -> tuple[tuple[str, bool], ...]:
    """Return what `imports` yields for a module."""
    return tuple(imports(trees()[module]))


@cache
def known() -> frozenset[str]:
    """Return the dotted names of all modules except the package itself."""
    return frozenset(map(dotted, MODULES)) - {"ppoctl"}


def packages_imported(module: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield package, name, and whether late, of every import of ppoctl by a file."""
    for name, is_late in imports_of(module):
        first, *rest = name.split(".")
        if first == "ppoctl" and rest not in ([], ["__version__"]):
            yield package_of(rest), name, is_late


@for_each(MODULES)
def test_imports_follow_package_table(module: Path) -> None:
    source = package_of_file(module)
    if source in ("__init__", "engines"):
        of_api = {name for name, is_late in imports_of(module) if is_late and name.startswith("ppoctl.api.")}
        assert {name for name, _ in imports_of(module)} <= of_api | {"typing.TYPE_CHECKING", "typing.Any"} | {
            "importlib.import_module"
        }, f"{module} only re-exports names"
        return
    assert source in ARROWS, f"a new package `{source}`: add to ARROWS what it may import"
    for target, name, is_late in packages_imported(module):
        allowed = ARROWS[source] | {source} | (LATE.get(source, set()) if is_late else set())
        assert target in allowed, f"{module} imports {name}"


def test_every_allowed_import_is_used() -> None:
    """The table lists the imports that exist, not those that might be added."""
    eager, late = defaultdict(set), defaultdict(set)
    for module in MODULES:
        for target, _, is_late in packages_imported(module):
            source = package_of_file(module)
            (late if is_late and target not in ARROWS.get(source, set()) else eager)[source].add(target)
    for used, table in ((eager, ARROWS), (late, LATE)):
        assert {(source, target) for source, allowed in table.items() for target in allowed - used[source]} == set()


def test_modules_have_no_import_cycles() -> None:
    """Late and type-only imports are included: modules that import each other in a cycle cannot be understood one by
    one."""
    edges = {dotted(module): set(files_imported(module)) for module in MODULES}
    while leaves := {file for file, target in edges.items() if not target & edges.keys()}:
        edges = {file: target for file, target in edges.items() if file not in leaves}
    assert {file: sorted(target & edges.keys()) for file, target in edges.items()} == {}


def dotted(module: Path) -> str:
    return ".".join(("ppoctl", *module.with_suffix("").parts)).removesuffix(".__init__")


def files_imported(module: Path) -> Iterator[str]:
    """Yield the modules that a file imports: for `from package import name` the module `name` if it exists, otherwise
    the package. The file's own package is excluded, because it is imported before the file."""
    for name, _ in imports_of(module):
        found = name if name in known() else name.rpartition(".")[0]
        if found in known():
            yield found


@for_each(MODULES)
def test_third_party_imports_stay_in_their_packages(module: Path) -> None:
    source = package_of_file(module)
    for name, _ in imports_of(module):
        package = name.split(".")[0]
        if package == "ppoctl" or package in sys.stdlib_module_names:
            continue
        assert source not in FOREIGN or package in FOREIGN[source], f"{module} imports {name}"
        assert package not in HOMES or source in HOMES[package], f"{module} imports {name}"


def test_packages_have_no_cycles() -> None:
    """No package imports itself through others: not when it is imported, not in a function, not for a type. A
    subpackage counts as its package."""
    arrows = defaultdict[str, set[str]](set)
    for module in MODULES:
        source = package_of_file(module).partition(".")[0]
        if source != "__init__":
            arrows[source] |= {target.partition(".")[0] for target, _, _ in packages_imported(module)} - {source}
    for start in list(arrows):
        seen: set[str] = set()
        edge = arrows[start]
        while edge:
            seen |= edge
            edge = {target for source in edge for target in arrows[source]} - seen
        assert start not in seen, start
