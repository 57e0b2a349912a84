"""Result of a check."""

from dataclasses import dataclass
from enum import StrEnum

from ppoctl.errors import PpoctlError, without_secrets


class Verdict(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but it is slower or less reliable."""
    WRONG = "wrong"
    """A run will fail."""


@dataclass(frozen=True)
class Finding:
    """Observation of a check. If there is a problem, the finding contains the command that fixes it."""

    name: str
    verdict: Verdict
    seen: str
    mend: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return {"check": self.name, "verdict": self.verdict.value, "seen": self.seen, "mend": self.mend}


def ok(name: str, seen: str) -> Finding:
    """Return a finding: the requirement is met."""
    return Finding(name, Verdict.OK, without_secrets(seen))


def warning(name: str, seen: str, fix: str | None = None) -> Finding:
    """Return a finding: a run works, but it is slower or less reliable."""
    return Finding(name, Verdict.WARNING, without_secrets(seen), fix)


def wrong(name: str, seen: str, fix: str) -> Finding:
    """Return a finding: a run will fail. The finding contains the command that fixes the problem."""
    return Finding(name, Verdict.WRONG, without_secrets(seen), without_secrets(fix))


def refused(name: str, error: PpoctlError) -> Finding:
    """Return a finding with the message and the hint of an error that the start of a run would raise."""
    return wrong(name, error.message.replace("\n", "; "), error.hint or "ppoctl validate --help")
