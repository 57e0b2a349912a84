"""docs/scaling.md shows the current output of its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), list(zip(COMMANDS, SHOWN, strict=True)), ids=["steps", "memory"])
def test_scaling_page_shows_command_output(command: str, shown: str) -> None:
    path, python, *words = shlex.split(command)
    assert (path, python) == ("PYTHONPATH=src", "python")
    environ = {**os.environ, "PPOCTL_DATA": "/data", "PYTHONPATH": "src"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert (errors, done.returncode) == ([], 0)
    assert done.stdout.endswith(shown), "put the new output in, and read what the page says about it again"
