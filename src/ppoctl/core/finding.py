"""One result of a check, for every command that judges something: rules of a recipe, model, data, reward, memory,
machine, a request to Slurm, the curves of a run.

    a check  ->  Finding  ->  printed by `cli.findings`, written as JSON by `as_json`, or raised by `as_error`
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ppoctl.core.errors import (
    EnvironmentProblemError,
    MissingAssetError,
    MissingFileError,
    PpoctlError,
    RecipeError,
    without_secrets,
)

Keys = tuple[tuple[str, ...], ...]
"""Dotted keys of a recipe, each as its parts."""
ErrorClass = type[PpoctlError]


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    """The requirement is met."""
    NOTE = "note"
    """A fact that is not a problem, but that a user should know."""
    WARNING = "warning"
    """A run works, but it is slower, less reliable or learns less."""
    ERROR = "error"
    """A run will fail, or has failed to learn."""


@dataclass(frozen=True)
class Finding:
    """Result of a check. If there is a problem, the finding contains one command or change that fixes it."""

    level: Level
    what: str
    """Result in one sentence, with the offending value in backticks."""
    where: str = ""
    """Origin of the value (`file:line`, `environment NAME` or `--set`), or the thing that was checked; empty: the
    recipe as a whole."""
    hint: str | None = None
    """Command or change that fixes the problem."""
    kind: str = "recipe"
    """Subject of the check, such as `model`, `memory` or `reward` (docs/findings.md lists all)."""
    error: ErrorClass = RecipeError
    """Class of the error that a finding of level `error` raises; it decides the exit code."""
    keys: Keys = ()
    """Keys of a recipe that contradict each other, the key to change first. A rule knows no origins: loading replaces
    the finding by one with `where`, and with the values of the keys unless `kind` is `secret`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", without_secrets(self.what))
        object.__setattr__(self, "hint", None if self.hint is None else without_secrets(self.hint))

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    @property
    def in_a_line(self) -> str:
        """The result and the fix, on one line."""
        what = self.what.replace("\n", "; ")
        return what if self.hint is None else f"{what}; fix: {self.hint}"

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR

    @property
    def is_missing(self) -> bool:
        """Whether the problem is only that something is missing on this machine; it may exist on the machine of the
        run."""
        return issubclass(self.error, MissingAssetError)

    def as_json(self) -> dict[str, str | None]:
        """Return the object that `--json` prints."""
        fields = {"level": self.level.value, "kind": self.kind, "where": self.where}
        return {**fields, "what": self.what, "hint": self.hint}


def ok(what: str, where: str = "", *, kind: str) -> Finding:
    """Return a finding: the requirement is met."""
    return Finding(Level.OK, what, where, kind=kind)


def note(what: str, where: str = "", *, kind: str) -> Finding:
    """Return a finding that is not a problem."""
    return Finding(Level.NOTE, what, where, kind=kind)


def warning(what: str, where: str = "", hint: str | None = None, *, kind: str) -> Finding:
    """Return a finding: a run works, but not as well as it could."""
    return Finding(Level.WARNING, what, where, hint, kind)


def problem(
    what: str,
    where: str = "",
    hint: str | None = None,
    *,
    kind: str = "recipe",
    error: ErrorClass = RecipeError,
) -> Finding:
    """Return a finding: a run will fail."""
    return Finding(Level.ERROR, what, where, hint, kind, error)


def wrong(what: str, where: str, hint: str | None = None, *, kind: str) -> Finding:
    """Return a finding: this machine lacks something that a run requires."""
    return problem(what, where, hint, kind=kind, error=EnvironmentProblemError)


def conflict(
    what: str, keys: Keys, hint: str | None = None, *, kind: str = "recipe", level: Level = Level.ERROR
) -> Finding:
    """Return a finding: keys of the recipe contradict each other. The user should change the first key."""
    return Finding(level, what, hint=hint, kind=kind, keys=keys)


def from_error(error: PpoctlError, where: str = "", *, kind: str) -> Finding:
    """Return the finding of an error that the start of a run would raise."""
    return Finding(Level.ERROR, error.message, where, error.hint, kind, type(error))


def without_missing(findings: Iterable[Finding], *, files_are_required: bool = False) -> list[Finding]:
    """Return the findings with a note for each asset that is missing on this machine: the run may be elsewhere.
    `files_are_required`: a missing file of the user stays an error."""
    return [
        note(f"{found.what}; not checked", found.where, kind=found.kind)
        if found.is_missing and not (files_are_required and issubclass(found.error, MissingFileError))
        else found
        for found in findings
    ]


def notes(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for each note and warning. Errors are raised as one error (`require_none`)."""
    for finding in findings:
        if finding.level in (Level.NOTE, Level.WARNING):
            where = f"{finding.where}: " if finding.where else ""
            yield f"{finding.level.value}: {where}{finding.in_a_line}"


def once(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without those that say the same as an earlier one."""
    kept = dict[tuple[Level, str], Finding]()
    for found in findings:
        kept.setdefault((found.level, found.what), found)
    return list(kept.values())


def require_none(findings: Iterable[Finding]) -> None:
    """Raise `as_error` if there are findings of level `error`."""
    if errors := [finding for finding in findings if finding.is_error]:
        raise as_error(errors)


def as_error(findings: Iterable[Finding]) -> PpoctlError:
    """Return one error with a line per finding of level `error`, the class of the first one, and the first hint."""
    errors: Sequence[Finding] = [finding for finding in findings if finding.is_error]
    hint = next((finding.hint for finding in errors if finding.hint), None)
    return errors[0].error("\n".join(map(str, errors)), hint=hint)
