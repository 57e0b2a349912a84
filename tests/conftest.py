"""Configuration of all tests: the folder itself is importable (`fakes`, `end_to_end`, `tolerance`)."""

import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from case_subset import Cell, draw, sampled

gc.disable()  # until the tests are collected: imports leave nothing to collect, and looking for it takes seconds

os.environ["PPOCTL_SITE"] = ""  # no user's site file affects a test; processes that tests start inherit it

# The tests write tens of thousands of small files, and most are flushed: in memory, a flush takes no time.
if Path("/dev/shm").is_dir():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

if not Path("/dev/nvidia0").exists():
    # On a CPU, the C++ compiler takes seconds for each small function; on a GPU, compilation must stay on.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron-Core then does not import the compiler: two seconds

# The tensors of tests are small: two threads take twice the CPU time of one thread. A run sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# transformers would import scikit-learn and scipy, for decoding with a second model: two seconds.
sys.modules["sklearn"] = None

# An example may take long on a busy machine. In CI, Hypothesis's own profile for it is the parent.
settings.register_profile("many", settings.default, deadline=None)
settings.register_profile("few", settings.default, deadline=None, max_examples=25)
settings.load_profile("many" if os.environ.get("CI") else "few")

# Shapes are checked in the files that annotate shapes; elsewhere the check of every call would take most of the time.
SOURCE = Path(__file__).parents[1] / "src"
SHAPED = ("core/batch", "algorithms/formulas", "algorithms/stages", "engines/megatron")
SHAPE_TESTS = (
    "algorithm",
    "batch",
    "convert",
    "conventions",
    "engines",
    "estimators",
    "ppo",
    "stages",
    "weights",
)
"""Folders whose tests check shapes. Others play the same stages, and the check would take a third of their time."""
jaxtyping.install_import_hook(
    [
        ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for package in SHAPED
        for file in (SOURCE / "ppoctl" / package).glob("*.py")
        if "from jaxtyping import" in file.read_text("utf-8")
    ],
    "shape_checks.checked",
)
# Before torch: pydantic searches all loaded modules for the docstrings of its keys.
import ppoctl.recipe.schema  # noqa: E402, F401

# A background job of a shell, or a process under `nohup`, ignores them, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="of so many cells of the stories, run one")
    parser.addoption("--seed", default="0", help="which one: CI gives the commit")


@pytest.hookimpl(tryfirst=True, wrapper=True)  # before `-m` selects, and after pytest groups tests by their fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _leave_samples(items)
    if config.option.one_in == 1:
        return (yield)
    _draw_stories(config, items)
    yield
    # The longest first: the workers then end at about the same time. Then the shortest: xdist lets a worker keep the
    # test after the one that it runs, and the other workers wait for it.
    items.sort(key=lambda item: -_cell(item).minutes)
    items[1:] = [*items[-1:], *items[1:-1]]


def _leave_samples(items: list[pytest.Item]) -> None:
    """Keep a subset of each grid that is marked `sampled`; mark further cases `ci`, among them the `pinned` ones, and
    the others `slow`."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, grid in grids.items():
        count, *more = grid[0].get_closest_marker("sampled").args
        pinned = [number for number, item in enumerate(grid) if item.get_closest_marker("pinned") is not None]
        in_ci = sorted(sampled(name, len(grid), *(more or [count]), pinned))
        kept = {in_ci[place] for place in sampled(name, len(in_ci), count)} if more else {*in_ci}
        for number, item in enumerate(grid):
            if number not in kept:
                item.add_marker(pytest.mark.ci("other cases") if number in in_ci else pytest.mark.slow)


def _draw_stories(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the end-to-end tests that this seed selects, and all other tests."""
    stories = {item.nodeid: item for item in items if item.get_closest_marker("slow") is not None}
    selected = draw([_cell(item) for item in stories.values()], config.option.seed, config.option.one_in)
    left_out = [item for name, item in stories.items() if name not in selected]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _cell(item: pytest.Item) -> Cell:
    minutes, always = item.get_closest_marker("minutes"), item.get_closest_marker("one_each_time")
    return Cell(item.nodeid, minutes.args[0] if minutes else 0.0, always.args[0] if always else "")


def pytest_collection_finish() -> None:
    """Exclude what was imported and collected from garbage collection, and collect less often than Python does:
    otherwise this takes half of the time in which a test parses files."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Report the selection, and how to repeat it."""
    if config.option.one_in == 1:
        return []
    command = f"make test-slow-sample SEED={config.option.seed}"
    return [f"drawn, one in {config.option.one_in} ({command}):", *(f"  {item.nodeid}" for item in items)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the command that runs each failed test alone."""
    python = os.path.relpath(sys.executable, terminalreporter.startpath)
    reports = [report for what in ("failed", "error") for report in terminalreporter.stats.get(what, ())]
    for name in dict.fromkeys(report.nodeid for report in reports):
        terminalreporter.write_line(f"{python} -m pytest {shlex.quote(name)}")


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes only in the tests about them."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    jaxtyping.config.update("jaxtyping_disable", folder not in SHAPE_TESTS)


@pytest.fixture(scope="session")
def ppoctl_data() -> Path:
    """Return the folder with real GSM8K rows, named by PPOCTL_DATA. Without it the test is skipped; in CI that is a
    failure."""
    folder = os.environ.get("PPOCTL_DATA")
    if folder is None:
        if os.environ.get("CI"):
            pytest.fail("PPOCTL_DATA is not set, and CI must not skip real rows")
        pytest.skip("set PPOCTL_DATA to a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    return Path(folder)
