"""Check whether the GPUs of this machine allow several processes per GPU."""

import os
from collections.abc import Collection

from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine import nvml
from ppoctl.machine.device import visible
from ppoctl.recipe.schema import Recipe


def require_gpus(recipe: Recipe) -> None:
    """Raise EnvironmentProblemError if the compute mode of a visible GPU excludes the processes of the recipe.

    Even if each role has a separate GPU, an engine that copies weights from a trainer's GPU is a second process on
    that GPU.
    """
    cluster = recipe.cluster
    shares = cluster.placement == "colocated" or cluster.weights == "shared"
    if shares and cluster.ray_address is None:
        require_shareable(visible(nvml.look(), os.environ))


def require_shareable(gpus: Collection[nvml.Gpu]) -> None:
    """Raise EnvironmentProblemError if the compute mode of one of these GPUs allows at most one process."""
    closed = [gpu for gpu in gpus if gpu.compute_mode != nvml.SHARED]
    if closed:
        first = closed[0]
        raise EnvironmentProblemError(
            f"GPU {first.index} is in compute mode `{first.compute_mode}` ({len(closed)} of {len(gpus)} GPUs): "
            "several processes of a run share a GPU",
            hint=f"sudo nvidia-smi -c {nvml.SHARED}",
        )
