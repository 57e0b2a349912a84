"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum

from ppoctl.errors import PpoctlError, without_secrets


class Verdict(StrEnum):
    """Words for how a thing stands."""

    OK = "ok"
    WARNING = "warning"
    """A run works, slower or with less certainty."""
    WRONG = "wrong"
    """A run will fail."""


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing, and the command that mends it where it is wrong."""

    name: str
    verdict: Verdict
    seen: str
    mend: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return {"check": self.name, "verdict": self.verdict.value, "seen": self.seen, "mend": self.mend}


def ok(name: str, seen: str) -> Finding:
    """The finding that a thing is as it should be."""
    return Finding(name, Verdict.OK, without_secrets(seen))


def warning(name: str, seen: str, mend: str | None = None) -> Finding:
    """The finding that a run works, but not as well as it could."""
    return Finding(name, Verdict.WARNING, without_secrets(seen), mend)


def wrong(name: str, seen: str, mend: str) -> Finding:
    """The finding that a run will fail, and the command that mends it."""
    return Finding(name, Verdict.WRONG, without_secrets(seen), without_secrets(mend))


def refused(name: str, error: PpoctlError) -> Finding:
    """The finding of an error that a start would end with, in its words."""
    return wrong(name, error.message.replace("\n", "; "), error.hint or "ppoctl validate --help")
