"""Check whether the disk has enough free space for a run."""

import shutil
from pathlib import Path

from ppoctl.errors import StorageError, quoted
from ppoctl.plan.disk import storage_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store.disk import existing, size_of
from ppoctl.units import size


def require_space(recipe: Recipe, folder: Path) -> None:
    """Raise StorageError if the disk has less free space than the run requires at one time.

    The run requires space for the kept checkpoints, one checkpoint that is being written, and the records of the
    steps since the last checkpoint. Space that the run already uses counts as free.
    """
    stored = storage_of(recipe)
    if stored.states_bytes is None:
        return
    above = existing(folder)
    free = shutil.disk_usage(above).free + size_of(folder)
    needed = stored.states_bytes + stored.records_kept_bytes
    if needed > free:
        raise StorageError(
            f"the disk of `{above}` has {size(free)} free, and the run needs {size(needed)} at one time "
            f"({size(stored.states_bytes)} of saved states, {size(stored.records_kept_bytes)} of records)",
            hint=f"free space (df -h {quoted(above)}), lower `checkpoint.keep_last`, or start anyway: --force",
        )
