"""All tests in this folder start real engines, so they run in a separate pytest process (see the Makefile)."""

import gc
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)


def pytest_collection_finish() -> None:
    """Keep the imports out of garbage collections: vLLM asks for some at each start and end of an engine, and each
    would visit all objects of torch, Megatron-Core and transformers, which takes seconds."""
    gc.collect()
    gc.freeze()
