"""Errors: one root class, and one family of classes for each kind of person or system that can act on an error.

Every error has a `hint` (one command or one change that fixes it) and the exit code of its family (see the table of
`docs/errors.md`). All errors are picklable, because they are sent between processes. Only `cli/app.py` catches
`PpoctlError` and prints it.
"""

import re
import shlex
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path

_USER = re.compile(r"(\w+)://(?=[^/\s])(\S*)@")
"""The user part of a URI, which is before the host. Some parsers read a password up to the last `@`, slashes
included."""
_QUERY = re.compile(r"([?&][^=&\s]*(?:pass|pwd|token|secret|key)[^=&\s]*=)[^&\s`'\"]+", re.IGNORECASE)


class ExitCode(IntEnum):
    """Exit codes of the commands. Signal n ends the process with 128 + n if no handler turns it into one of these
    codes."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    HEALTH = 5
    HANG = 6
    MEMORY = 7
    STORAGE = 8
    SHORT = 9
    DIFFERENT = 10
    PREEMPTED = 75
    INTERRUPTED = 130


RESUME_RUN = "ppoctl resume RUN"
"""Command in a hint of a package that does not know the run. `cli` and `run.session` replace RUN by the run."""


def quoted(value: str | Path) -> str:
    """Return the value quoted as one word of a shell command, so that a pasted hint runs nothing else."""
    return shlex.quote(str(value))


def as_typed(command: str, words: Sequence[str | Path], sets: Sequence[str]) -> str:
    """Return the command line that repeats a command which was stopped before it created a run."""
    return " ".join(["ppoctl", command, *map(quoted, words), *(f"--set {quoted(item)}" for item in sets)])


def without_secrets(text: str) -> str:
    """Return the text without the user names, passwords and tokens of its URIs."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1://", text))


def holds_secret(text: str) -> bool:
    """Whether the text contains a URI with a password or a token. A database user without a password is not a
    secret."""
    users = [(scheme, user) for scheme, user in _USER.findall(text) if ":" in user or scheme.startswith("http")]
    return bool(users) or _QUERY.search(text) is not None


class PpoctlError(Exception):
    """Root of all errors that a person, a recipe or a machine can cause.

    `message` states what failed, with the offending value in backticks and the place where the value was set. `hint`
    is one command or change that fixes it. Secrets of URIs are removed from both.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = without_secrets(message)
        self.hint = None if hint is None else without_secrets(hint)
        super().__init__(self.message)

    def as_json(self) -> dict[str, object]:
        """Return the object that `--json` prints under `error`."""
        fields = {"kind": type(self).__name__, "message": self.message, "problems": self.message.splitlines()}
        return {**fields, "hint": self.hint, "exit_code": int(self.exit_code)}

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.message, hint=self.hint), ()


class RecipeError(PpoctlError):
    """The recipe or the command line contains something that does not exist or contradicts itself."""

    exit_code = ExitCode.USAGE


class RunExistsError(RecipeError):
    """The run directory of `train` already exists; `resume` continues it."""


class EnvironmentProblemError(PpoctlError):
    """Something outside the recipe is missing: a package, a model folder, a writable directory."""

    exit_code = ExitCode.ENVIRONMENT


class MissingAssetError(EnvironmentProblemError):
    """A model folder, hub model, data file or sandbox for programs is missing on this machine.

    The asset may exist on another machine, so `validate` and `plan` only print a note.
    """


class MissingFileError(MissingAssetError):
    """A file with rows or with a function of the user, which the recipe names, is missing. `plan` prints a note;
    `validate` reports an error, because it promises to check the file."""


class ProcessLostError(EnvironmentProblemError):
    """A process of the run ended without reporting an error: it was killed, or its machine failed. Committed work is
    safe."""


class SenderLostError(ProcessLostError):
    """A trainer process that was sending weights died. The process that reports the loss is not the cause."""


class SlurmError(EnvironmentProblemError):
    """Slurm is not on this machine, does not answer, or rejects a request."""


class DataError(PpoctlError):
    """Invalid prompts or rewards: a missing or empty dataset, a bad row, a prompt that is longer than the context
    window."""

    exit_code = ExitCode.DATA


class RewardError(DataError):
    """The scorer fails more often than the recipe allows, or prefers wrong answers to gold answers."""


class ServiceLostError(RewardError):
    """A scoring service did not answer within the time that the recipe allows."""


class HealthStopError(PpoctlError):
    """A health rule with `action = "stop"` or a finite check stopped the run."""

    exit_code = ExitCode.HEALTH


class NonFiniteError(HealthStopError):
    """A reward, value, log-prob, loss or gradient is NaN or infinite. The weights are those before the update."""


class MismatchError(HealthStopError):
    """The log-probs of the sampler and the trainer differ so much that the correction masks out every token."""


class ExpectationError(HealthStopError):
    """The run finished without meeting the `[expect]` table of its recipe."""


class WeightSyncError(HealthStopError):
    """The trainer and the generator (vLLM) hold different weights: checksums, number of tensors, or log-probs of the
    canary differ.

    The error is raised before any sample is generated with the wrong weights.
    """


class ConversionError(HealthStopError):
    """A converted checkpoint differs from its source in a tensor, shape, dtype, configuration, or outputs on fixed
    prompts.

    Nothing is left at the destination.
    """


class HangError(PpoctlError):
    """A stage exceeded its deadline."""

    exit_code = ExitCode.HANG


class OutOfMemoryError(PpoctlError):
    """The host or the accelerator ran out of memory. The message names the stage and the key to lower."""

    exit_code = ExitCode.MEMORY


class StorageError(PpoctlError):
    """The run directory cannot be written or read: disk full, read-only, missing item."""

    exit_code = ExitCode.STORAGE


class CorruptArtifactError(StorageError):
    """A committed file does not match the digest in its manifest."""


class SupersededError(StorageError):
    """A newer attempt is running on the same run directory. This attempt stops before it publishes anything else."""


class RunAliveError(StorageError):
    """Another process on this host is using the run directory. Nothing was changed."""


class FinishedShortError(PpoctlError):
    """The job ended before the planned number of steps, without another error."""

    exit_code = ExitCode.SHORT


class PreemptedError(PpoctlError):
    """A termination signal arrived. All finished work is committed, and the job is safe to requeue."""

    exit_code = ExitCode.PREEMPTED


class InterruptedByUserError(PpoctlError):
    """The user pressed Ctrl-C. All finished work is committed."""

    exit_code = ExitCode.INTERRUPTED
