"""Does the recipe fit the memory it is to run in?"""

import shutil
import subprocess

from ppoctl.errors import OutOfMemoryError
from ppoctl.model.reading import shape_if_here
from ppoctl.recipe.memory.estimate import GIB, Memory, estimate
from ppoctl.recipe.schema import Recipe


def gpu_gib_here() -> float | None:
    """Memory of the smallest GPU of this machine; None where there is none."""
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
    """Raise OutOfMemoryError where a stage needs more than a GPU of so much memory has, or without one this machine
    or all nodes of the Ray that is joined; a model that is not here is not judged."""
    shape = shape_if_here(recipe.model.path)
    if shape is not None and (error := misfit(estimate(recipe, shape, gpu_gib, ray_bytes))) is not None:
        raise error


def misfit(memory: Memory) -> OutOfMemoryError | None:
    """What does not fit, if anything."""
    fullest = max(memory.places, key=lambda found: found.fullest.bytes)
    stage, room = fullest.fullest, fullest.place.bytes
    if room is not None and stage.bytes > room:
        largest = stage.largest[0]
        return OutOfMemoryError(
            f"stage `{stage.stage}` needs {stage.bytes / GIB:,.3g} GiB on {fullest.place.name}, which has "
            f"{room / GIB:,.3g}; most of it is {largest.name}, {largest.bytes / GIB:,.3g} GiB",
            hint=largest.lower,
        )
    if memory.generator.full_sequences == 0:
        needed = memory.generator.sequence_bytes / 2**20
        key = "generator.kv_cache_mib" if memory.device == "cpu" else "generator.gpu_memory_frac"
        return OutOfMemoryError(
            f"vLLM will not start: a sequence of full length takes {needed:,.3g} MiB, more than its cache has",
            hint=f"raise `{key}`",
        )
    return None
