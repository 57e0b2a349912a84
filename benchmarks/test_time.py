"""Measures where the tests spend their time: by part, file, fixture and cause.

A plugin of pytest samples the stack of the thread that runs the tests, fifty times a second. The cause of a sample is
the innermost frame that one row of `CAUSES` names; a wait is counted where the test waits, not in the process that it
waits for. CPU seconds are of the test's process, of its children when they have ended, and of the whole machine. Only
the last counts ranks and Ray; read it only if one process of tests ran. Without `--read`, runs `make test` with the
plugin, on a machine that must be idle.

    PYTHONPATH=src python benchmarks/test_time.py --folder /tmp/times [--target test]
    PYTHONPATH=src python benchmarks/test_time.py --folder /tmp/times --read
"""

import argparse
import collections
import json
import linecache
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE_S = 0.02
# Words in the path of a frame's file, and its function; the first row that the innermost frames match is the cause.
CAUSES = (
    ("import", "importlib/_bootstrap", ""),
    ("beartype", "/beartype/", ""),
    ("Hypothesis", "/hypothesis/", ""),
    ("wait for a child or a rank", "/subprocess.py", ""),
    ("wait for a child or a rank", "/multiprocessing/", ""),
    ("wait for a child or a rank", "/selectors.py", ""),
    ("wait for a child or a rank", "/ray/", ""),
    ("wait for a child or a rank", "/socket.py", ""),
    ("load of a recipe", "ppoctl/recipe/", ""),
    ("load of a recipe", "/pydantic", ""),
    ("store: files, hashes, fsync", "ppoctl/store/", ""),
    ("torch", "/torch/", ""),
    ("transformers and tokenizers", "/transformers/", ""),
    ("MLflow and its database", "/mlflow/", ""),
    ("MLflow and its database", "/sqlalchemy/", ""),
    ("syntax trees of the source", "/ast.py", ""),
)


class Clock:
    """Samples the thread of the tests, and writes one line for each test and phase."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")
        self._part = file.name.split(" ")[0]
        self._main = threading.get_ident()
        self._causes: collections.Counter[str] = collections.Counter()
        self._time = time.monotonic
        self._start, self.now, self._cpu = self._time(), ("", "collection"), _cpu_seconds()
        threading.Thread(target=self._sample, daemon=True).start()

    def enter(self, test: str, phase: str) -> None:
        """End the present phase, and begin another."""
        causes, self._causes = self._causes, collections.Counter()
        now, cpu = self._time(), _cpu_seconds()
        row = {"part": self._part, "test": self.now[0], "phase": self.now[1], "seconds": now - self._start}
        used = {name: cpu[name] - before for name, before in self._cpu.items()}
        self._file.write(json.dumps({**row, "causes": causes, "cpu": used}) + "\n")
        self._start, self.now, self._cpu = now, (test, phase), cpu

    def close(self) -> None:
        """Write what is left."""
        self.enter("", "end")
        self._file.close()

    def _sample(self) -> None:
        never = threading.Event()
        while not never.wait(SAMPLE_S):  # tests replace `time.sleep`
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                self._causes[_cause(frame)] += 1


_STAT, _pread = os.open("/proc/stat", os.O_RDONLY), os.pread


def _cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process, of its children that have ended, and of all processes."""
    of = {"own": resource.RUSAGE_SELF, "children": resource.RUSAGE_CHILDREN}
    used = {name: resource.getrusage(who) for name, who in of.items()}
    # Tests replace `open`, which psutil uses, and `Path.read_text`; an error here would leave their patches in place.
    _, user, nice, system, *_ = _pread(_STAT, 4096, 0).split(maxsplit=4)
    of_all = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
    return {name: usage.ru_utime + usage.ru_stime for name, usage in used.items()} | {"machine": of_all}


