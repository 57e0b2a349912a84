"""Shared by all tests: the folder itself is importable (`fakes`, `story`, `tolerance`)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def ppoctl_data() -> Path:
    """The folder with real GSM8K rows, named by PPOCTL_DATA. Skipped without it; in CI that is a failure."""
    folder = os.environ.get("PPOCTL_DATA")
    if folder is None:
        if os.environ.get("CI"):
            pytest.fail("PPOCTL_DATA is not set, and CI must not skip real rows")
        pytest.skip("set PPOCTL_DATA to a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    return Path(folder)
