"""Slurm's programs as functions: submit, query, signal, cancel, requeue.

Every call has a deadline, because a client blocks while the controller is unreachable. A timeout is not an answer:
the state of the job is then unknown.
"""

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ppoctl.core.errors import SlurmError
from ppoctl.start.slurm.partitions import SHOWN, SINFO, Partition, partitions_in

DEADLINE_S = 15.0
"""Seconds that a Slurm program may take to answer; Slurm's clients give up after about ten."""

IS_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
IS_OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States of jobs that have ended and never run again by themselves.

A job in any other state, including states of later versions of Slurm, is considered running. If a running job were
considered ended, ppoctl could not correct this later.
"""

_UNKNOWN = "Invalid job id"
"""Slurm's message for an unknown job. `scancel` also prints it for a job that has ended."""

_NO_MESSAGE = "no message"
"""Our words for a refusal without Slurm's own: `scancel --signal` fails so while the job is completing."""

_OWN_SETTINGS = ("SBATCH_", "SINFO_", "SQUEUE_", "SACCT_", "SCANCEL_")
"""Prefixes of environment variables that change what Slurm's programs do and print. The variables are
removed, because `SBATCH_PARTITION`, for example, would override the script."""
SUBMIT_S = 120.0
"""Seconds that a submission may take: sbatch itself waits if the queue is full."""


_NO_ANSWER = (
    *("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted"),
    *("Unexpected message received", "Transport endpoint", "Connection refused"),
)


class SlurmAwayError(SlurmError):
    """Slurm's controller does not answer, so it is unknown whether the call had an effect."""