def _cause(innermost: FrameType) -> str:
    if "sleep(" in linecache.getline(innermost.f_code.co_filename, innermost.f_lineno or 1):  # None: a bare `try`
        return "sleep"
    for frame in _outward(innermost):
        file = frame.f_code.co_filename
        for cause, words, function in CAUSES:
            if words in file and function in frame.f_code.co_name:
                return cause
        if "/src/ppoctl/" in file:
            return "our code: " + file.split("/src/ppoctl/")[1].split("/")[0]
    return "tests"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option carries the folder: a variable of the environment would reach the commands that tests start."""
    parser.addoption("--times", type=Path, help="a folder, to which each process writes what its phases took")


def pytest_configure(config: pytest.Config) -> None:
    """Begin with the collection."""
    folder = config.getoption("times")
    if folder is not None and not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # the controller of workers runs no test
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{_part(config)} {os.getpid()}.jsonl"
        config.pluginmanager.register(Phases(Clock(folder / name)))


def _part(config: pytest.Config) -> str:
    return "engines" if "not engines" not in config.option.markexpr else "quick"


class Phases:
    """A plugin that passes the phases of tests to the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """A fixture is a phase of its own if it lives longer than a test."""
        if fixturedef.scope == "function":
            return (yield)
        test = self._clock.now
        self._clock.enter(test[0], f"fixture {fixturedef.argname} ({fixturedef.scope})")
        try:
            return (yield)
        finally:
            self._clock.enter(*test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        self._clock.enter(item.nodeid, "setup")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        self._clock.enter(item.nodeid, "call")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        self._clock.enter(item.nodeid, "teardown")
        return (yield)

    def pytest_unconfigure(self) -> None:
        """The last phase ends here."""
        self._clock.close()


def read(folder: Path) -> list[dict]:
    """Return the phases of all processes."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open(encoding="utf-8")]


def table(title: str, rows: Iterable[tuple[str, float]], least_s: float) -> None:
    """Print seconds summed by name, the largest first."""
    sums: collections.Counter[str] = collections.Counter()
    for name, seconds in rows:
        sums[name] += seconds
    print(f"\n{title} (all: {sum(sums.values()):.0f} s)")
    for name, seconds in sums.most_common():
        if seconds >= least_s:
            print(f"  {seconds:8.1f}  {name}")


def report(phases: list[dict]) -> None:
    """Print the sums."""
    tests = collections.Counter(row["part"] for row in phases if row["phase"] == "call")
    table("by part", ((f"{row['part']}: {tests[row['part']]} tests", row["seconds"]) for row in phases), 0)
    causes = ((cause, count * SAMPLE_S) for row in phases for cause, count in row["causes"].items())
    table("by cause, of the thread that runs the tests", causes, 3)
    for who, title in (("own", "the process"), ("children", "its children"), ("machine", "the machine")):
        used = ((row["test"].split("::")[0] or row["phase"], row["cpu"][who]) for row in phases)
        table(f"by file, CPU seconds of {title}", used, 5)
    fixtures = (row for row in phases if row["phase"].startswith("fixture"))
    table("by fixture", ((row["phase"] + " " + row["test"].split("::")[0], row["seconds"]) for row in fixtures), 2)
    table("by file", ((row["test"].split("::")[0] or row["phase"], row["seconds"]) for row in phases), 5)
    table("by test", ((row["test"] or row["phase"], row["seconds"]) for row in phases), 5)


def main() -> int:
    """Run the tests, or read what a former run wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--target", default="test")
    parser.add_argument("--read", action="store_true")
    words = parser.parse_args()
    code = 0
    if not words.read:
        start = time.monotonic()
        code = subprocess.run(
            # With `=`: pytest would take the folder for one of tests, and a worker would not find pyproject.toml.
            ["make", words.target, f"ARGS=-q -p test_time --times={words.folder}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"},
            check=False,
        ).returncode
        print(f"\n{words.target}: {time.monotonic() - start:.0f} s on {os.cpu_count()} cores")
    report(read(words.folder))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
