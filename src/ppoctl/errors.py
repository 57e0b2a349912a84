"""What can go wrong, and what to do about it.

One root class; families by who can act on them. Every error carries `hint`, one command or one change that mends
it, and the exit code of its family (the table of `docs/errors.md`). All are picklable: they cross processes.
`cli/app.py` is the only place that catches `PpoctlError` and prints it.
"""

import re
import shlex
from enum import IntEnum
from functools import partial
from pathlib import Path

_USER = re.compile(r"(\w+)://(?=[^/\s])(\S*)@")
"""Part of a URI before its host, the user. Some readers take a password up to the last `@`, slashes included."""
_QUERY = re.compile(r"([?&][^=&\s]*(?:pass|pwd|token|secret|key)[^=&\s]*=)[^&\s`'\"]+", re.IGNORECASE)


class ExitCode(IntEnum):
    """What the shell sees. Signals that are not turned into one of these end as 128 + n."""

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


def quoted(value: str | Path) -> str:
    """A word of a command in a hint, as a shell has to be given it: what is pasted runs nothing else."""
    return shlex.quote(str(value))


def without_secrets(text: str) -> str:
    """The text without user names, passwords and tokens in its URIs."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1://", text))


def holds_secret(text: str) -> bool:
    """Whether the text is or has a URI with a password or a token in it. The user of a database alone is none."""
    users = [(scheme, user) for scheme, user in _USER.findall(text) if ":" in user or scheme.startswith("http")]
    return bool(users) or _QUERY.search(text) is not None


class PpoctlError(Exception):
    """Root of all errors a person, a recipe or a machine can cause. `message` says what failed, with the offending
    value in backticks and where it was set; `hint` is one command or change that mends it. Neither has a secret of a
    URI in it, wherever it came from."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = without_secrets(message)
        self.hint = None if hint is None else without_secrets(hint)
        super().__init__(self.message)

    def as_json(self) -> dict[str, object]:
        """What `--json` prints of it."""
        fields = {"kind": type(self).__name__, "message": self.message, "problems": self.message.splitlines()}
        return {**fields, "hint": self.hint, "exit_code": int(self.exit_code)}

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.message, hint=self.hint), ()


class RecipeError(PpoctlError):
    """The recipe or the command line asks for something that does not exist or contradicts itself."""

    exit_code = ExitCode.USAGE


class RunExistsError(RecipeError):
    """`train` was pointed at a run that exists; `resume` continues it."""


class EnvironmentProblemError(PpoctlError):
    """Something outside the recipe is missing: a package, a model folder, a writable directory."""

    exit_code = ExitCode.ENVIRONMENT


class MissingAssetError(EnvironmentProblemError):
    """A model folder, a hub model that was not fetched, a data file, or a sandbox for programs is not here. It may be
    elsewhere: `validate` and `plan` only note it."""


class ProcessLostError(EnvironmentProblemError):
    """A process of the run died without a word: killed, or its machine is gone. What is committed is safe."""


class SenderLostError(ProcessLostError):
    """Weights went with the process of the trainer that sent them; who noticed is not to blame."""


class SlurmError(EnvironmentProblemError):
    """Slurm is not here, does not answer, or refuses what it was asked."""


class DataError(PpoctlError):
    """Prompts or rewards: a missing or empty dataset, a bad row, a prompt longer than the window."""

    exit_code = ExitCode.DATA


class RewardError(DataError):
    """The scorer fails more often than the recipe allows, or prefers wrong answers to gold ones."""


class ServiceLostError(RewardError):
    """A service that scores has not answered for as long as the recipe waits."""


class HealthStopError(PpoctlError):
    """A health rule of the recipe with `action = "stop"`, or the run's own finite checks, stopped it."""

    exit_code = ExitCode.HEALTH


class NonFiniteError(HealthStopError):
    """NaN or infinity in a reward, value, log-prob, loss or gradient. Weights are as before the update."""


class MismatchError(HealthStopError):
    """Sampler and trainer lie so far apart that a correction of rollouts leaves no token to learn from."""


class ExpectationError(HealthStopError):
    """The run finished and did not reach what its recipe's `[expect]` table states."""


class WeightSyncError(HealthStopError):
    """Trainer and generator do not hold the same weights: a tensor's checksum, their number, or the canary's
    log-probs differ. Raised before any sample is drawn from the wrong weights."""


class ConversionError(HealthStopError):
    """A converted checkpoint is not what it was made from: a tensor, its shape or dtype, the configuration, or what
    the model says of fixed prompts differs. Nothing is left at the destination."""


class HangError(PpoctlError):
    """A stage missed its deadline."""

    exit_code = ExitCode.HANG


class OutOfMemoryError(PpoctlError):
    """The host or the accelerator ran out of memory; names the stage and the key to lower."""

    exit_code = ExitCode.MEMORY


class StorageError(PpoctlError):
    """The run directory cannot be written or read: disk full, read-only, missing item."""

    exit_code = ExitCode.STORAGE


class CorruptArtifactError(StorageError):
    """A committed file does not match the digest in its manifest."""


class SupersededError(StorageError):
    """A newer attempt runs on the same run directory; this one stops before it publishes anything more."""


class RunAliveError(StorageError):
    """Another process of this host works on the run directory; nothing was touched."""


class FinishedShortError(PpoctlError):
    """The job ended in order but before the planned number of steps."""

    exit_code = ExitCode.SHORT


class PreemptedError(PpoctlError):
    """A termination signal arrived; everything finished is committed, and the job is safe to requeue."""

    exit_code = ExitCode.PREEMPTED


class InterruptedByUserError(PpoctlError):
    """Ctrl-C; everything finished is committed."""

    exit_code = ExitCode.INTERRUPTED
