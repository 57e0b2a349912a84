"""A request to stop, left in the run directory by whoever may write there, and found by the attempt that it is for.
Light."""

import time
from typing import Literal, get_args

from ppoctl.batch.sealed_json import seal, unseal
from ppoctl.store.artifact import write_atomically
from ppoctl.store.run_paths import RunPaths

After = Literal["stage", "step", "now"]
"""What the attempt may still finish: its present stage, its present step with all that belongs to it, or nothing."""


def request_stop(paths: RunPaths, after: After) -> None:
    """Ask the newest attempt to stop; a later request replaces an earlier one. Raises StorageError where the run
    directory cannot be written."""
    body = {"after": after, "attempt": paths.newest_attempt, "at": time.time()}
    write_atomically(paths.stop_request, seal(body, indent=1).encode("ascii"))


def stop_requested(paths: RunPaths, attempt: int) -> After | None:
    """What is asked of the attempt with this number; None: nothing. A request to another attempt is none, and neither
    is one that cannot be read: work goes on, and whoever asked can ask again."""
    try:
        body = unseal(paths.stop_request.read_bytes().decode("ascii"))
    except (OSError, ValueError):
        return None
    after = body.get("after")
    return after if body.get("attempt") == attempt and after in get_args(After) else None
