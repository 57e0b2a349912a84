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
    "chart": set(),
    "clock": set(),
    "engines": set(),
    "errors": set(),
    "http_network": set(),
    "key_path": set(),
    "metric": set(),
    "ppo": set(),
    "recipe_table": set(),
    "units": set(),
    "activity": {"clock"},
    "evaluation_metrics": {"metric"},
    "finding": {"errors"},
    "http_client": {"errors", "http_network"},
    "machine": {"errors"},
    "model": {"errors", "recipe_table"},
    "shutdown": {"clock", "errors"},
    "user_functions": {"errors"},
    "engines.child": {"errors", "activity"},
    "metric_registry": {"metric", "evaluation_metrics"},
    "batch": {"errors", "metric_registry"},
    "step_metrics": {"metric_registry"},
    "convert": {"errors", "model", "batch"},
    "ports": {"batch"},
    "rewards": {"errors", "recipe_table", "units", "finding", "http_client", "user_functions", "batch"},
    "environments": {"errors", "recipe_table", "units", "user_functions", "batch", "rewards"},
    "stages": {
        "clock", "errors", "ppo", "recipe_table", "activity", "finding", "user_functions",
        "metric_registry", "batch", "ports", "rewards",
    },
    "store": {"clock", "errors", "units", "activity", "batch", "ports"},
    "weights": {"errors", "machine", "batch", "convert"},
    "data": {"errors", "recipe_table", "model", "user_functions", "batch", "environments"},
    "engines.ray": {"clock", "errors", "activity", "engines.child", "weights"},
    "estimators": {"recipe_table", "user_functions", "metric_registry"},
    "algorithm": {
        "errors", "key_path", "ppo", "recipe_table", "model", "metric_registry", "batch", "convert",
        "rewards", "environments", "stages", "store", "estimators",
    },
    "recipe": {
        "errors", "key_path", "recipe_table", "model", "user_functions", "rewards", "environments",
        "data", "algorithm",
    },
    "engines.megatron": {
        "errors", "key_path", "recipe_table", "units", "activity", "machine", "model", "batch", "convert",
        "ports", "weights", "algorithm", "recipe",
    },
    "engines.vllm": {
        "errors", "recipe_table", "machine", "engines.child", "batch", "convert", "ports", "weights",
        "data", "algorithm", "recipe",
    },
    "loading": {
        "errors", "key_path", "recipe_table", "finding", "model", "metric_registry", "convert", "rewards",
        "environments", "stages", "data", "algorithm", "recipe",
    },
    "loop": {"errors", "metric_registry", "batch", "store", "algorithm", "recipe"},
    "plan": {
        "errors", "key_path", "recipe_table", "machine", "model", "batch", "convert", "rewards",
        "environments", "stages", "store", "data", "algorithm", "recipe",
    },
    "tracking": {
        "clock", "errors", "activity", "machine", "metric_registry", "batch", "step_metrics", "store",
        "recipe",
    },
    "manual": {"key_path", "recipe_table", "metric_registry", "recipe", "loading"},
    "preflight": {
        "errors", "key_path", "recipe_table", "units", "finding", "machine", "model", "batch", "convert",
        "rewards", "environments", "stages", "store", "data", "estimators", "algorithm", "recipe",
        "loading", "plan",
    },
    "slurm": {"clock", "errors", "finding", "store", "recipe", "loading"},
    "doctor": {"errors", "finding", "machine", "store", "recipe", "loading", "preflight"},
    "report": {
        "chart", "clock", "errors", "units", "metric_registry", "batch", "step_metrics", "store", "data",
        "algorithm", "recipe", "loading", "tracking", "slurm",
    },
    "wire": {
        "errors", "key_path", "activity", "machine", "model", "engines.child", "batch", "convert",
        "ports", "rewards", "stages", "store", "weights", "data", "algorithm", "recipe", "engines.vllm",
        "loading", "loop", "plan", "slurm",
    },
    "diagnose": {"errors", "finding", "metric_registry", "store", "report"},
    "runs": {
        "clock", "errors", "key_path", "units", "activity", "finding", "machine", "model", "shutdown",
        "user_functions", "batch", "convert", "ports", "rewards", "stages", "store", "data", "estimators",
        "algorithm", "recipe", "engines.megatron", "loading", "loop", "plan", "tracking", "preflight",
        "slurm", "report", "wire",
    },
    "api": set(),
    "cli": {"errors", "units", "activity"},
    "__main__": {"cli"},
}  # fmt: skip

# Packages that a command may import inside its function, after it has been chosen, and a recipe table inside the
# method that builds its part of a run.
LATE: dict[str, set[str]] = {
    "estimators": {"ppo", "stages"},
    "algorithm": {"ports"},
    "preflight": {"http_client"},
    "wire": {"environments", "engines.ray", "engines.megatron"},
    "runs": {"engines.ray"},
    "api": {"shutdown", "batch", "store", "loading", "tracking", "slurm", "report", "wire", "runs"},
    "cli": {
        "chart", "clock", "key_path", "finding", "machine", "model", "shutdown", "metric_registry",
        "step_metrics", "store", "recipe", "loading", "plan", "tracking", "manual", "preflight", "slurm",
        "doctor", "report", "wire", "diagnose", "runs",
    },
}  # fmt: skip

# Third-party packages by package; the standard library is allowed everywhere.
FOREIGN: dict[str, set[str]] = {
    "errors": set(),
    "model": {"pydantic"},
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
    "stages": {"torch", "jaxtyping", "numpy", "pydantic"},
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
