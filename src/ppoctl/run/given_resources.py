"""Resources that this machine or a Slurm job gives to a run: nodes, GPUs and time; and errors of an attempt that ran
out of memory or disk space, with the stage, the free space, and the key or command that helps."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppoctl.algorithms.choose import generating_stages
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import microbatch_limit
from ppoctl.core.errors import OutOfMemoryError, SlurmError, StorageError, quoted
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.units import size
from ppoctl.plan.disk_space import storage_of
from ppoctl.recipe.parallel import devices
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import RunContext
from ppoctl.run.shutdown.time_left import TimeLeft
from ppoctl.start.slurm.allocation import allocation
from ppoctl.store.disk_errors import READ_ONLY, free_bytes
from ppoctl.store.jobs import resume_command
from ppoctl.store.outline import Outline, OutlineEntry
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import save_s


def allotted(recipe: Recipe) -> dict[str, Any]:
    """Return fields of the journal event `attempt_started`: GPUs, and the Slurm job, if this process runs in a
    job."""
    gpus, job = {"gpus": devices(recipe) if on_gpu() else 0}, allocation()
    return gpus if job is None else {**gpus, "job": job.id, "restart": job.restarts, "nodes": job.nodes}


def time_left(run: RunContext) -> TimeLeft:
    """Return the remaining time of the job of this process, with the times that the run's stages took so far."""
    job, ends_at, generating = allocation(), None, generating_stages(run.recipe)
    if job is not None:
        try:
            ends_at = job.ends_at
        except SlurmError:
            ends_at = None  # the container does not have Slurm's programs; Slurm's signals still arrive
    return TimeLeft(
        stage_s=run.journal.recent_s,
        draws=lambda stage: stage.partition(".")[0] in generating,
        save_s=partial(save_s, run.paths, run.outlines.roles),
        longest_s=run.journal.longest_s,
        is_job=job is not None,
        ends_at=ends_at,
    )


_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""Messages of the operating system; torch and Megatron-Core pass on only the text."""


def out_of_memory(
    root: Path, recipe: Recipe, outline: Outline, at: tuple[int, str], error: BaseException
) -> OutOfMemoryError:
    """Return the error for a library's out-of-memory error in the stage `at` (step and name) of the run in `root`."""
    step, name = at
    # A stage that is not in the outline is the startup or an evaluation. Both load the policy into the generator
    # (vLLM).
    stage = outline[name] if name in outline.names else OutlineEntry(name, (POLICY, "prompts"))
    reason = next(iter(str(error).splitlines()), "") or "the host has no more memory"
    smaller = _smaller(recipe, outline, stage, on_device=isinstance(error, torch.OutOfMemoryError))
    again = resume_command(root)
    return OutOfMemoryError(
        f"out of memory in stage `{name}` of step {step}: {reason}",
        hint=f"{again}  # everything before it is committed; first stop other programs that use this machine's memory"
        if smaller is None
        else f"{again} --set {quoted(smaller)}  # everything before it is committed, and results do not change",
    )


def _smaller(recipe: Recipe, outline: Outline, stage: OutlineEntry, *, on_device: bool) -> str | None:
    """Return a setting that halves the memory that the stage may use; None: no key bounds this memory."""
    roles = [read for read in stage.reads if read in outline.roles]
    if not roles:
        return None
    if "prompts" in stage.reads:
        table = recipe.generator
        if on_device:
            return f"generator.gpu_memory_frac={table.gpu_memory_frac / 2:g}"
        return f"generator.kv_cache_mib={max(table.kv_cache_mib // 2, 1)}"
    role = stage.trains or roles[0]
    key, limit = microbatch_limit(recipe.trained[role].batching, with_gradient=stage.trains is not None)
    return f"{role}.batching.{key}={max(limit // 2, 1)}"


def add_what_to_do(error: StorageError, paths: RunPaths, recipe: Recipe) -> None:
    """Add free space, required space and a hint to an error about a full disk, and a hint to one about a read-only
    disk.

    The required space is an estimate for the records of a step and the next saved states, as in `plan`.
    """
    if READ_ONLY in error.message:
        error.hint = f"findmnt -T {quoted(paths.root)}  # mount it read-write, then: {resume_command(paths.root)}"
    if not any(text in error.message for text in _FULL):
        return
    stored = storage_of(recipe)
    needed = f"{size(stored.records_bytes)} for the records of a step"
    if stored.state_bytes:
        needed += f", {size(sum(stored.state_bytes.values()))} for the next saved states"
    error.message += f"\n  {size(free_bytes(paths.root))} are free on this disk; the run needs about {needed}"
    error.hint = error.hint or f"nothing committed is lost; free disk space, then resume: df -h {quoted(paths.root)}"
