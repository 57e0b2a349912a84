"""Memory of the machines that a recipe runs on. This module connects to Ray only for a recipe that joins a running
Ray cluster."""

from ppoctl.preflight.resources import gpu_gib_here
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import Recipe


def memory_of(recipe: Recipe) -> tuple[float | None, int | None]:
    """Return the memory in GiB of the smallest GPU that the recipe may run on, and the host memory in bytes of all
    Ray nodes.

    The first value is None without a GPU; the second is None if the recipe does not join a Ray cluster. Raises
    EnvironmentProblemError if the Ray cluster does not answer.
    """
    address = recipe.cluster.ray_address
    if address is None or is_one_process(recipe):
        return gpu_gib_here(), None
    from ppoctl.engines.ray.node_memory import memory_of_nodes

    memory = memory_of_nodes(address, gpu_gib_here)
    return memory.gpu_gib, memory.host_bytes
