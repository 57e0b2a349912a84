"""docs/scaling.md shows the current output of its commands."""

import re
import shlex
from pathlib import Path
from runpy import run_path

import pytest

from ppoctl.cli.app import run

ROOT = Path(__file__).parents[2]


PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), list(zip(COMMANDS, SHOWN, strict=True)), ids=["steps", "memory"])
def test_scaling_page_shows_command_output(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, python, *words = shlex.split(command)
    assert (path, python) == ("PYTHONPATH=src", "python")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    if words[:2] == ["-m", "ppoctl"]:
        code = run(words[2:])
    else:
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            run_path(words[0], run_name="__main__")
        code = ended.value.code
    written = capsys.readouterr()
    errors = [line for line in written.err.splitlines() if not line.startswith("note: ")]
    assert (errors, code or 0) == ([], 0)
    assert written.out.endswith(shown), "put the new output in, and read what the page says about it again"
