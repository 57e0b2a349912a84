"""Errors of an attempt that ran out of memory or disk: the stage, what is free, and the key or command that helps."""

import errno
import os
from pathlib import Path

import torch

from ppoctl.errors import OutOfMemoryError, StorageError, quoted
from ppoctl.plan.disk import storage_of
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import microbatch_limit
from ppoctl.store.disk import READ_ONLY, free_bytes
from ppoctl.store.jobs import resume_command
from ppoctl.store.outline import Outline, OutlineEntry
from ppoctl.store.run_paths import RunPaths
from ppoctl.units import size

_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""How the system says it; torch and Megatron-Core pass on the words alone."""


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


def add_what_to_do(error: StorageError, paths: RunPaths, recipe: Recipe) -> None:
    """Where the error is of a full disk, let it say what is free there, what the records of a step and the next pair
    of states take, and what to do (estimates: `plan` has them too). Where the disk is read-only, let the hint have
    the command that continues."""
    if READ_ONLY in error.message:
        error.hint = f"findmnt -T {quoted(paths.root)}  # mount it read-write, then: {resume_command(paths.root)}"
    if not any(words in error.message for words in _FULL):
        return
    stored = storage_of(recipe)
    needed = f"{size(stored.records_bytes)} for the records of a step"
    if stored.state_bytes:
        needed += f", {size(sum(stored.state_bytes.values()))} for the next saved states"
    error.message += f"\n  {size(free_bytes(paths.root))} are free there; the run needs about {needed}"
    error.hint = error.hint or f"nothing committed is lost; make room, then resume: df -h {quoted(paths.root)}"
