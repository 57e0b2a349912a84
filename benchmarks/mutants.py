"""Mutation testing: breaks the source at one location at a time and runs the tests that should detect it.

A mutant is a defect that a crash-safe trainer must never have, as a replacement of text in one file of `src/ppoctl`
(`mutants/*.toml`). It is killed if a test fails, and survives if all pass. Exits 1 if a mutant survives that is not
declared equivalent, and 2 if the tests do not pass on the unchanged source.

The tests are those of `make test`. With `--since COMMIT`, only mutants run whose tests differ from that commit.

    python benchmarks/mutants.py [--only WORDS] [--table store] [--since COMMIT]
"""

import argparse
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch  # noqa: F401 - imported once here, so that a forked child starts at once
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import changed  # noqa: E402 - below the path

TABLES = Path(__file__).parent / "mutants"
TEST_LIMIT_S = 60
"""A mutant may loop forever; a test that takes this long has detected it."""
MUTANT_LIMIT_S = 300.0
"""Tests of a mutant that take this long have detected it: pytest cannot interrupt arithmetic with huge numbers."""


@dataclass(frozen=True)
class Mutant:
    """One defect: `old` occurs once in the file and becomes `new`."""

    defect: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    skip: str = ""
    """Words in the names of slow, unrelated tests; pytest's `-k`."""
    equivalent: str | None = None
    """Why no test can detect it."""


@dataclass(frozen=True)
class Outcome:
    """Result of pytest."""

    exit_code: int
    first_failure: str


class FirstFailure:
    """A pytest plugin that records which test failed first, and whether a file could not be imported."""

    def __init__(self) -> None:
        self.name = ""
        self.is_import = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name, self.is_import = report.nodeid, True


def read_tables(only: str, table: str) -> list[Mutant]:
    """Return the mutants whose defect contains `only`, of one table or of all."""
    found: list[Mutant] = []
    for path in sorted(TABLES.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        for raw in content.get("mutant", ()) if table in ("", path.stem) else ():
            found.append(Mutant(**{"tests": content["tests"], "skip": content.get("skip", ""), **raw}))
    return [mutant for mutant in found if only in mutant.defect]


def with_changed_tests(mutants: Sequence[Mutant], commit: str) -> list[Mutant]:
    """Return the mutants with a test file that differs from the commit, or imports a module of tests that does."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", "tests"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    reached = {ROOT / name for name in listed.stdout.splitlines()}
    graph = changed.importers(ROOT)
    while more := {importer for file in reached for importer in graph.get(file, ())} - reached:
        reached |= more
    folders = {file.parent for file in reached if file.name == "conftest.py"} - {ROOT / "tests"}

    def differs(test: str) -> bool:
        file = ROOT / "tests" / test.split("::")[0]
        inside = {file, *file.rglob("*.py")}
        return bool(inside & reached) or any(folder in each.parents for folder in folders for each in inside)

    return [mutant for mutant in mutants if any(differs(test) for test in mutant.tests)]


@contextmanager
def applied(mutant: Mutant, package: Path) -> Iterator[None]:
    """Return the copied package with the one change in it."""
    path = package / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"`{mutant.defect}`: its text occurs {text.count(mutant.old)} times in {mutant.file}")
    try:
        _rewrite(path, text.replace(mutant.old, mutant.new))
        yield
    finally:
        _rewrite(path, text)


def run_tests(tests: Sequence[str], skip: str, source: Path, scratch: Path, limit_s: float = math.inf) -> Outcome:
    """Run tests in a forked child that imports the package from `source`: the parent has imported torch, but not
    ppoctl."""
    answer = scratch / "answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os._exit(_run_in_child(tests, skip, source, scratch))
    until = time.monotonic() + limit_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome(1, f"no end after {limit_s:.0f} s")
        time.sleep(0.05)
    return Outcome(os.waitstatus_to_exitcode(ended[1]), answer.read_text() if answer.exists() else "")


def _run_in_child(tests: Sequence[str], skip: str, source: Path, scratch: Path) -> int:
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    found = importlib.util.find_spec("ppoctl")
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).is_relative_to(source), f"tests would import {found.origin}"
    silent = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    first = FirstFailure()
    words = [
        "-x",
        "-q",
        "-m",
        "not (slow or ci)",
        "-p",
        "no:cacheprovider",
        "-o",
        f"timeout={TEST_LIMIT_S}",
        f"--basetemp={scratch / 'tests'}",
    ]
    words += ["-k", f"not ({skip})"] if skip else []
    code = int(pytest.main([*words, *(f"tests/{test}" for test in tests)], plugins=[first]))
    (scratch / "answer").write_text(first.name)
    sys.stdout.flush()
    return 3 if first.is_import else code


def _rewrite(path: Path, text: str) -> None:
    """Rewrite the file without its bytecode, whose timestamp has a resolution of one second."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(text, encoding="utf-8")


def judge(mutant: Mutant, outcome: Outcome) -> str:
    """Return killed | survived | equivalent | broken."""
    if outcome.exit_code == 1:
        return "killed"
    if outcome.exit_code == 0:
        return "survived" if mutant.equivalent is None else "equivalent"
    return "broken"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose defect contains these words")
    parser.add_argument("--table", default="", help="mutants of this table, without .toml")
    parser.add_argument("--since", help="only mutants whose tests differ from this commit")
    chosen = parser.parse_args()
    mutants = read_tables(chosen.only, chosen.table)
    if chosen.since is not None:
        mutants = with_changed_tests(mutants, chosen.since)
        print(f"{len(mutants)} mutants", flush=True)
    if not mutants:  # pytest without file names would run all tests
        print("no mutant is selected")
        return 2
    memory = Path("/dev/shm")
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        scratch = Path(name)
        source = scratch / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("recipes", "slurm"):  # the package finds those of a checkout next to `src`
            (scratch / beside).symlink_to(ROOT / beside)
        clean = run_tests(sorted({test for mutant in mutants for test in mutant.tests}), "", source, scratch)
        if clean.exit_code != 0:
            print(f"without a mutant: {clean}\n{(scratch / 'output').read_text()}")
            return 2
        for mutant in mutants:
            began = time.monotonic()
            with applied(mutant, source / "ppoctl"):
                outcome = run_tests(mutant.tests, mutant.skip, source, scratch, MUTANT_LIMIT_S)
            verdicts.append(judge(mutant, outcome))
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{verdicts[-1]:10} {mutant.file}: {mutant.defect} [{took}] {outcome.first_failure}", flush=True)
    counted = [verdict for verdict in verdicts if verdict != "equivalent"]
    killed = verdicts.count("killed")
    stated = len(verdicts) - len(counted)
    print(f"killed {killed} of {len(counted)} ({killed / max(len(counted), 1):.0%}); stated equivalents: {stated}")
    return int(killed != len(counted))


if __name__ == "__main__":
    raise SystemExit(main())
