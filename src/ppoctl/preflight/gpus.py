"""What this machine's GPUs refuse."""

from ppoctl import nvml
from ppoctl.errors import EnvironmentProblemError
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import Recipe


def require_gpus(recipe: Recipe) -> None:
    """Raise EnvironmentProblemError where this machine's GPUs refuse the processes that the recipe starts here.

    Roles apart have a GPU each, but an engine that copies weights out of a trainer's GPU is a process there too.
    """
    cluster = recipe.cluster
    shares = cluster.weights == "shared" if cluster.placement == "apart" else not is_one_process(recipe)
    if shares and cluster.ray_address is None:
        require_shareable(nvml.look())


def require_shareable(driver: nvml.Driver | nvml.NoDriver) -> None:
    """Raise EnvironmentProblemError where a GPU may be used by one process only, or by none."""
    found = driver.gpus if isinstance(driver, nvml.Driver) else ()
    closed = {index: gpu.compute_mode for index, gpu in enumerate(found) if gpu.compute_mode != nvml.SHARED}
    if closed:
        index, mode = next(iter(closed.items()))
        raise EnvironmentProblemError(
            f"GPU {index} is in compute mode `{mode}` ({len(closed)} of {len(found)} GPUs): several processes of a "
            "run share a GPU",
            hint=f"sudo nvidia-smi -c {nvml.SHARED}",
        )
