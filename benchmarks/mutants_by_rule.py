"""Mutants by rule instead of by choice: every change that the rules find in the files between recipe and loss.

A rule (`mutation_rules`) reads the syntax tree of a file and breaks one place at a time. Each mutant is tested with
the quick tests on fakes, in a forked child that imports the broken text instead of the file; the table of all
mutants, with the test that killed each, is `mutants/by_rule.txt`. A survivor needs an entry in
`mutants/by_rule_survivors.toml`, found by its words in the table: why its results are equal (`equivalent`), or why no
test covers it (`open`).

    python benchmarks/mutants_by_rule.py [--share 1] [--words stages/reward.py] [--again] [--list] [--jobs 2]

Exits 1 if less than 95 % of those that are not equivalent are killed or a survivor has no reason, and 2 if the tests
do not pass on the unchanged source.
"""

import argparse
import ast
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType

import hypothesis  # noqa: F401 - imported once here, so that a forked child starts at once
import numpy  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mutation_rules import Found, mutants_of  # noqa: E402 - below the path

PACKAGE = ROOT / "src" / "ppoctl"
TABLE = ROOT / "benchmarks" / "mutants" / "by_rule.txt"
REASONS = ROOT / "benchmarks" / "mutants" / "by_rule_survivors.toml"
LIMIT_S = 300


def files_in(folder: str) -> Iterator[str]:
    """Yield the files of a folder of the package, by their paths below it."""
    yield from (f"{folder}/{path.name}" for path in sorted((PACKAGE / folder).glob("[a-z]*.py")))


FILES = (
    *files_in("algorithms/stages"),
    "algorithms/update_specs.py",
    "run/wire/run_context.py",
    *files_in("algorithms/estimators"),
    "rewards/shaping_tables.py",
    "core/batch/records.py",
    "core/batch/carry.py",
    *files_in("algorithms/formulas"),
)
WIRING = (
    "wiring/test_golden_run.py",
    "wiring/test_step_keys.py",
    "wiring",
    "stages",
    "wire/test_stage_keys.py",
)
TESTS = {
    "algorithms/formulas": ("ppo", *WIRING),
    "core/batch": ("batch/test_record_invariants.py", "batch/test_records.py", *WIRING, "store/test_stage_runner.py"),
    "algorithms/stages": (
        *WIRING,
        "algorithm",
        "store/test_stage_runner.py",
        "wire/test_settings_of_stages.py",
        "conventions/test_pages.py",
    ),
    "algorithms/estimators": ("estimators", *WIRING),
    "algorithms": (*WIRING, "algorithm", "wire/test_reported_metrics.py"),
    "rewards": WIRING,
    "run/wire": (*WIRING, "loop", "runs/test_changed_settings.py", "store/test_states.py", "store/test_resume.py"),
}
"""Folder of the broken file -> tests that are run, in this order."""


class FirstFailure:
    """A pytest plugin that records which test failed first, or could not be imported."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.removeprefix("tests/")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"(import) {report.nodeid.removeprefix('tests/')}"


@dataclass(frozen=True)
class Verdict:
    """Test result of one mutant."""

    mutant: Found
    killed_by: str
    """Test that killed it; "": it survived."""
    seconds: float


def importers_of(module: str) -> set[str]:
    """Return the module, and all loaded modules of ppoctl that import it, directly or not: a child must import them
    again."""
    loaded = {name: value for name, value in sys.modules.items() if name.partition(".")[0] == "ppoctl"}
    imports = {name: _imported(value) for name, value in loaded.items()}
    found = {module} & set(loaded)
    while more := {name for name, used in imports.items() if used & found} - found:
        found |= more
    return found


@cache
def _imported(module: ModuleType) -> frozenset[str]:
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return frozenset(names)


def shadow(file: str, text: str, folder: Path) -> None:
    """Let this process import a module from this text: a folder that its package searches first. Every import hook,
    such as the tests' check of shapes, finds the file in the same way."""
    folder.mkdir()
    (folder / Path(file).name).write_text(text, encoding="utf-8")
    package, _, stem = ("ppoctl." + file.removesuffix(".py").replace("/", ".")).rpartition(".")
    for name in importers_of(f"{package}.{stem}"):
        del sys.modules[name]
    import_module(package).__path__.insert(0, str(folder))


def ask(file: str, text: str, tests: Sequence[str], scratch: Path, limit_s: float = LIMIT_S) -> str:
    """Return the first test that fails with the file's text replaced; "" if all pass."""
    answer = Path(tempfile.mkdtemp(dir=scratch)) / "answer"
    child = os.fork()
    if child == 0:
        os._exit(_child(file, text, tests, answer))
    began = time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > limit_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return f"(no end after {limit_s} s)"
        time.sleep(0.05)
    return answer.read_text() if answer.exists() else "(crash)"


