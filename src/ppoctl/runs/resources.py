"""What a run is given to work with, by this machine or by a job of Slurm: nodes, GPUs, and time."""

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
    """Fields of the journal's line about the start of an attempt: GPUs, and the job where there is one."""
    gpus, found = {"gpus": devices(recipe) if on_gpu() else 0}, allocation()
    return gpus if found is None else {**gpus, "job": found.id, "restart": found.restarts, "nodes": found.nodes}


DRAWS = ("rollout", "eval")
"""Stages that draw: finished samples of these are kept, and they stop between two of them."""


def time_left(paths: RunPaths, outlines: Outlines, journal: Journal) -> TimeLeft:
    """The time of the job that this process runs in, and how long the work of the run has taken so far."""
    found, ends_at = allocation(), None
    if found is not None:
        try:
            ends_at = found.ends_at
        except SlurmError:
            ends_at = None  # a container without Slurm's programs; its signals come all the same
    return TimeLeft(
        stage_s=journal.recent_s,
        draws=lambda stage: stage.partition(".")[0] in DRAWS,
        save_s=partial(save_s, paths, outlines.roles),
        longest_s=journal.longest_s,
        is_job=found is not None,
        ends_at=ends_at,
    )
