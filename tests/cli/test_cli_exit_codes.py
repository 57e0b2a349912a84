"""Every kind of failure has an exit code and a message format; nothing ends with a raw traceback."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer

from conventions.conftest import ROOT
from fakes.components import fake_recipe
from fakes.job import play
from ppoctl.cli import render
from ppoctl.cli.app import app, run
from ppoctl.cli.options import JsonOption
from ppoctl.core import errors
from ppoctl.store.run_paths import RunPaths
from recipe.conftest import SMALLEST


class TornError(RuntimeError):
    """Stand-in for torch.OutOfMemoryError, whose module may not be imported here."""


TornError.__name__ = "OutOfMemoryError"
FOREIGN: list[tuple[BaseException, int, str]] = [
    (MemoryError("too much"), 7, "out of memory: too much"),
    (TornError("CUDA out of memory\nlong table"), 7, "out of memory: CUDA out of memory"),
    (OSError(errno.ENOSPC, "No space left", "runs/x"), 8, "the disk is full (`runs/x`)"),
    (OSError(errno.EDQUOT, "Quota"), 8, "the disk is full"),
    (
        PermissionError(errno.EACCES, "Permission denied", "runs/x/run.json"),
        8,
        "`runs/x/run.json`: permission denied",
    ),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/x"), 8, "`runs/x`: is a directory"),
    (OSError(errno.EMFILE, "Too many open files"), 3, "too many open files: the limit of this shell is too low"),
    (RuntimeError("pipe: Too many open files"), 3, "too many open files: the limit of this shell is too low"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 7, "out of memory: [Errno 12] Cannot allocate memory"),
    (
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        3,
        "a process or thread cannot be started: [Errno 11] Resource temporarily unavailable",
    ),
    (ValueError("first\nsecond"), 1, "internal: ValueError: first"),
    (ZeroDivisionError(), 1, "internal: ZeroDivisionError: ZeroDivisionError"),
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException | int]:
    """`failing[0] = error` makes `ppoctl plan` raise it; a number is returned as the exit code."""
    box: list[BaseException | int] = [0]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "r.toml").touch()

    def fail(as_json: Annotated[bool, typer.Option("--json")] = False) -> int:
        if isinstance(box[0], BaseException):
            raise box[0]
        return box[0]

    before = list(app.registered_commands)
    app.command("fail-for-the-test")(fail)
    yield box  # type: ignore[misc]
    app.registered_commands[:] = before


def test_each_line_of_a_message_is_an_error(failing: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    failing[0] = errors.DataError("it failed\n  and here is more\nthat too", hint="fix it")
    assert run(["fail-for-the-test"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: it failed\n  and here is more\nerror: that too\n\nhint: fix it\n"


@pytest.mark.parametrize(("error", "code", "says"), FOREIGN, ids=[type(error).__name__ for error, _, _ in FOREIGN])
def test_library_errors_are_printed_in_one_line(
    failing: list[object], capsys: pytest.CaptureFixture[str], error: Exception, code: int, says: str
) -> None:
    failing[0] = error
    assert run(["fail-for-the-test"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"error: {says}"
    assert "Traceback" not in captured.err


NO_ADDRESSES: list[Exception] = [
    MemoryError("too much"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("Resource temporarily unavailable"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", NO_ADDRESSES, ids=str)
def test_memory_error_under_an_address_limit_names_the_limit(
    failing: list[object], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    failing[0] = error
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 50, before[1]))  # more than this process ever maps
    try:
        assert run(["fail-for-the-test"]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    says = f"out of addresses: `ulimit -v` is {1 << 40}; addresses that are only reserved count too ({error})"
    assert capsys.readouterr().err == f"error: {says}\n\nhint: ulimit -v unlimited\n"


@pytest.mark.ci("test_memory_error_under_an_address_limit_names_the_limit")
def test_train_start_under_an_address_limit_names_the_limit(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "quickstart.toml"
    command = f"ulimit -v 600000; exec {sys.executable} -m ppoctl train {recipe} --runs {tmp_path}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 3
    assert "error: out of addresses: `ulimit -v` is 600000; addresses that are only reserved" in found.stderr


@pytest.mark.parametrize(
    "closed",
    [
        "012",
        *(pytest.param(one, marks=pytest.mark.ci("012")) for one in "012"),
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in ("01", "02", "12")),
    ],
)
def test_command_with_closed_streams_prints_nothing(tmp_path: Path, closed: str) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed)
    good, bad = "recipes copy quickstart copied", "status nope"
    for words, code in ((good, 0), (bad, 2)):
        command = f"exec {sys.executable} -m ppoctl {words} {redirections}"
        found = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert found.returncode == code
        assert ("error: `nope`" in found.stderr) == (words == bad and "2" not in closed)
    copied, whole = tmp_path / "copied" / "quickstart.toml", ROOT / "recipes" / "quickstart.toml"
    assert copied.read_bytes() == whole.read_bytes(), "no line went into a file"
    assert list(tmp_path.glob("ppoctl-traceback*")) == []


def test_internal_error_writes_its_traceback_to_a_file(
    failing: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing[0] = ValueError("x")
    run(["fail-for-the-test"])
    [log] = tmp_path.glob("ppoctl-traceback-*.log")
    assert f"hint: less {log}" in capsys.readouterr().err
    assert "in fail\n" in log.read_text("utf-8")


def test_debug_option_shows_the_traceback_in_any_position(
    failing: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    failing[0] = errors.DataError("x")
    for words in (["--debug", "fail-for-the-test"], ["fail-for-the-test", "--debug"]):
        assert run(words) == 4
        err = capsys.readouterr().err
        assert "Traceback (most recent call last)" in err
        assert err.endswith("error: x\n")


def test_colour_requires_a_terminal_and_no_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    render.error("x")
    assert capsys.readouterr().err == "error: x\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    render.error("x")
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    render.error("x")
    assert capsys.readouterr().err == "error: x\n"


def test_table_aligns_text_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    render.table([("a", 1, 0.5), ("long", 100, None)], ("name", "n", "x"))
    assert capsys.readouterr().out == "name  n    x\na       1  0.5\nlong  100  -\n"


def test_json_output_is_one_object_despite_prints_and_errors(
    failing: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def chatty(json: JsonOption = False) -> None:
        print("a line of a library")
        render.json({"figures": {"loss": float("nan"), "gap": [float("inf"), 0.5]}})
        if isinstance(failing[0], BaseException):
            raise failing[0]

    app.command("chatty-for-the-test")(chatty)
    unmet = errors.ExpectationError("a\nb", hint="c")
    fields = {"kind": "ExpectationError", "message": "a\nb", "problems": ["a", "b"], "hint": "c", "exit_code": 5}
    for raised, code in ((0, 0), (unmet, 5), (KeyboardInterrupt(), 130), (ValueError(), 1)):
        failing[0] = raised
        assert run(["chatty-for-the-test", "--json"]) == code
        captured = capsys.readouterr()
        parsed = json.loads(captured.out)
        assert parsed["figures"] == {"loss": "nan", "gap": ["inf", 0.5]}
        assert parsed.get("error", {"exit_code": 0})["exit_code"] == code
        assert raised is not unmet or parsed["error"] == fields
        assert captured.err == "a line of a library\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "run"
    play(root, fake_recipe(steps=2, tracking={"kind": "mlflow", "uri": "http://127.0.0.1:9"}))
    return root


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """Return a folder with a recipe, its data, and a run of two steps whose MLflow does not answer."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PPOCTL_")]:
        monkeypatch.delenv(name)
    Path("r.toml").write_text(SMALLEST.replace('"base"', '"org/base"'), "utf-8")
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n', "utf-8")
    shutil.copytree(finished, "run")
    return tmp_path


