"""What this machine's GPUs refuse."""

import os
from collections.abc import Collection

from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine import nvml
from ppoctl.machine.device import visible
from ppoctl.recipe.schema import Recipe


def require_gpus(recipe: Recipe) -> None:
    """Raise EnvironmentProblemError where a GPU that this process may use refuses the processes that the recipe
    starts here.

    Roles apart have a GPU each, but an engine that copies weights out of a trainer's GPU is a process there too.
    """
    cluster = recipe.cluster
    shares = cluster.placement == "colocated" or cluster.weights == "shared"
    if shares and cluster.ray_address is None:
        require_shareable(visible(nvml.look(), os.environ))


def require_shareable(gpus: Collection[nvml.Gpu]) -> None:
    """Raise EnvironmentProblemError where one of these GPUs may be used by one process only, or by none."""
    closed = [gpu for gpu in gpus if gpu.compute_mode != nvml.SHARED]
    if closed:
        first = closed[0]
        raise EnvironmentProblemError(
            f"GPU {first.index} is in compute mode `{first.compute_mode}` ({len(closed)} of {len(gpus)} GPUs): "
            "several processes of a run share a GPU",
            hint=f"sudo nvidia-smi -c {nvml.SHARED}",
        )
