"""Attempts of a run, and whether an attempt is running, from the journal and this host's processes.

Imports no torch.
"""

import os
import platform
from collections.abc import Iterable
from typing import Any

import psutil

from ppoctl.core.errors import RunAliveError, quoted
from ppoctl.store.append import intact
from ppoctl.store.run_paths import RunPaths

EARLY_END = "until"
"""Key of an attempt that ended the run before its last step: the values that ended it."""


def attempts(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the attempts of a run, each with its `status`.

    An attempt without a recorded end is running if its process is alive on this host; otherwise it was killed.
    """
    by_number: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line.get("event") == "attempt_started":
            elsewhere = line["host"] != platform.node()
            local_status = "running" if _is_alive(int(line["pid"]), since=float(line["at"])) else "killed"
            by_number[line["attempt"]] = {
                "attempt": line["attempt"],
                "status": f"running or killed on {line['host']}" if elsewhere else local_status,
                "pid": line["pid"],
                "host": line["host"],
                "at": line["at"],
                **{key: line[key] for key in ("job", "restart", "nodes") if line.get(key) is not None},
            }
        elif line.get("event") == "attempt_ended" and line["attempt"] in by_number:
            ended = {"status": line["status"], "exit_code": line["exit_code"], "ended_at": line["at"]}
            early = {EARLY_END: line[EARLY_END]} if EARLY_END in line else {}
            by_number[line["attempt"]] |= ended | early
    return list(by_number.values())


def ended_early(lines: Iterable[dict[str, Any]]) -> str | None:
    """Return the values that ended the run before its last step, from its newest attempt; None: it did not end
    early."""
    newest = attempts(lines)[-1:]
    return newest[0].get(EARLY_END) if newest else None


def require_idle(paths: RunPaths, *, here: tuple[str, int] | None = None) -> None:
    """Raise RunAliveError if another process on this host works on the run. Other hosts are not checked.

    `here` is this process's Slurm job and its number of requeues; processes of its earlier starts are ignored.
    A damaged journal is not an error: its intact lines are used, and other checks report the damage.
    """
    for attempt in attempts(intact(paths.journal)):
        is_left_behind = here is not None and attempt.get("job") == here[0] and attempt.get("restart") != here[1]
        if attempt["status"] == "running" and attempt["pid"] != os.getpid() and not is_left_behind:
            raise in_use_error(paths, f"attempt {attempt['attempt']} is process {attempt['pid']} on this host")


def in_use_error(paths: RunPaths, who: str) -> RunAliveError:
    """Return the error for a run that another process or job is using."""
    return RunAliveError(
        f"run `{paths.root}` is in use: {who}",
        hint=f"monitor it: ppoctl status {quoted(paths.root)}; or stop it and continue here: "
        f"ppoctl resume {quoted(paths.root)} --take-over",
    )


def _is_alive(pid: int, *, since: float) -> bool:
    """Return whether the process that existed at `since` (unix seconds) runs; a newer process may have its pid."""
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() <= since) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    # The process exists, and may be the attempt.
    except psutil.AccessDenied:
        return True
