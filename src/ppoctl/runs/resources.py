"""Resources that this machine or a Slurm job gives to a run: nodes, GPUs and time."""

from functools import partial
from typing import Any

from ppoctl.errors import SlurmError
from ppoctl.machine.device import on_gpu
from ppoctl.recipe.parallel import devices
from ppoctl.recipe.schema import Recipe
from ppoctl.shutdown.time_left import TimeLeft
from ppoctl.slurm.allocation import allocation
from ppoctl.store.journal import Journal
from ppoctl.store.outline import Outlines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import save_s


def allotted(recipe: Recipe) -> dict[str, Any]:
    """Return fields of the journal event `attempt_started`: GPUs, and the Slurm job, if this process runs in a
    job."""
    gpus, job = {"gpus": devices(recipe) if on_gpu() else 0}, allocation()
    return gpus if job is None else {**gpus, "job": job.id, "restart": job.restarts, "nodes": job.nodes}


DRAWS = ("rollout", "greedy_rollout", "eval")
"""Stages that generate samples. Their finished samples are kept, and they may stop between two samples."""


def time_left(paths: RunPaths, outlines: Outlines, journal: Journal) -> TimeLeft:
    """Return the remaining time of the job of this process, with the times that the run's stages took so far."""
    job, ends_at = allocation(), None
    if job is not None:
        try:
            ends_at = job.ends_at
        except SlurmError:
            ends_at = None  # the container does not have Slurm's programs; Slurm's signals still arrive
    return TimeLeft(
        stage_s=journal.recent_s,
        draws=lambda stage: stage.partition(".")[0] in DRAWS,
        save_s=partial(save_s, paths, outlines.roles),
        longest_s=journal.longest_s,
        is_job=job is not None,
        ends_at=ends_at,
    )
