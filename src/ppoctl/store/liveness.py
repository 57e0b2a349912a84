"""Attempts of a run and whether one is at work: the journal, held against this host's processes. Light."""

import os
import platform
from collections.abc import Iterable
from typing import Any

import psutil

from ppoctl.errors import RunAliveError, quoted
from ppoctl.store.append import intact
from ppoctl.store.run_paths import RunPaths


def attempts(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attempts of a run, each with its `status`; one without an end runs, if its process is alive here, or was
    killed."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line.get("event") == "attempt_started":
            elsewhere = line["host"] != platform.node()
            here = "running" if _is_alive(int(line["pid"]), since=float(line["at"])) else "killed"
            found[line["attempt"]] = {
                "attempt": line["attempt"],
                "status": f"running or killed on {line['host']}" if elsewhere else here,
                "pid": line["pid"],
                "host": line["host"],
                "at": line["at"],
                **{key: line[key] for key in ("job", "restart", "nodes") if line.get(key) is not None},
            }
        elif line.get("event") == "attempt_ended" and line["attempt"] in found:
            ended = {"status": line["status"], "exit_code": line["exit_code"], "ended_at": line["at"]}
            found[line["attempt"]] |= ended
    return list(found.values())


def require_idle(paths: RunPaths, *, here: tuple[str, int] | None = None) -> None:
    """Raise RunAliveError when another process of this host is at work on the run. `here`: this process's job and how
    often that went back into the queue; what it left behind there before is in nobody's way. Nothing is known of
    other hosts. Intact lines of a damaged journal count; others say whether the damage stops the run."""
    for attempt in attempts(intact(paths.journal)):
        is_left_behind = here is not None and attempt.get("job") == here[0] and attempt.get("restart") != here[1]
        if attempt["status"] == "running" and attempt["pid"] != os.getpid() and not is_left_behind:
            raise in_use_error(paths, f"attempt {attempt['attempt']} is process {attempt['pid']} here")


def in_use_error(paths: RunPaths, who: str) -> RunAliveError:
    """The error of a run that somebody is at work on."""
    return RunAliveError(
        f"run `{paths.root}` is at work: {who}",
        hint=f"follow it: ppoctl status {quoted(paths.root)}; or stop it and go on here: "
        f"ppoctl resume {quoted(paths.root)} --take-over",
    )


def _is_alive(pid: int, *, since: float) -> bool:
    """Whether the process that was there at `since` (unix seconds) still is; a later one may have its number."""
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() <= since) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
