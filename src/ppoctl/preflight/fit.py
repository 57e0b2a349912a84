"""Whether the recipe fits the memory that it is to run in."""

from ppoctl.machine import nvml
from ppoctl.plan.memory.estimate import estimate_here, misfit
from ppoctl.recipe.schema import Recipe


def gpu_gib_here() -> float | None:
    """GiB of the smallest GPU of this machine; None where there is none."""
    found = nvml.look()
    sizes = [gpu.memory_bytes for gpu in found.gpus if gpu.memory_bytes] if isinstance(found, nvml.Driver) else []
    return min(sizes, default=0) / 2**30 or None


def require_fit(recipe: Recipe, gpu_gib: float | None, ray_bytes: int | None = None) -> None:
    """Raise OutOfMemoryError where a stage needs more than a GPU of `gpu_gib` GiB has, or, without one, this machine
    or all nodes of the joined Ray. A model that is not here is not judged."""
    memory = estimate_here(recipe, gpu_gib, ray_bytes)
    if memory is not None and (error := misfit(memory)) is not None:
        raise error
