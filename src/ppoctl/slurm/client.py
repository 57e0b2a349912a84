"""Slurm's programs as functions: submit, ask, signal, cancel, requeue. Every call has a deadline, because a client
blocks for as long as the controller is away; that is no answer, and says nothing about the job."""

import os
import pwd
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ppoctl.errors import SlurmError
from ppoctl.slurm.partitions import SHOWN, SINFO, Partition, partitions_in

DEADLINE_S = 15.0
"""Seconds for one of Slurm's programs to answer; its own clients give up after about ten."""

IS_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
IS_OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""Words for jobs that never come back by themselves; every other word that says nothing of waiting, also one of a
later Slurm, is a job at work: that it is over cannot be taken back."""

_UNKNOWN = "Invalid job id"
"""Slurm's words for a job that it does not know, and of `scancel --state` for one that is over."""

_OWN_SETTINGS = ("SBATCH_", "SINFO_", "SQUEUE_", "SACCT_", "SCANCEL_")
"""Beginnings of variables by which users change what these programs do and print; `SBATCH_PARTITION` would be
stronger than the script."""
SUBMIT_S = 120.0
"""Seconds that a submission may take: sbatch itself waits for a queue that is full."""


_NO_ANSWER = (
    *("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted"),
    *("Unexpected message received", "Transport endpoint", "Connection refused"),
)


class SlurmAwayError(SlurmError):
    """The controller does not answer. What it was asked is unknown, not failed."""


class SlurmAbsentError(SlurmAwayError):
    """This machine has no Slurm: not its programs, or no cluster that they speak to."""


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
        return not self.is_waiting and not self.is_over

    @property
    def is_over(self) -> bool:
        return self.state in IS_OVER