def _child(file: str, text: str, tests: Sequence[str], answer: Path) -> int:
    os.chdir(ROOT)
    torch.set_num_threads(1)
    tempfile.tempdir = str(answer.parent)  # in memory: a run on fakes flushes often
    if text:
        shadow(file, text, answer.parent / "broken")
    silent = os.open(answer.parent / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    first = FirstFailure()
    quick = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=60", "--assert=plain"]
    quick += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main(
        [*quick, f"--basetemp={answer.parent / 'tests'}", *(f"tests/{test}" for test in tests)], plugins=[first]
    )
    answer.write_text(first.name if code else "")
    sys.stdout.flush()
    return 0


def reasons() -> dict[str, tuple[str, str]]:
    """Return a mutant's words -> (`equivalent` or `open`, why)."""
    if not REASONS.exists():
        return {}
    found = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    return {words: (kind, why) for kind in ("equivalent", "open") for words, why in found.get(kind, {}).items()}


def judged(mutants: Sequence[Found], jobs: int) -> Iterator[Verdict]:
    """Test all mutants, several at a time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        scratch = Path(name)

        def judge(mutant: Found) -> Verdict:
            began = time.monotonic()
            killed_by = ask(mutant.file, mutant.text, TESTS[mutant.file.rpartition("/")[0]], scratch)
            return Verdict(mutant, killed_by, time.monotonic() - began)

        every = sorted({test for tests in TESTS.values() for test in tests})
        failed = ask("", "", every, scratch, 4 * LIMIT_S)
        if failed:
            raise SystemExit(f"without a mutant fails {failed}")
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(judge, mutants)


def line_of(verdict: Verdict) -> str:
    """Return a line of the table."""
    words = verdict.mutant.words
    if verdict.killed_by:
        return f"killed      {words} # {verdict.killed_by}"
    kind, why = reasons().get(words, ("SURVIVED", ""))
    return f"{kind:11} {words} # {why}".removesuffix(" # ")


def read_table() -> dict[str, str]:
    """Return the lines of the last table by their mutants."""
    lines = TABLE.read_text(encoding="ascii").splitlines() if TABLE.exists() else []
    return {line[12:].partition(" # ")[0]: line for line in lines if not line.startswith("#")}


def write_table(lines: Sequence[str], share: int) -> tuple[str, bool]:
    """Write the lines with their total; return whether enough are killed and every survivor has its reason."""
    kinds = Counter(line.split()[0] for line in lines)
    killed = kinds["killed"] / max(len(lines) - kinds["equivalent"], 1)
    total = f"{len(lines)} mutants (1 in {share}), {dict(kinds)}: killed {killed:.1%} of those not equivalent"
    head = f"# {total}\n# Written by benchmarks/mutants_by_rule.py, which says what the rules are.\n"
    TABLE.write_text(head + "".join(f"{line}\n" for line in lines), encoding="ascii")
    return total, killed >= 0.95 and not kinds["SURVIVED"]


def is_drawn(found: Found, share: int) -> bool:
    """Return whether a mutant is selected, by a hash of its words. For `formulas`, which has its own tests, a
    third as many are selected."""
    share *= 3 if share > 1 and found.file.startswith("algorithms/formulas/") else 1
    return int(sha256(found.words.encode()).hexdigest(), 16) % share == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=3, help="one in so many, drawn by a hash of its words; 1: all")
    parser.add_argument("--words", default="", help="mutants whose line in the table contains this")
    parser.add_argument("--again", action="store_true", help="those that the table does not say to be killed")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    every = [found for file in FILES for found in mutants_of(PACKAGE, file) if is_drawn(found, chosen.share)]
    table = read_table()
    mutants = [m for m in every if chosen.words in m.words]
    if chosen.again:
        mutants = [m for m in mutants if not table.get(m.words, "").startswith("killed")]
    if chosen.list:
        print("\n".join(mutant.words for mutant in mutants), Counter(m.rule for m in mutants), len(mutants))
        return 0
    total, is_enough = "nothing to do", True
    for verdict in judged(mutants, chosen.jobs):
        table[verdict.mutant.words] = line_of(verdict)
        print(f"[{verdict.seconds:.0f} s] {table[verdict.mutant.words]}", flush=True)
        total, is_enough = write_table([table[m.words] for m in every if m.words in table], chosen.share)
    print(total)
    return int(not is_enough)


if __name__ == "__main__":
    raise SystemExit(main())
