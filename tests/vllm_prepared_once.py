"""Preparations that vLLM repeats at each start of an engine, done once in the tests' process.

Before it loads a model, vLLM imports each architecture in a separate process (ten seconds of imports) and caches the
result in the home folder: on a new machine that adds a minute to these tests. On a CPU without Triton, each start
searches all loaded modules for Triton's kernels, which takes seconds, to replace what the first start has replaced.
A command that only CI runs, in `test_command_line.py`, starts from nothing and does neither in this way.
"""

from collections.abc import Callable
from functools import cache
from typing import Any


def prepare_once() -> None:
    """Let vLLM inspect models in this process from now on, and let only the first start in this process and its
    children replace Triton's kernels. Imports vLLM."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = _run_here
    replace: Any = current_platform.register_triton_kernel_overrides
    if not hasattr(replace, "cache_info"):
        current_platform.register_triton_kernel_overrides = cache(replace)  # type: ignore[method-assign]


def _run_here(inspect: Callable[[], Any]) -> Any:
    return inspect()
