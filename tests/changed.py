"""Selects the test files that are near a change, for the inner loop (`make test-changed`).

The change is that of the working tree; if it is clean, that of the last commit. A test file is near a changed module
if it imports the module, or a module that imports it; more steps are made only if these find none. For another file,
such as a recipe or a page, tests that mention its name are selected; for a `conftest.py`, those of its folder.
`make test` remains the proof.

    python tests/changed.py       # prints the test files
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 2
IMPORTS = re.compile(r"^[ ]*(?:from ([\w.]+) import (\([^)]*\)|[^\n(]*)|import ([\w.]+))", re.MULTILINE)
Graph = dict[Path, set[Path]]
"""File -> files that import it."""


def changed_files(root: Path) -> list[Path]:
    """Return the files that differ from the last commit, or those of the last commit."""
    listed = _git(root, "status", "--porcelain", "--untracked-files=all", "--no-renames")
    names = [line[3:].strip('"') for line in listed]
    return [root / name for name in names or _git(root, "diff", "--name-only", "--no-renames", "HEAD~1", "HEAD")]


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def importers(root: Path) -> Graph:
    """Return who imports each Python file below `src` and `tests`."""
    files = [file for folder in ("src", "tests") for file in (root / folder).rglob("*.py")]
    modules = {name: file for file in files for name in _names(file, root)}
    found: Graph = defaultdict(set)
    for file in files:
        for name in _imported(file.read_text(encoding="utf-8")):
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if target not in (None, file):
                found[target].add(file)
    return found


def _names(file: Path, root: Path) -> Iterator[str]:
    """Yield the names by which others import a file. A test folder's modules are imported without the folder, too."""
    below = root / ("src" if file.is_relative_to(root / "src") else "tests")
    yield ".".join(file.relative_to(below).with_suffix("").parts).removesuffix(".__init__")
    if below.name == "tests" and not file.name.startswith(("test_", "conftest")):
        yield file.stem


def _imported(text: str) -> Iterator[str]:
    for package, names, module in IMPORTS.findall(text):
        if module:
            yield module
        for name in re.findall(r"\w+", re.sub(r"\bas \w+|#.*", "", names)):
            yield f"{package}.{name}"


def near(changed: Collection[Path], graph: Graph, tests: Path) -> list[Path]:
    """Return the test files near the changed files."""
    python = {file for file in changed if file.suffix == ".py"}
    reached, found = set(python), set[Path]()
    for step in count(1):
        more = {importer for file in reached for importer in graph.get(file, ())} - reached
        reached |= more
        found = {file for file in reached if file.is_relative_to(tests) and file.name.startswith("test_")}
        if not more or (step >= STEPS and found):
            break
    for file in python:
        found |= {*file.parent.rglob("test_*.py")} if file.name == "conftest.py" else set()
    other = [file.name for file in changed if file not in python]
    if other:
        texts = {file: file.read_text(encoding="utf-8") for file in tests.rglob("test_*.py")}
        found |= {file for file, text in texts.items() if any(name in text for name in other)}
    return sorted(file for file in found if file.exists())


def main() -> int:
    changed = changed_files(ROOT)
    found = near(changed, importers(ROOT), ROOT / "tests")
    print(f"{len(changed)} changed files, {len(found)} test files near them", file=sys.stderr)
    print(" ".join(str(file.relative_to(ROOT)) for file in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
