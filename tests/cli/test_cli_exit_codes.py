"""Every kind of failure has its exit code and its form; nothing ends in a raw traceback."""

import errno
import json
import os
from pathlib import Path

import pytest

from ppoctl import errors
from ppoctl.cli import app as app_module
from ppoctl.cli import render
from ppoctl.cli.app import app, run
from ppoctl.cli.options import Json

FAMILIES = [
    (errors.RecipeError, 2),
    (errors.RunExistsError, 2),
    (errors.EnvironmentProblemError, 3),
    (errors.DataError, 4),
    (errors.RewardError, 4),
    (errors.HealthStopError, 5),
    (errors.ExpectationError, 5),
    (errors.HangError, 6),
    (errors.OutOfMemoryError, 7),
    (errors.StorageError, 8),
    (errors.SupersededError, 8),
    (errors.FinishedShortError, 9),
    (errors.PreemptedError, 75),
    (errors.InterruptedByUserError, 130),
]


class TornError(RuntimeError):
    """Stands for torch.OutOfMemoryError, whose module may not be imported here."""


TornError.__name__ = "OutOfMemoryError"
FOREIGN: list[tuple[BaseException, int, str]] = [
    (MemoryError("too much"), 7, "out of memory: too much"),
    (TornError("CUDA out of memory\nlong table"), 7, "out of memory: CUDA out of memory"),
    (OSError(errno.ENOSPC, "No space left", "runs/x"), 8, "the disk is full (`runs/x`)"),
    (OSError(errno.EDQUOT, "Quota"), 8, "the disk is full"),
    (ValueError("first\nsecond"), 1, "internal: ValueError: first"),
    (ZeroDivisionError(), 1, "internal: ZeroDivisionError: ZeroDivisionError"),
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException | int]:
    """`failing[0] = error` makes `ppoctl plan` raise it; a number is what the command returns."""
    box: list[BaseException | int] = [0]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(app_module.tempfile, "tempdir", None)
    (tmp_path / "r.toml").touch()

    def fail() -> int:
        if isinstance(box[0], BaseException):
            raise box[0]
        return box[0]

    before = list(app.registered_commands)
    app.command("fail-for-the-test")(fail)
    yield box  # type: ignore[misc]
    app.registered_commands[:] = before


@pytest.mark.parametrize(("kind", "code"), FAMILIES, ids=[kind.__name__ for kind, _ in FAMILIES])
def test_each_family_has_its_code(
    failing: list[object], capsys: pytest.CaptureFixture[str], kind: type[errors.PpoctlError], code: int
) -> None:
    failing[0] = kind("it failed\n  and here is more\nthat too", hint="mend it")
    assert run(["fail-for-the-test"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: it failed\n  and here is more\nerror: that too\n\nhint: mend it\n"


@pytest.mark.parametrize(("error", "code", "says"), FOREIGN, ids=[type(error).__name__ for error, _, _ in FOREIGN])
def test_foreign_errors_are_one_line(
    failing: list[object], capsys: pytest.CaptureFixture[str], error: Exception, code: int, says: str
) -> None:
    failing[0] = error
    assert run(["fail-for-the-test"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"error: {says}"
    assert "Traceback" not in captured.err


def test_an_internal_error_keeps_its_traceback_in_a_file(
    failing: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing[0] = ValueError("x")
    run(["fail-for-the-test"])
    log = tmp_path / f"ppoctl-traceback-{os.getpid()}.log"
    assert f"hint: less {log}" in capsys.readouterr().err
    assert "in fail\n" in log.read_text("utf-8")


def test_debug_shows_the_traceback_wherever_it_stands(
    failing: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    failing[0] = errors.DataError("x")
    for words in (["--debug", "fail-for-the-test"], ["fail-for-the-test", "--debug"]):
        assert run(words) == 4
        err = capsys.readouterr().err
        assert "Traceback (most recent call last)" in err
        assert err.endswith("error: x\n")


def test_an_error_as_json_has_all_its_parts(failing: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    failing[0] = errors.RecipeError("a\nb", hint="c")
    # The command itself has no --json; what counts is that it was asked for.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "app", lambda *_, **__: (_ for _ in ()).throw(failing[0]))
        assert run(["fail-for-the-test", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "error": {"kind": "RecipeError", "message": "a\nb", "problems": ["a", "b"], "hint": "c", "exit_code": 2}
    }


def test_what_a_command_returns_is_its_exit_code(failing: list[object]) -> None:
    failing[0] = 9
    assert run(["fail-for-the-test"]) == 9


def test_ctrl_c_is_130(failing: list[object]) -> None:
    failing[0] = KeyboardInterrupt()
    assert run(["fail-for-the-test"]) == 130


def test_colour_only_on_a_terminal_without_no_color(
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


def test_a_table_aligns_words_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    render.table([("a", 1, 0.5), ("long", 100, None)], ("name", "n", "x"))
    assert capsys.readouterr().out == "name  n    x\na       1  0.5\nlong  100  -\n"


def test_with_json_there_is_one_object_whatever_is_printed_and_raised(
    failing: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def chatty(json: Json = False) -> None:
        print("a line of a library")
        render.json({"figures": {"loss": float("nan"), "gap": [float("inf"), 0.5]}})
        if isinstance(failing[0], BaseException):
            raise failing[0]

    app.command("chatty-for-the-test")(chatty)
    for raised, code in (
        (0, 0),
        (errors.ExpectationError("unmet"), 5),
        (KeyboardInterrupt(), 130),
        (ValueError(), 1),
    ):
        failing[0] = raised
        assert run(["chatty-for-the-test", "--json"]) == code
        captured = capsys.readouterr()
        told = json.loads(captured.out)
        assert told["figures"] == {"loss": "nan", "gap": ["inf", 0.5]}
        assert told.get("error", {"exit_code": 0})["exit_code"] == code
        assert captured.err == "a line of a library\n"