def look_at_a_corrupt_record() -> list[str]:
    record = RunPaths(Path("run")).stage(2, "rollout") / "record.safetensors"
    record.write_bytes(record.read_bytes()[:-1])
    return ["show", "run", "--step", "2"]


def compare_with_a_run_that_ended_earlier() -> list[str]:
    shutil.copytree("run", "other")
    ledger = Path("other/ledger.jsonl")
    ledger.write_bytes(ledger.read_bytes().partition(b"\n")[0] + b"\n")
    return ["compare", "run", "other", "--exit-code"]


Provoke = Callable[[], list[str] | BaseException | int]
ROWS: dict[str, list[Provoke]] = {
    "0": [lambda: ["recipes", "list"], lambda: ["status", "run"]],
    "1": [lambda: ValueError("a bug")],
    "2": [
        lambda: ["plan", "r.toml", "--set", "stpes=3"],
        lambda: ["plan", "r.toml", "--set", "steps=x"],
        lambda: ["show", "run", "--step", "999"],
        lambda: ["status", "run", "--sett"],
        lambda: ["resume", "run", "--plan", "--set", "name=other"],
        lambda: ["recipes", "copy", "quickstart", "r.toml"],
        lambda: errors.RunExistsError("there"),
    ],
    "3": [
        lambda: ["track", "run"],
        lambda: ["validate", "r.toml", "--assets"],
        lambda: ["validate", "r.toml", "--assets", "--set", "data.train.path=none.jsonl"],
        lambda: ["train", "r.toml"],
    ],
    "4": [
        lambda: ["validate", "r.toml"],
        lambda: errors.DataError("row 3"),
        lambda: errors.RewardError("gold loses"),
    ],
    "5": [
        lambda: errors.NonFiniteError("nan"),
        lambda: errors.ExpectationError("unmet"),
        lambda: errors.HealthStopError("kl"),
    ],
    "6": [lambda: errors.HangError("late")],
    "7": [lambda: MemoryError("too much"), lambda: errors.OutOfMemoryError("too much")],
    "8": [look_at_a_corrupt_record, lambda: errors.SupersededError("by another attempt")],
    "9": [lambda: errors.FinishedShortError("short"), lambda: 9],
    "10": [compare_with_a_run_that_ended_earlier],
    "75": [lambda: errors.PreemptedError("told to go")],
    "130": [lambda: errors.InterruptedByUserError("told to stop"), lambda: KeyboardInterrupt()],
}
"""Code -> what ends with it: a command if one does so without an engine, otherwise an error of an engine command."""
PROVOKED = [(code, number) for code, provoking in ROWS.items() for number in range(len(provoking))]


@pytest.mark.parametrize(("code", "number"), PROVOKED, ids=[f"{code}-{number}" for code, number in PROVOKED])
def test_every_row_of_the_exit_code_table_can_be_provoked(
    failing: list[object], place: Path, capsys: pytest.CaptureFixture[str], code: str, number: int
) -> None:
    provoked = ROWS[code][number]()
    words = provoked if isinstance(provoked, list) else ["fail-for-the-test"]
    failing[0] = provoked
    assert run(words) == int(code), capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


def test_exit_code_table_lists_every_code_once() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    codes = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert codes == [*ROWS, "128+n"]
    assert {int(code) for code in ROWS} == {int(code) for code in errors.ExitCode}


@pytest.mark.parametrize(
    "command",
    [
        "ppoctl recipes metrics --json",
        pytest.param("ppoctl recipes keys", marks=pytest.mark.ci("ppoctl recipes metrics --json")),
    ],
)
def test_closed_output_pipe_is_not_an_error(command: str) -> None:
    """Like other shell tools: no output, and the exit code of SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(
        [sys.executable, "-m", *command.split()], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (found.returncode, found.stderr) == (141, b"")