class SlurmAbsentError(SlurmAwayError):
    """This machine has no Slurm: Slurm's programs are not installed, or no cluster is configured."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm reports it."""

    id: str
    state: str
    """Slurm's state, such as `PENDING`, `RUNNING`, `TIMEOUT`."""
    reason: str = ""
    """Reason why the job waits or ended, such as `Resources`; empty: not reported."""
    nodes: str = ""
    """Slurm's list of the job's nodes, such as `node[1-2]`; empty: the job has no nodes yet."""
    restarts: int = 0
    """Number of requeues."""
    exit_code: str = ""
    """Exit code and signal of the script, such as `7:0`; empty: not reported."""
    starts_at: float | None = None
    """Start time or expected start time, in unix seconds; None: not known."""
    ends_at: float | None = None
    """End time (for a running job: when its time limit ends), in unix seconds; None: not known, or no limit."""

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
    """The cluster that this machine's Slurm programs use."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    deadline_s: float = DEADLINE_S

    def submit(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """Submit the script to run in `folder`, and return the job's id.

        `options` are options of sbatch in addition to those in the script. Raises SlurmError with Slurm's message if
        it refuses the job; SlurmAwayError if it is unknown whether Slurm accepted the job.
        """
        # A submission from within a job must not pass on that job's SLURM_ variables.
        outside = {name: value for name, value in self.environ.items() if not _is_of_a_job(name)}
        patient = replace(self, environ=outside, deadline_s=max(self.deadline_s, SUBMIT_S))
        output = patient._output(["sbatch", "--parsable", *options], script, folder)
        # `4711` or `4711;cluster`; some sites print a greeting before it.
        ids = [line.partition(";")[0] for line in output.split() if re.fullmatch(r"\d+(;\S+)?", line)]
        if not ids:
            raise SlurmAwayError(f"`sbatch` printed no job id: {_without_program(output)}", hint="squeue --me")
        return ids[-1]

    def would_accept(self, script: str, *, folder: Path, options: Sequence[str] = ()) -> str:
        """Return Slurm's answer to `sbatch --test-only`: when and where it would start the script.

        Raises SlurmError if Slurm would refuse it.
        """
        answer = self._run(["sbatch", "--test-only", *options], script, folder)
        return _without_program(answer.stderr or answer.stdout)

    def job(self, id: str) -> SlurmJob | None:
        """Return the job; None: Slurm does not know the job, or no longer knows it. Raises SlurmAwayError."""
        return self.jobs([id]).get(id)

    def jobs(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        """Return the jobs that Slurm knows, by id. All ids are queried in one call.

        The controller is queried, and accounting, if the cluster has it, for jobs that have ended. Raises
        SlurmAwayError.
        """
        known = self._from_controller(ids)
        return {**known, **self._from_accounting([id for id in ids if id not in known])}

    def cancel(self, id: str, *, waiting_only: bool = False) -> None:
        """Cancel the job, waiting or running. Raises SlurmError.

        `waiting_only`: do nothing if the job has started or ended in the meantime.
        """
        if waiting_only:
            self._reaches(id, "--state=PENDING")
        else:
            self._output(["scancel", id])

    def signal(self, id: str, name: str) -> bool:
        """Send a signal to the job's script only, and return whether Slurm sent it: not to a job that has ended or
        is ending. Raises SlurmError."""
        return self._reaches(id, "--batch", f"--signal={name}")

    def requeue(self, id: str) -> None:
        """Requeue a running job, which stops its processes. Raises SlurmError."""
        self._output(["scontrol", "requeue", id])

    def hosts(self, nodes: str) -> list[str]:
        """Return the names of the nodes in one of Slurm's lists, such as `node[1-2]`. Raises SlurmError."""
        return self._output(["scontrol", "show", "hostnames", nodes]).split()

    def addresses(self, nodes: str) -> dict[str, str]:
        """Return the address at which Slurm reaches each node of a list such as `node[1-2]`, in the list's order.

        Raises SlurmError.
        """
        pairs = re.findall(
            r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", self._output(["scontrol", "-o", "show", "node", nodes]), re.M
        )
        by_name = dict(pairs)
        return {name: by_name[name] for name in self.hosts(nodes)}

    def partitions(self) -> list[Partition]:
        """Return the cluster's partitions with their nodes, including hidden ones. Raises SlurmError."""
        return partitions_in(self._output(SINFO), self._output(SHOWN).split())

    def _from_controller(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        if not ids:
            return {}
        columns = "JobID:|,State:|,Reason:|,NodeList:|,RestartCnt:|,exit_code:|,StartTime:|,EndTime:|"
        try:
            output = self._output(["squeue", "-a", "-h", "--states=all", f"--jobs={','.join(ids)}", "-O", columns])
        except SlurmAwayError:
            raise
        except SlurmError as error:
            if _UNKNOWN in error.message:  # squeue reports an unknown id only if it is the only one queried
                return {}
            raise
        jobs = (_from_squeue(line.split("|")) for line in output.splitlines())
        return {job.id: job for job in jobs}

    def _from_accounting(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        if not ids:
            return {}
        columns = "JobID,State,ExitCode,NodeList,Start,End"
        try:
            output = self._output(["sacct", "-X", "-n", "-P", f"--jobs={','.join(ids)}", f"--format={columns}"])
        except SlurmError:  # if accounting does not answer, the cluster usually has none
            return {}
        rows = (line.split("|") for line in output.splitlines())
        # The state may be "CANCELLED by 1000". A job that the controller no longer knows but accounting reports as
        # running has ended, so only final states are used.
        return {
            id: SlurmJob(id, state.split()[0], "", nodes, 0, exit_code, _seconds(start), _seconds(end))
            for id, state, exit_code, nodes, start, end in rows
            if state.split()[0] in IS_OVER
        }

    def _reaches(self, id: str, *options: str) -> bool:
        """Run `scancel`; return False if the job has ended or is ending. Raises SlurmError for other refusals."""
        try:
            self._output(["scancel", *options, id])
        except SlurmError as error:
            if _UNKNOWN in error.message or _NO_MESSAGE in error.message:
                return False
            raise
        return True

    def _output(self, words: Sequence[str], text: str | None = None, folder: Path | None = None) -> str:
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
            raise _absent(f"`{words[0]}` is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"`{words[0]}` did not answer within {self.deadline_s:g} s", hint="sinfo") from error
        if done.returncode:
            message = _without_program(done.stderr or done.stdout)
            if "configuration source" in message:
                raise _absent(f"`{words[0]}` has no cluster configured")
            if any(words in message for words in _NO_ANSWER):
                raise SlurmAwayError(f"Slurm's controller does not answer: {message}", hint="scontrol ping")
            message = message or f"{_NO_MESSAGE}, exit code {done.returncode}"
            raise SlurmError(f"`{words[0]}` refused: {message}", hint="sinfo")
        return done

    def _settings(self) -> dict[str, str]:
        kept = {name: value for name, value in self.environ.items() if not name.startswith(_OWN_SETTINGS)}
        # By default Slurm's programs print times in the local time zone, without an offset.
        return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def _is_of_a_job(name: str) -> bool:
    return name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS")


def _absent(why: str) -> SlurmAbsentError:
    return SlurmAbsentError(
        f"{why}: this machine has no Slurm",
        hint="run the command on a login node of the cluster, or without `--on slurm`",
    )


def _without_program(text: str) -> str:
    """Return Slurm's message on one line, without the names of its programs."""
    words = re.compile(r"^(s\w+: )?(error: |allocation failure: )?")
    lines = [words.sub("", line).strip() for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line)


def _from_squeue(values: Sequence[str]) -> SlurmJob:
    id, state, reason, nodes, restarts, status, start, end, *_ = values
    # A wait status: the exit code in the upper bits, the signal in the lower seven.
    code = f"{int(status) >> 8}:{int(status) & 127}" if status.isdigit() else status
    known_reason = "" if reason == "None" else reason
    return SlurmJob(id, state, known_reason, nodes, int(restarts), code, _seconds(start), _seconds(end))


def _seconds(text: str) -> float | None:
    """Return the unix seconds of a time as Slurm prints it; None if it is not a time (`Unknown`, `N/A`)."""
    if text.isdigit():
        return float(text)
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except ValueError:
        return None
