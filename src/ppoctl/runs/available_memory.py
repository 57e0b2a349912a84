"""What memory a recipe would find where it runs. Light, but for a recipe that joins a running Ray."""

from ppoctl.preflight.fit import gpu_gib_here
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import Recipe


def memory_of(recipe: Recipe) -> tuple[float | None, int | None]:
    """GiB of the smallest GPU that the recipe may run on, None where there is none; and bytes of host memory of all
    nodes, where it joins a Ray. Raises EnvironmentProblemError when that Ray does not answer."""
    address = recipe.cluster.ray_address
    if address is None or is_one_process(recipe):
        return gpu_gib_here(), None
    from ppoctl.engines.ray.node_memory import memory_of_nodes

    found = memory_of_nodes(address, gpu_gib_here)
    return found.gpu_gib, found.host_bytes
