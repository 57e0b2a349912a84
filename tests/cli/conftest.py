"""A command as typed, and its output: for every file in this folder."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from ppoctl.cli.app import run


class Said(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Said]


def asking(capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(*words: object) -> Said:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return asked


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function such that `ask("status", folder)` runs the command."""
    return asking(capsys)
