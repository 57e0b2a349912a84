"""Imports between packages follow the table ARROWS; a new arrow is a decision that is made here. A package is
directly below `ppoctl`; deeper ones are subpackages."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from conventions.conftest import modules, trees
from for_each import for_each

# Package -> packages that it may import, in an order in which each imports only those above it. A package may always
# import itself and `ppoctl.__version__`. The subpackages of `engines` count as packages: each has its own library.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "engines": set(),
    "engines.child": {"core"},
    "models": {"core"},
    "rewards": {"core"},
    "store": {"core"},
    "engines.weights": {"core", "models"},
    "environments": {"core", "rewards"},
    "algorithms": {"core", "models", "rewards", "store", "environments"},
    "data": {"core", "models", "environments"},
    "engines.ray": {"core", "engines.child", "engines.weights"},
    "recipe": {"core", "models", "rewards", "environments", "algorithms", "data"},
    "engines.megatron": {"core", "models", "engines.weights", "algorithms", "recipe"},
    "engines.vllm": {"core", "engines.child", "models", "engines.weights", "algorithms", "data", "recipe"},
    "plan": {"core", "models", "rewards", "store", "environments", "algorithms", "data", "recipe"},
    "start": {"core", "models", "rewards", "store", "environments", "algorithms", "data", "recipe", "plan"},
    "show": {"core", "store", "algorithms", "data", "recipe", "start"},
    "run": {
        "core", "engines.child", "models", "rewards", "store", "engines.weights", "algorithms", "data",
        "recipe", "engines.megatron", "engines.vllm", "plan", "start", "show",
    },
    "api": set(),
    "cli": {"core", "recipe"},
    "__main__": {"cli"},
}  # fmt: skip

# Packages that a command may import inside its function, after it has been chosen.
LATE: dict[str, set[str]] = {
    "run": {"environments", "engines.ray"},
    "api": {"core", "store", "recipe", "start", "show", "run"},
    "cli": {"models", "store", "plan", "start", "show", "run"},
}  # fmt: skip

# Third-party packages by package, subpackage or file, of which the longest name applies; the standard library is
# allowed everywhere.
FOREIGN: dict[str, set[str]] = {
    "core": set(),
    "core.recipe_table": {"pydantic"},
    "core.http_network": {"httpcore"},
    "core.http_client": {"httpcore"},
    "core.ports": {"torch", "jaxtyping"},
    "core.batch": {"torch", "jaxtyping", "safetensors"},
    "core.machine": {"torch", "pynvml", "psutil"},
    "models": {"pydantic"},
    "models.convert": {"torch", "jaxtyping", "safetensors", "transformers"},
    "rewards": {"pydantic", "torch", "jaxtyping", "math_verify"},
    "environments": {"pydantic"},
    "algorithms": {"pydantic"},
    "algorithms.formulas": {"torch", "jaxtyping"},
    "algorithms.estimators": {"pydantic", "torch"},
    "algorithms.stages": {"torch", "jaxtyping", "numpy", "pydantic"},
    "recipe": {"pydantic"},
    "recipe.loading": {"pydantic", "pydantic_core", "pydantic_settings"},
    "engines": set(),
    "engines.child": set(),
    "engines.weights": {"torch"},
    "engines.megatron": {"megatron", "torch", "jaxtyping"},
    "engines.vllm": {"vllm", "torch"},
    "engines.ray": {"ray", "torch", "psutil"},
    "plan": set(),
    "start": set(),
    "start.doctor": {"packaging"},
    "show": set(),
    "show.chart": {"PIL"},
    "show.report": {"jinja2", "markupsafe"},
    "show.tracking": {"mlflow", "alembic", "sqlalchemy", "rich", "tensorboard"},
    "run": {"huggingface_hub", "psutil", "safetensors", "torch"},
    "run.loop": set(),
    "run.shutdown": set(),
    "cli": {"typer", "rich"},
    "cli.manual": {"pydantic"},
}

# Third-party packages that are imported in one place only.
HOMES = {
    "megatron": {"engines.megatron"},
    "vllm": {"engines.vllm"},
    "ray": {"engines.ray"},
    "mlflow": {"show.tracking"},
    "tensorboard": {"show.tracking"},
    "typer": {"cli"},
    "pynvml": {"core.machine"},
    "math_verify": {"rewards"},
    "httpcore": {"core.http_network", "core.http_client"},
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
        public = ("ppoctl.api.", "ppoctl.core.errors.")
        of_api = {name for name, is_late in imports_of(module) if is_late and name.startswith(public)}
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
    parts = module.with_suffix("").parts
    sources = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    allowed = next((FOREIGN[source] for source in sources if source in FOREIGN), None)
    for name, _ in imports_of(module):
        package = name.split(".")[0]
        if package == "ppoctl" or package in sys.stdlib_module_names:
            continue
        assert allowed is None or package in allowed, f"{module} imports {name}"
        assert package not in HOMES or HOMES[package] & {*sources}, f"{module} imports {name}"


def test_modules_of_different_packages_have_different_names() -> None:
    packages = defaultdict[str, set[str]](set)
    for module in MODULES:
        if len(module.parts) > 1 and module.name != "__init__.py":
            packages[module.name].add(module.parts[0])
    assert {name: sorted(found) for name, found in packages.items() if len(found) > 1} == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_packages_have_no_cycles(depth: int) -> None:
    """No package (depth 1) imports itself through others, and no subpackage or file of a package (depth 2) does: not
    when it is imported, not in a function, not for a type."""
    arrows = defaultdict[str, set[str]](set)
    for module in MODULES:
        source = ".".join(module.with_suffix("").parts[:depth])
        targets = (name.removeprefix("ppoctl.") for name in files_imported(module))
        arrows[source] |= {".".join(target.split(".")[:depth]) for target in targets} - {source}
    del arrows["__init__"]
    for start in list(arrows):
        seen: set[str] = set()
        edge = arrows[start]
        while edge:
            seen |= edge
            edge = {target for source in edge for target in arrows[source]} - seen
        assert start not in seen, start