@dataclass(frozen=True)
class Slurm:
    """The cluster that this machine's Slurm programs speak to."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    deadline_s: float = DEADLINE_S

    def submit(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """Submit the script to run in `folder`; returns the job's id. `options` of sbatch come besides those that
        the script has. Raises SlurmError with Slurm's own sentence where it refuses, SlurmAwayError where nobody
        knows whether it took the job."""
        # What another job has in its environment is not for this one.
        outside = {name: value for name, value in self.environ.items() if not _is_of_a_job(name)}
        patient = replace(self, environ=outside, deadline_s=max(self.deadline_s, SUBMIT_S))
        said = patient._ask(["sbatch", "--parsable", *options], script, folder)
        # `4711` or `4711;cluster`; sites greet their users before.
        ids = [line.partition(";")[0] for line in said.split() if re.fullmatch(r"\d+(;\S+)?", line)]
        if not ids:
            raise SlurmAwayError(f"`sbatch` named no job: {_without_program(said)}", hint="squeue --me")
        return ids[-1]

    def would_accept(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """What Slurm says when it is asked whether it would take the script (`--test-only`): when it would start, and
        where. Raises SlurmError where it would not."""
        found = self._run(["sbatch", "--test-only", *options], script, folder)
        return _without_program(found.stderr or found.stdout)

    def job(self, id: str) -> SlurmJob | None:
        """The job; None: Slurm does not know of it (any more). Raises as `jobs` does."""
        return self.jobs([id]).get(id)

    def jobs(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        """Those of the jobs that Slurm knows of, by id, however many in one question: from the controller's memory,
        or else, of those that are over, from accounting where there is one. Raises SlurmAwayError."""
        known = self._from_controller(ids)
        return {**known, **self._from_accounting([id for id in ids if id not in known])}

    def cancel(self, id: str, *, waiting_only: bool = False) -> None:
        """End the job, waiting or at work; `waiting_only`: one that has begun by now goes on, and one that is over by
        now is left as it is. Raises SlurmError."""
        if not waiting_only:
            self._ask(["scancel", id])
            return
        try:
            self._ask(["scancel", "--state=PENDING", id])
        except SlurmError as error:
            if _UNKNOWN not in error.message:
                raise

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

    def partitions(self) -> list[Partition]:
        """The cluster's partitions with their nodes, hidden ones included. Raises SlurmError."""
        return partitions_in(self._ask(SINFO), self._ask(SHOWN).split())

    def configuration(self) -> dict[str, str]:
        """The controller's settings by name, as it prints them; empty where it does not tell."""
        try:
            return dict(re.findall(r"^(\w+) *= (.*)$", self._ask(["scontrol", "show", "config"]), re.M))
        except SlurmError:
            return {}

    def accounts(self) -> list[str]:
        """The accounts that whoever submits may charge; empty: accounting knows of none, or there is none."""
        try:
            user = f"user={pwd.getpwuid(os.geteuid()).pw_name}"
            words = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", user, "format=account"]
            return sorted(set(self._ask(words).split()))
        except (KeyError, SlurmError):
            return []

    def _from_controller(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        if not ids:
            return {}
        columns = "JobID:|,State:|,Reason:|,NodeList:|,RestartCnt:|,exit_code:|,StartTime:|,EndTime:|"
        try:
            told = self._ask(["squeue", "-a", "-h", "--states=all", f"--jobs={','.join(ids)}", "-O", columns])
        except SlurmAwayError:
            raise
        except SlurmError as error:
            if _UNKNOWN in error.message:  # said of a single one; among several it is passed over
                return {}
            raise
        found = (_from_squeue(line.split("|")) for line in told.splitlines())
        return {job.id: job for job in found}

    def _from_accounting(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        if not ids:
            return {}
        columns = "JobID,State,ExitCode,NodeList,Start,End"
        try:
            told = self._ask(["sacct", "-X", "-n", "-P", f"--jobs={','.join(ids)}", f"--format={columns}"])
        except SlurmError:  # most often there is none
            return {}
        found = (line.split("|") for line in told.splitlines())
        # "CANCELLED by 1000". A job that the controller forgot and accounting believes at work is there no more.
        return {
            id: SlurmJob(id, state.split()[0], "", nodes, 0, exit_code, _seconds(start), _seconds(end))
            for id, state, exit_code, nodes, start, end in found
            if state.split()[0] in IS_OVER
        }

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
                env=self._settings(),
                timeout=self.deadline_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise _absent(f"no `{words[0]}` here") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"`{words[0]}` gave no answer within {self.deadline_s:g} s", hint="sinfo") from error
        if done.returncode:
            says = _without_program(done.stderr or done.stdout)
            if "configuration source" in says:
                raise _absent(f"`{words[0]}` knows of no cluster")
            if any(words in says for words in _NO_ANSWER):
                raise SlurmAwayError(f"Slurm's controller does not answer: {says}", hint="scontrol ping")
            raise SlurmError(f"`{words[0]}` refused: {says}", hint="sinfo")
        return done

    def _settings(self) -> dict[str, str]:
        kept = {name: value for name, value in self.environ.items() if not name.startswith(_OWN_SETTINGS)}
        return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def _is_of_a_job(name: str) -> bool:
    return name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS")


def _absent(why: str) -> SlurmAbsentError:
    return SlurmAbsentError(
        f"{why}: this machine has no Slurm",
        hint="run the command on a login node of the cluster, or without `--on slurm`",
    )


def _without_program(text: str) -> str:
    """Slurm's sentences on one line, without the names of its programs."""
    lines = [re.sub(r"^(s\w+: )?(error: )?", "", line).strip() for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line)


def _from_squeue(values: Sequence[str]) -> SlurmJob:
    id, state, reason, nodes, restarts, status, start, end, *_ = values
    # Of processes: the code above, the signal in the lowest bits.
    code = f"{int(status) >> 8}:{int(status) & 127}" if status.isdigit() else status
    told = "" if reason == "None" else reason
    return SlurmJob(id, state, told, nodes, int(restarts), code, _seconds(start), _seconds(end))


def _seconds(text: str) -> float | None:
    """Unix seconds of a time as Slurm writes it; None where it is none (`Unknown`, `N/A`)."""
    if text.isdigit():
        return float(text)
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except ValueError:
        return None
