"""Whether the recipe fits the memory that it is to run in."""

import shutil
import subprocess

from ppoctl.model.reading import shape_if_here
from ppoctl.plan.memory.estimate import estimate, misfit
from ppoctl.recipe.schema import Recipe


def gpu_gib_here() -> float | None:
    """GiB of the smallest GPU of this machine; None where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(float(line) for line in said.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def require_fit(recipe: Recipe, gpu_gib: float | None, ray_bytes: int | None = None) -> None:
    """Raise OutOfMemoryError where a stage needs more than a GPU of `gpu_gib` GiB has, or, without one, this machine
    or all nodes of the joined Ray. A model that is not here is not judged."""
    shape = shape_if_here(recipe.model.path)
    if shape is not None and (error := misfit(estimate(recipe, shape, gpu_gib, ray_bytes))) is not None:
        raise error
