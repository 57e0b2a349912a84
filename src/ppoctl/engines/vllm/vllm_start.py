"""Start and end of vLLM in this process, for engines and reward models, and ppoctl's errors for those of vLLM."""

import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ppoctl.core.errors import EnvironmentProblemError, OutOfMemoryError, PpoctlError
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import on_gpu, visible
from ppoctl.engines.vllm.arguments import engine_arguments
from ppoctl.engines.vllm.log import log_location
from ppoctl.engines.vllm.vllm_environment import alone_on_gpu, prepare_environment, store_in_memory
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.recipe.generator_limits import too_long_a_window, unread_router_bias


def end(llm: Any) -> None:
    """Shut down vLLM's engine and all process groups of this process."""
    llm.engine_core.engine_core.shutdown()


def import_vllm(settings: VllmSettings) -> float:
    """Import most of vLLM, and return the seconds that the import took, also if an earlier call imported it. The log
    of this process must have been set (`log.write_log`, `log.keep_log`)."""
    prepare_environment(settings)
    with third_party_quiet():
        return _import_s()


@cache
def _import_s() -> float:
    began = time.monotonic()
    with _threads_kept():
        import vllm.v1.engine.llm_engine  # noqa: F401 - loads most of vLLM
    return time.monotonic() - began


def started(settings: VllmSettings, **options: Any) -> Any:
    """Return vLLM's LLMEngine; `options` override our engine arguments. Raises RecipeError, EnvironmentProblemError
    or OutOfMemoryError."""
    words = "vLLM was imported before, in" if "vllm.v1.engine.llm_engine" in sys.modules else "imported vLLM in"
    import_s, began = import_vllm(settings), time.monotonic()
    with _threads_kept(), third_party_quiet():
        gc.freeze()  # vLLM collects garbage five times during startup, mostly among imported modules
        with store_in_memory(), _alone_on_its_gpu(settings):
            llm = _start(settings, **options)
    words += " %.1f s, started the engine in %.1f s"
    logging.getLogger("vllm.ppoctl").info(words, import_s, time.monotonic() - began)
    # Otherwise vLLM shuts down, and destroys all process groups, when this object is garbage-collected.
    llm.engine_core._finalizer.detach()
    return llm


def started_from_folder(settings: VllmSettings, *, witnessed: bool, **options: Any) -> Any:
    """Return what `started` returns; vLLM loads the files of `settings.model` that a trainer would read. `witnessed`:
    with a checksum of each tensor (`loader.last_read`)."""
    prepare_environment(settings)  # before the loader is imported: it imports vLLM, which reads the variables
    with third_party_quiet():
        _import_s()
        from ppoctl.engines.vllm import loader
    loader.register()
    return started(settings, load_format=loader.WITNESSED if witnessed else loader.FOLDER, **options)


def _alone_on_its_gpu(settings: VllmSettings) -> AbstractContextManager[None]:
    gpus = visible(nvml.look(), os.environ)
    # The tensor ranks of an engine start together, each on its own GPU.
    return alone_on_gpu(gpus[0].uuid) if gpus and settings.table.tensor == 1 else nullcontext()


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Context that restores the number of threads and the function `torch.set_num_threads`. vLLM replaces this
    function by a function that only warns."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)


def _start(settings: VllmSettings, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        args = EngineArgs(**{**engine_arguments(settings), **options})
        return LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        raise start_error(settings, error) from error


def start_error(settings: VllmSettings, error: Exception) -> PpoctlError:
    """Return the ppoctl error for vLLM's startup error. vLLM raises ValueError for many reasons, which only the
    message distinguishes."""
    table, text = settings.table, str(error)
    if "KV cache" in text or "for the cache blocks" in text or isinstance(error, torch.OutOfMemoryError):
        key = "gpu_memory_frac" if on_gpu() else "kv_cache_mib"
        return OutOfMemoryError(
            f"vLLM does not have enough memory for one sequence of {settings.max_model_len} tokens: {text}",
            hint=f"raise `generator.{key}` (now {getattr(table, key)}) or lower `rollout.max_new_tokens`"
            + (f", or `generator.engines_per_gpu` ({table.engines_per_gpu})" if table.engines_per_gpu > 1 else ""),
        )
    if "Free memory on device" in text:
        return OutOfMemoryError(
            f"the GPU has less free memory than vLLM's fraction of it: {text}",
            hint=f"lower `generator.gpu_memory_frac` (now {table.gpu_memory_frac}), or offload the trainers: "
            f"--set 'cluster.offload={json.dumps(settings.trained)}'",
        )
    if "Error in memory profiling" in text:
        return EnvironmentProblemError(
            f"another process took or freed memory of the GPU while vLLM measured it: {_one_line(error)}",
            hint="nvidia-smi  # start runs on one GPU one after the other",
        )
    if "max_model_len" in text:
        return too_long_a_window(settings.model, settings.max_model_len)
    if "e_score_correction_bias" in text:
        return unread_router_bias(settings.model)
    return EnvironmentProblemError(
        f"vLLM could not start with `{settings.key}` `{settings.model}`: {_one_line(error)}",
        hint=log_location(settings),
    )


def generation_error(settings: VllmSettings, error: Exception) -> Exception:
    """Return the ppoctl error for vLLM's error in a forward pass. Out-of-memory errors are returned unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return EnvironmentProblemError(
        f"vLLM failed while it computed with `{settings.key}` `{settings.model}`: {_one_line(error)}",
        hint=log_location(settings),
    )


def _one_line(error: Exception) -> str:
    """Return a library's error in one line. For an error without a message, return the file and line that raised
    it."""
    text = next(iter(str(error).splitlines()), "")
    if not text:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        text = "".join(f"no message, from {frame.filename}:{frame.lineno}" for frame in last) or "no message"
    return f"{type(error).__name__}: {text}"


@contextmanager
def third_party_quiet() -> Iterator[None]:
    """Context that silences warnings of vLLM and torch about each other while vLLM is imported and started."""
    triton = logging.getLogger("torch._library.triton")
    level = triton.level
    # The warning is "Triton not available": CPU installations do not include Triton.
    triton.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script_method` is deprecated")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
        try:
            yield
        finally:
            triton.setLevel(level)
