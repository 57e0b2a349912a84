"""A command as typed, and its output: for every file in this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fakes.slurm import FakeSlurm
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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put Slurm's programs on the PATH of this process."""
    found = FakeSlurm(tmp_path / "slurm")
    found.use(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return found
