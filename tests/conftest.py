"""Shared by all tests: the folder itself is importable (`fakes`, `story`, `tolerance`)."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
                item.add_marker(pytest.mark.story)


@pytest.fixture(scope="session")
def ppoctl_data() -> Path:
    """The folder with real GSM8K rows, named by PPOCTL_DATA. Skipped without it; in CI that is a failure."""
    folder = os.environ.get("PPOCTL_DATA")
    if folder is None:
        if os.environ.get("CI"):
            pytest.fail("PPOCTL_DATA is not set, and CI must not skip real rows")
        pytest.skip("set PPOCTL_DATA to a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    return Path(folder)
