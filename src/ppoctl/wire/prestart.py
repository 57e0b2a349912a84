"""What is started before this process has imported what takes long: the engine of a job without Ray. Light."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppoctl.engines.child.process import prestarted
from ppoctl.engines.vllm.own_process import engine_process
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.machine import nvml
from ppoctl.machine.device import visible
from ppoctl.model.end_tokens import end_token_ids
from ppoctl.model.folder import local_folder
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import generator_window


def cpu_threads(recipe: Recipe) -> int:
    """CPU threads of this process and of the engine's: they take turns."""
    return recipe.cluster.threads or len(os.sched_getaffinity(0))


def vllm_settings(recipe: Recipe, folder: Path) -> VllmSettings:
    """What the recipe's engines are started with; `folder` has the model's files."""
    return VllmSettings(
        model=str(folder),
        dtype=recipe.model.dtype,
        max_model_len=generator_window(recipe),
        eos_token_ids=end_token_ids(folder),
        table=recipe.generator,
        sleeps="generator" in recipe.cluster.offload,
    )


@contextmanager
def prestarted_engine(recipe: Recipe) -> Iterator[None]:
    """Context in which the engine starts beside whatever this process does. Only on CPUs: on a GPU it measures what
    is free when it starts, and reward models are tried there before. Nothing is started for a model that is not
    here, which whoever reads it says."""
    folder = local_folder(recipe.model.path)
    if folder is None or not is_one_process(recipe) or visible(nvml.look(), os.environ):
        yield
        return
    with prestarted(engine_process(vllm_settings(recipe, folder), cpu_threads(recipe))):
        yield
