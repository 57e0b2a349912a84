"""Conventions of size and spelling: small files, short functions, few parameters, ASCII only."""

import ast
import re
from pathlib import Path

from conventions.conftest import PACKAGE, ROOT, modules, nodes, trees
from for_each import for_each

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
EXCUSE = re.compile(r"# noqa: PLR0913 - \w+")
MODULES = modules()


@for_each(MODULES)
def test_source_files_are_short(module: Path) -> None:
    assert len((PACKAGE / module).read_text("utf-8").splitlines()) <= MAX_FILE_LINES


@for_each(MODULES)
def test_functions_are_short_and_have_at_most_six_parameters(module: Path) -> None:
    source = (PACKAGE / module).read_text("utf-8").splitlines()
    for node in nodes()[module]:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        place = f"{module}:{node.lineno} {node.name}"
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{place} has {lines} lines"
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        # The parameters of a command are its options; any other exception gives its reason in the source.
        is_excused = module.parts[0] == "cli" or EXCUSE.search(source[node.lineno - 1]) is not None
        assert is_excused or count <= MAX_PARAMETERS, f"{place} takes {count}"


@for_each(MODULES)
def test_module_names_are_specific(module: Path) -> None:
    assert not FORBIDDEN_NAMES & set(module.with_suffix("").parts)


@for_each(MODULES)
def test_every_module_has_a_docstring(module: Path) -> None:
    assert ast.get_docstring(trees()[module]), f"{module} has no docstring"


@for_each(MODULES)
def test_only_render_prints(module: Path) -> None:
    calls = [node.func for node in nodes()[module] if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    methods = [call for call in calls if isinstance(call, ast.Attribute) and call.attr in ("echo", "write")]
    echoes = [call for call in methods if ast.unparse(call) in ("typer.echo", "sys.stdout.write", "sys.stderr.write")]
    assert not (prints or echoes) or module == Path("cli/render.py")


def test_sources_are_ascii() -> None:
    folders = [ROOT / name for name in ("src", "tests", "recipes", "benchmarks")]
    files = [file for folder in folders for suffix in ("py", "toml") for file in folder.rglob(f"*.{suffix}")]
    assert len(files) > 100
    assert [str(file.relative_to(ROOT)) for file in files if not file.read_bytes().isascii()] == []
