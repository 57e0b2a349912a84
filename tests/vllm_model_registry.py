"""Inspection of model classes, which vLLM does before it loads a model, in the tests' process.

vLLM imports each architecture in a separate process (ten seconds of imports) and caches the result in the home
folder: on a new machine that adds a minute to these tests. One complete command in `test_command_line.py`, which
starts from nothing, still uses vLLM's own inspection.
"""

from collections.abc import Callable
from typing import Any


def inspect_in_this_process() -> None:
    """Patch vLLM's model registry from now on. Imports vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _run_here


def _run_here(inspect: Callable[[], Any]) -> Any:
    return inspect()
