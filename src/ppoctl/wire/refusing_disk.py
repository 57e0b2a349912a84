"""What an attempt that a full or a read-only disk ended says besides: what the run still needs there, and the command
that continues."""

import errno
import os

from ppoctl.errors import StorageError, quoted
from ppoctl.plan.disk import storage_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store.disk import READ_ONLY, free_bytes
from ppoctl.store.jobs import resume_command
from ppoctl.store.layout import RunPaths
from ppoctl.units import size

_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""How the system says it; torch and Megatron-Core pass on the words alone."""


def add_what_to_do(error: StorageError, layout: RunPaths, recipe: Recipe) -> None:
    """Where the error is of a full disk, let it say what is free there, what the records of a step and the next pair
    of states take, and what to do (estimates: `plan` has them too). Where the disk is read-only, let the hint have
    the command that continues."""
    if READ_ONLY in error.message:
        error.hint = f"findmnt -T {quoted(layout.root)}  # mount it read-write, then: {resume_command(layout.root)}"
    if not any(words in error.message for words in _FULL):
        return
    stored = storage_of(recipe)
    needed = f"{size(stored.records_bytes)} for the records of a step"
    if stored.state_bytes:
        needed += f", {size(sum(stored.state_bytes.values()))} for the next saved states"
    error.message += f"\n  {size(free_bytes(layout.root))} are free there; the run needs about {needed}"
    error.hint = error.hint or f"nothing committed is lost; make room, then resume: df -h {quoted(layout.root)}"
