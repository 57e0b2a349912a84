"""Shared by all tests: the folder itself is importable (`fakes`, `story`, `tolerance`)."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))
from case_subset import Cell, draw

os.environ["PPOCTL_SITE"] = ""  # nobody's own site decides a test; processes of the tests inherit it

if not Path("/dev/nvidia0").exists():
    # On a CPU the C++ compiler takes seconds for each small function; on a GPU nothing may be without it.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# The tensors of tests are small: two threads take twice the CPU time of one. A run sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shapes are checked in the files that say shapes; elsewhere the check of every call would take most of the time.
SOURCE = Path(__file__).parents[1] / "src"
SHAPED = ("batch", "ppo", "stages", "engines/megatron")
install_import_hook(
    [
        ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for room in SHAPED
        for file in (SOURCE / "ppoctl" / room).glob("*.py")
        if "from jaxtyping import" in file.read_text("utf-8")
    ],
    "beartype.beartype",
)
# Before torch: pydantic looks for the docstrings of its keys in all modules that there are.
import ppoctl.recipe.schema  # noqa: E402, F401

# A job in the background of a shell, or under `nohup`, ignores them, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="of so many cells of the stories, run one")
    parser.addoption("--seed", default="0", help="which one: CI gives the commit")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_samples(items)
    if config.option.one_in > 1:
        _draw_stories(config, items)


def _leave_samples(items: list[pytest.Item]) -> None:
    """Leave a sample of each grid that is marked `sampled`; mark the rest `story`."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, grid in grids.items():
        (count,) = grid[0].get_closest_marker("sampled").args
        # Evenly spaced, so that neighbours, which differ in one thing, are not all in it or all out.
        start, stride = random.Random(name).random(), max(1.0, len(grid) / count)
        kept = {int((number + start) * stride) for number in range(count)}
        for number, item in enumerate(grid):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def _draw_stories(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the stories that this seed draws, and what is no story."""
    stories = {item.nodeid: item for item in items if item.get_closest_marker("slow") is not None}
    drawn = draw([_cell(item) for item in stories.values()], config.option.seed, config.option.one_in)
    left_out = [item for name, item in stories.items() if name not in drawn]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _cell(item: pytest.Item) -> Cell:
    minutes, always = item.get_closest_marker("minutes"), item.get_closest_marker("one_each_time")
    return Cell(item.nodeid, minutes.args[0] if minutes else 0.0, item.nodeid.split("[")[0] if always else "")


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """What was drawn, and how to draw it again."""
    if config.option.one_in == 1:
        return []
    again = f"make test-slow-sample SEED={config.option.seed}"
    return [f"drawn, one in {config.option.one_in} ({again}):", *(f"  {item.nodeid}" for item in items)]


@pytest.fixture(scope="session")
def ppoctl_data() -> Path:
    """The folder with real GSM8K rows, named by PPOCTL_DATA. Skipped without it; in CI that is a failure."""
    folder = os.environ.get("PPOCTL_DATA")
    if folder is None:
        if os.environ.get("CI"):
            pytest.fail("PPOCTL_DATA is not set, and CI must not skip real rows")
        pytest.skip("set PPOCTL_DATA to a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    return Path(folder)
