"""Stop requests: a file in the run directory that a command writes and the running attempt reads.

Imports no torch.
"""

import time
from typing import Literal, get_args

from ppoctl.core.batch.sealed_json import seal, unseal
from ppoctl.store.artifact import write_atomically
from ppoctl.store.run_paths import RunPaths

After = Literal["stage", "step", "now"]
"""Work that the attempt finishes before it stops: the current stage, the current step with its evaluation, or
nothing (`now`)."""


def request_stop(paths: RunPaths, after: After) -> None:
    """Request that the newest attempt stops; a later request replaces an earlier one.

    Raises StorageError if the run directory cannot be written.
    """
    body = {"after": after, "attempt": paths.newest_attempt, "at": time.time()}
    write_atomically(paths.stop_request, seal(body, indent=1).encode("ascii"))


def stop_requested(paths: RunPaths, attempt: int) -> After | None:
    """Return the stop request for the attempt with this number; None: there is none.

    A request that cannot be read is ignored: the run continues, and the user can request the stop again.
    """
    try:
        body = unseal(paths.stop_request.read_bytes().decode("ascii"))
    except (OSError, ValueError):
        return None
    after = body.get("after")
    return after if body.get("attempt") == attempt and after in get_args(After) else None
