"""Slurm's programs as functions: submit, ask, signal, cancel, requeue. Every call has a deadline, because a client
blocks for as long as the controller is away; that is no answer, and says nothing about the job."""

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ppoctl.errors import SlurmError

DEADLINE_S = 15.0
"""Seconds for one of Slurm's programs to answer; its own clients give up after about ten."""

IS_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})
IS_AT_WORK = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "RESIZING"})


class SlurmAwayError(SlurmError):
    """The controller does not answer. What it was asked is unknown, not failed."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm tells of it."""

    id: str
    state: str
    """Slurm's word, such as `PENDING`, `RUNNING`, `TIMEOUT`."""
    reason: str = ""
    """Why it waits or ended, such as `Resources`; empty: nothing is said."""
    nodes: str = ""
    """Slurm's list of its nodes, such as `node[1-2]`; empty: none yet."""
    restarts: int = 0
    """How often it went back into the queue."""
    exit_code: str = ""
    """Exit code and signal of the script, `7:0`; empty: not told."""
    starts_at: float | None = None
    """Start, also an expected one, in unix seconds; None: not known."""
    ends_at: float | None = None
    """End, for a running job its time limit, in unix seconds; None: not known, or without a limit."""

    @property
    def is_waiting(self) -> bool:
        return self.state in IS_WAITING

    @property
    def is_at_work(self) -> bool:
        return self.state in IS_AT_WORK

    @property
    def is_over(self) -> bool:
        return not self.is_waiting and not self.is_at_work


@dataclass(frozen=True)
class Slurm:
    """The cluster that this machine's Slurm programs speak to."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    deadline_s: float = DEADLINE_S

    def submit(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """Submit the script to run in `folder`; returns the job's id. `options` of sbatch come besides those that
        the script has. Raises SlurmError with Slurm's own sentence where it refuses."""
        return self._ask(["sbatch", "--parsable", *options], script, folder).strip().split(";")[0]

    def would_accept(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """What Slurm says when it is asked whether it would take the script (`--test-only`): when it would start, and
        where. Raises SlurmError where it would not."""
        found = self._run(["sbatch", "--test-only", *options], script, folder)
        return _without_program(found.stderr or found.stdout)

    def job(self, id: str) -> SlurmJob | None:
        """The job, from the controller's memory, or else from accounting where there is one; None: neither knows of
        it (any more). Raises SlurmAwayError."""
        try:
            return _from_scontrol(self._ask(["scontrol", "-o", "show", "job", id]))
        except SlurmAwayError:
            raise
        except SlurmError:
            return self._from_accounting(id)

    def cancel(self, id: str) -> None:
        """End the job, waiting or at work. Raises SlurmError."""
        self._ask(["scancel", id])

    def signal(self, id: str, name: str) -> None:
        """Send a signal to the job's script alone. Raises SlurmError."""
        self._ask(["scancel", "--batch", f"--signal={name}", id])

    def requeue(self, id: str) -> None:
        """Put a job at work back into the queue, which ends what it does now. Raises SlurmError."""
        self._ask(["scontrol", "requeue", id])

    def hosts(self, nodes: str) -> list[str]:
        """Names of the nodes in Slurm's list `node[1-2]`. Raises SlurmError."""
        return self._ask(["scontrol", "show", "hostnames", nodes]).split()

    def addresses(self, nodes: str) -> dict[str, str]:
        """Address at which Slurm reaches each node in its list `node[1-2]`, in the order of the list. Raises
        SlurmError."""
        found = re.findall(
            r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", self._ask(["scontrol", "-o", "show", "node", nodes]), re.M
        )
        by_name = dict(found)
        return {name: by_name[name] for name in self.hosts(nodes)}

    def _from_accounting(self, id: str) -> SlurmJob | None:
        columns = "JobID,State,ExitCode,NodeList,Restarts"
        try:
            told = self._ask(["sacct", "-X", "-n", "-P", "-j", id, f"--format={columns}"])
        except SlurmError:
            return None
        for line in told.splitlines():
            found, state, exit_code, nodes, restarts = (*line.split("|"), "")[:5]
            if found == id:
                # "CANCELLED by 1000"
                return SlurmJob(id, state.split()[0], "", nodes, int(restarts or 0), exit_code)
        return None

    def _ask(self, words: Sequence[str], text: str | None = None, folder: Path | None = None) -> str:
        return self._run(words, text, folder).stdout

    def _run(
        self, words: Sequence[str], text: str | None = None, folder: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        try:
            done = subprocess.run(
                words,
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                capture_output=True,
                encoding="utf-8",
                errors="backslashreplace",
                cwd=folder,
                env={**self.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"},
                timeout=self.deadline_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise SlurmError(
                f"no `{words[0]}` here: this machine has no Slurm",
                hint="run the command on a login node of the cluster, or without `--on slurm`",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"`{words[0]}` gave no answer within {self.deadline_s:g} s", hint="sinfo") from error
        if done.returncode:
            says = _without_program(done.stderr or done.stdout)
            if "Unable to contact slurm controller" in says or "Socket timed out" in says:
                raise SlurmAwayError(f"Slurm's controller does not answer: {says}", hint="scontrol ping")
            raise SlurmError(f"`{words[0]}` refused: {says}", hint="sinfo")
        return done


def _without_program(text: str) -> str:
    """Slurm's sentences on one line, without the names of its programs."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line)


def _from_scontrol(text: str) -> SlurmJob | None:
    words = (word.partition("=") for word in text.split())
    found: dict[str, str] = {}
    for key, _, value in words:
        found.setdefault(key, value)  # what a user wrote (`Comment=`) comes last
    if "JobId" not in found:
        return None
    return SlurmJob(
        id=found["JobId"],
        state=found["JobState"],
        reason=found["Reason"].replace("None", ""),
        nodes=found.get("NodeList", "").replace("(null)", ""),
        restarts=int(found.get("Restarts", 0)),
        exit_code=found.get("ExitCode", ""),
        starts_at=_seconds(found.get("StartTime", "")),
        ends_at=_seconds(found.get("EndTime", "")),
    )


def _seconds(text: str) -> float | None:
    """Unix seconds of a time as Slurm writes it; None where it is none (`Unknown`, `N/A`)."""
    if text.isdigit():
        return float(text)
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except ValueError:
        return None
