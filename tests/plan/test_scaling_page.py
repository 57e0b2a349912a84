"""docs/scaling.md shows what the benchmark prints."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_benchmark_prints() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    [command] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    path, python, *words = shlex.split(command)
    assert (path, python) == ("PYTHONPATH=src", "python")
    environ = {**os.environ, "PPOCTL_DATA": "/data", "PYTHONPATH": "src"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == shown, "put the new output in, and read what the page says about it again"
