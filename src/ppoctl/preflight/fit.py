"""Check whether a recipe fits in memory."""

from ppoctl.machine import nvml
from ppoctl.plan.memory.estimate import estimate_here, misfit
from ppoctl.recipe.schema import Recipe


def gpu_gib_here() -> float | None:
    """Return the memory of the smallest GPU of this machine, in GiB; None if there is no GPU."""
    found = nvml.look()
    sizes = [gpu.memory_bytes for gpu in found.gpus if gpu.memory_bytes] if isinstance(found, nvml.Driver) else []
    return min(sizes, default=0) / 2**30 or None


def require_fit(recipe: Recipe, gpu_gib: float | None, ray_bytes: int | None = None) -> None:
    """Raise OutOfMemoryError if a stage needs more memory than is available.

    Available is the memory of a GPU of `gpu_gib` GiB. If `gpu_gib` is None, it is the memory of this machine, or of
    all nodes of the joined Ray cluster (`ray_bytes`). A model that is not on this machine is not checked.
    """
    memory = estimate_here(recipe, gpu_gib, ray_bytes)
    if memory is not None and (error := misfit(memory)) is not None:
        raise error
