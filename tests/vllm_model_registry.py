"""What vLLM asks of a model's class before it loads it, answered in this process.

vLLM imports each architecture in a process of its own, ten seconds of imports, and keeps the answer in the home
folder: on a new machine that is a minute of these tests. One whole command in `test_command_line.py`, which starts
from nothing, still goes vLLM's way.
"""

from collections.abc import Callable
from typing import Any


def inspect_in_this_process() -> None:
    """From now on. Imports vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _run_here


def _run_here(inspect: Callable[[], Any]) -> Any:
    return inspect()
