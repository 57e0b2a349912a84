"""The error of an attempt that ran out of memory: which stage it was, and the key that makes it smaller."""

from pathlib import Path

import torch

from ppoctl.errors import OutOfMemoryError, quoted
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import microbatch_limit
from ppoctl.store.jobs import resume_command
from ppoctl.store.outline import Outline, OutlineEntry


def out_of_memory(
    root: Path, recipe: Recipe, told: Outline, at: tuple[int, str], error: BaseException
) -> OutOfMemoryError:
    """The named error for what a library said in a stage, given as its step and name, of a run in `root`."""
    step, name = at
    # Whatever the story does not tell is a start or an evaluation: both bring the generator to a state.
    stage = told[name] if name in told.names else OutlineEntry(name, ("actor", "prompts"))
    words = next(iter(str(error).splitlines()), "") or "the host has no more"
    smaller = _smaller(recipe, told, stage, on_device=isinstance(error, torch.OutOfMemoryError))
    again = resume_command(root)
    return OutOfMemoryError(
        f"out of memory in stage `{name}` of step {step}: {words}",
        hint=f"{again}  # all before it is committed; first end what else takes this machine's memory"
        if smaller is None
        else f"{again} --set {quoted(smaller)}  # all before it is committed, and results do not change",
    )


def _smaller(recipe: Recipe, told: Outline, stage: OutlineEntry, *, on_device: bool) -> str | None:
    """A setting with half of what the stage may take; None: no key bounds it."""
    roles = [read for read in stage.reads if read in told.roles]
    if not roles:
        return None
    if "prompts" in stage.reads:
        table = recipe.generator
        if on_device:
            return f"generator.gpu_memory_frac={table.gpu_memory_frac / 2:g}"
        return f"generator.kv_cache_mib={max(table.kv_cache_mib // 2, 1)}"
    role = stage.trains or roles[0]
    key, most = microbatch_limit(getattr(recipe, role).batching, with_gradient=stage.trains is not None)
    return f"{role}.batching.{key}={max(most // 2, 1)}"
