"""docs/scaling.md shows what the command prints."""

import re
import shlex
from pathlib import Path

import pytest

from ppoctl.cli.app import run

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    [command] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    name, *words = shlex.split(command.replace("\\\n", ""))
    assert (name, run(words)) == ("ppoctl", 0)
    assert capsys.readouterr().out == shown, "put the new output in, and read what the page says about it again"
