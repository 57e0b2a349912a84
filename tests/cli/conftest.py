"""A command as typed, and its output: for every file in this folder."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fakes.components import fake_recipe
from fakes.job import play
from fakes.slurm import FakeSlurm
from hints import faults
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
        hints = re.findall(r"(?m)^hint: (.*)$", captured.err)
        assert [fault for hint in hints for fault in faults(hint)] == []
        return CliResult(code, captured.out, captured.err)

    return run_words


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return a function such that `ask("status", folder)` runs the command."""
    return cli_runner(capsys)


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step on fakes, to be copied."""
    root = tmp_path_factory.mktemp("played") / "my"
    play(root, fake_recipe(steps=1))
    return root


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "slurm")
    found.use(monkeypatch)
    return found


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *, width: int = 80, lines: int = 24) -> None:
    """Make stdout a terminal with colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "LINES": str(lines), "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
