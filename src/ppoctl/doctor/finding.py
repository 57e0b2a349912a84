"""Result of a check."""

from dataclasses import dataclass
from enum import StrEnum

from ppoctl.errors import PpoctlError, without_secrets


class Verdict(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but is slower or less reliable."""
    WRONG = "wrong"
    """A run will fail."""


@dataclass(frozen=True)
class Finding:
    """Observation of a check, and the command that fixes the problem, if there is one."""

    name: str
    verdict: Verdict
    seen: str
    mend: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return {"check": self.name, "verdict": self.verdict.value, "seen": self.seen, "mend": self.mend}


def ok(name: str, seen: str) -> Finding:
    """Return the finding that a requirement is met."""
    return Finding(name, Verdict.OK, without_secrets(seen))


def warning(name: str, seen: str, fix: str | None = None) -> Finding:
    """Return the finding that a run works, but is slower or less reliable."""
    return Finding(name, Verdict.WARNING, without_secrets(seen), fix)


def wrong(name: str, seen: str, fix: str) -> Finding:
    """Return the finding that a run will fail, with the command that fixes it."""
    return Finding(name, Verdict.WRONG, without_secrets(seen), without_secrets(fix))


def refused(name: str, error: PpoctlError) -> Finding:
    """Return the finding for an error that the start of a run would raise, with its message and hint."""
    return wrong(name, error.message.replace("\n", "; "), error.hint or "ppoctl validate --help")
