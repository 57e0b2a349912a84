"""Early start of the vLLM engines of a run without Ray, before this process has finished its slow imports."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppoctl.algorithms.sizes import generator_window
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import visible
from ppoctl.engines.child.process import prestarted
from ppoctl.engines.vllm.own_process import engine_process, prepared_process
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.models.end_tokens import end_token_ids
from ppoctl.models.folder import local_folder
from ppoctl.recipe.call_format import call_format_of
from ppoctl.recipe.parallel import engine_count, is_one_process
from ppoctl.recipe.schema import Recipe


def cpu_threads(recipe: Recipe) -> int:
    """Return the number of CPU threads of this process. The engine uses the same number, because the engine and this
    process work in turn."""
    return recipe.cluster.threads or len(os.sched_getaffinity(0))


def vllm_settings(recipe: Recipe, folder: Path) -> VllmSettings:
    """Return the settings of the recipe's engines; `folder` contains the model. Raises the errors of
    `call_format_of`."""
    return VllmSettings(
        model=str(folder),
        dtype=recipe.model.dtype,
        max_model_len=generator_window(recipe),
        eos_token_ids=end_token_ids(folder),
        table=recipe.generator,
        sleeps="generator" in recipe.cluster.offload,
        trained=tuple(recipe.trained),
        returns_experts=recipe.actor.router_replay == "generator",
        call_format=call_format_of(recipe, folder),
    )


@contextmanager
def prestarted_engines(recipe: Recipe) -> Iterator[None]:
    """Context in which the engines start in parallel with the work of this process.

    On a GPU, the processes of the engines only import vLLM. A starting engine measures the free memory, and reward
    models are checked on that GPU first. If the model folder is missing, nothing is started; the code that reads the
    folder raises the error.
    """
    folder = local_folder(recipe.model.path)
    if folder is None or not is_one_process(recipe):
        yield
        return
    settings, threads = vllm_settings(recipe, folder), cpu_threads(recipe)
    # vLLM's import queries only NVML and creates no CUDA context: vLLM itself forks its workers after this import.
    process = prepared_process if visible(nvml.look(), os.environ) else engine_process
    with prestarted(*(process(settings, threads) for _ in range(engine_count(recipe.generator)))):
        yield
