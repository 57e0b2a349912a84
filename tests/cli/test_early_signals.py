"""A signal before anything is ready ends a command with its exit code and a message."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conventions.conftest import ROOT

ENDS = {signal.SIGUSR1: 75, signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.ci("SIGTERM")] * (number != signal.SIGTERM)) for number in ENDS],
    ids=lambda number: number.name,
)
def test_signal_during_reading_ends_the_command_gracefully(tmp_path: Path, number: signal.Signals) -> None:
    rows, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    os.mkfifo(rows)
    recipe, setting = ROOT / "recipes" / "quickstart.toml", f"data.train.path={rows}"
    words = [sys.executable, "-m", "ppoctl", "train", str(recipe), "--set", setting, "--runs", str(runs)]
    environ = {**os.environ, "PPOCTL_DATA": "/nowhere", "PYTHONPATH": str(ROOT / "src")}
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ)
    writer = opened_for_writing(rows, command)
    # A signal between Python's last check for one and the system call that waits would not end that wait.
    time.sleep(0.2)
    command.send_signal(number)
    lines = command.communicate(timeout=60)[1].splitlines()
    os.close(writer)
    assert command.returncode == ENDS[number]
    told = lines.index(f"{number.name}: stopping")  # on a busy machine, lines on the progress precede it
    assert lines[told + 1].startswith(f"error: stopped by {number.name}")
    assert lines[told + 1].endswith("before the first stage; everything finished is committed")
    assert f"hint: ppoctl train {recipe} --set {setting}" in lines
    assert not runs.exists()


def opened_for_writing(pipe: Path, reader: "subprocess.Popen[str]") -> int:
    """Return the pipe, once the command waits for its content."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and reader.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.02)
    raise AssertionError("the command reads no rows")
