"""A command as typed, and its output: for every file in this folder."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from ppoctl.cli.app import run


class CliResult(NamedTuple):
    code: int
    out: str
    err: str


RunCli = Callable[..., CliResult]


def cli_runner(capsys: pytest.CaptureFixture[str]) -> RunCli:
    def run_words(*words: object) -> CliResult:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return CliResult(code, captured.out, captured.err)

    return run_words


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return a function such that `ask("status", folder)` runs the command."""
    return cli_runner(capsys)
