"""`ppoctl plot`: metrics of runs, on a terminal and in files; journals written by hand."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import CliResult, RunCli
from conventions.test_lightweight_imports import front
from ppoctl.core.batch.sealed_json import seal, sealed_line
from ppoctl.store.journal import JournalEvent, events
from ppoctl.store.run_paths import FORMAT

REWARD, PASS = "reward/score_mean", "eval/held/pass_at_1"


def stage(step: int, name: str, figures: Mapping[str, float]) -> dict[str, Any]:
    return {"step": step, "stage": name, "seconds": 1.0, "attempt": 1, "figures": figures, "clocked": {}}


def event(name: str, attempt: int, **details: object) -> dict[str, Any]:
    return {"event": name, "attempt": attempt, **details}


LINES = [
    event("attempt_started", 1),
    stage(0, "eval", {PASS: 0.25}),
    stage(1, "reward", {REWARD: 0.0}),
    event("attempt_ended", 1, status="stopped"),
    event("attempt_started", 2),
    stage(2, "reward", {REWARD: 0.5}),
    stage(2, "critic_update", {"value/explained_variance": 0.1, "policy/entropy_mean": 1.0}),
    stage(2, "actor_update", {"rollout/response_tokens_mean": 9.0, "policy/clip_frac": 0.1}),
    stage(3, "reward", {REWARD: 1.0}),
    stage(3, "eval", {PASS: 0.75, f"{PASS}_stderr": 0.1}),
    event("attempt_ended", 2, status="finished"),
]


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(seal({"format": FORMAT}))
    numbered = ({"seq": number, **line} for number, line in enumerate(lines, start=1))
    (folder / "journal.jsonl").write_bytes(b"".join(map(sealed_line, numbered)))
    return folder


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: RunCli) -> RunCli:
    """Return a function such that `ask("plot", "a")` runs in a folder with the runs `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", LINES)
    write(tmp_path / "b", [stage(step, "reward", {REWARD: 1.0}) for step in (1, 2)])
    return partial(ask, "plot")


def titles(result: CliResult) -> list[str]:
    return [line.partition(" (")[0] for line in result.out.splitlines() if "/" in line]


def test_plot_shows_the_default_metrics_that_are_recorded(ask: RunCli) -> None:
    result = ask("a")
    assert titles(result) == [REWARD, PASS, "value/explained_variance", "policy/entropy_mean"]
    assert result.out.splitlines()[0] == f"{REWARD} (score): 1 at step 3"
    assert max(map(len, result.out.splitlines())) == 80
    assert result.err == "a: health stop after step 1, resumed after step 1\n"
    assert "\x1b" not in result.out
    assert titles(ask("b")) == [REWARD]


def test_several_runs_share_a_chart_with_a_legend(ask: RunCli) -> None:
    lines = ask("a", "b", "--metric", REWARD).out.splitlines()
    assert lines[:4] == ["* a", "+ b", "", f"{REWARD} (score)"]
    assert "+" in lines[4]
    assert "*" in lines[13]


def test_plot_json_has_the_plotted_series(ask: RunCli) -> None:
    parsed = json.loads(ask("a", "b", "--metric", REWARD, "--metric", PASS, "--smooth", "2", "--json").out)
    assert parsed["series"][REWARD] == {"a": [[1, 0.0], [2, 0.25], [3, 0.75]], "b": [[1, 1.0], [2, 1.0]]}
    assert parsed["series"][PASS] == {"a": [[0, 0.25], [3, 0.5]]}
    assert parsed["events"] == {"a": [{"step": 1, "what": "health stop"}, {"step": 1, "what": "resumed"}], "b": []}


def test_runs_with_equal_names_are_labelled_by_path(ask: RunCli, tmp_path: Path) -> None:
    write(tmp_path / "x" / "a", LINES)
    assert ask("a", "x/a", "--metric", REWARD).out.splitlines()[:2] == ["* a", "+ x/a"]


def test_output_format_follows_the_file_suffix(ask: RunCli) -> None:
    assert ask("a", "--out", "a.svg") == CliResult(0, "a.svg\n", "")
    text = Path("a.svg").read_text("utf-8")
    assert all(f">{word}</text>" in text for word in (REWARD, PASS, "health stop, resumed", "step", "a"))
    assert ask("a", "--out", "a.png").code == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_pillow_is_refused(ask: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "ppoctl.show.chart.png", raising=False)
    result = ask("a", "--out", "a.png")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error: a PNG requires Pillow, which is not installed\n")
    assert not Path("a.png").exists()


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (("--metric", "reward/mean"), "no metric is called `reward/mean`; did you mean `reward/score_mean`?", ""),
        (("--metric", "kl/coef"), "metric `kl/coef` was not recorded", " kl"),
        (
            ("--metric", "eval/hell/pass_at_1"),
            "metric `eval/hell/pass_at_1` was not recorded; did you mean `{}`?",
            " eval",
        ),
    ],
)
def test_missing_metric_is_named(ask: RunCli, words: tuple[str, ...], says: str, hint: str) -> None:
    stderr = f"error: {says.format(PASS)}\n\nhint: ppoctl recipes metrics{hint}\n"
    assert ask("a", *words) == CliResult(2, "", stderr)


def test_invalid_plot_requests_are_refused(ask: RunCli, tmp_path: Path) -> None:
    assert ask("a", "--out", "a.pdf").err == "error: `a.pdf` does not end with .svg or .png\n\nhint: --out a.svg\n"
    assert ask("a", "--out", "none/a.svg").code == 8
    assert ask("none").err.startswith("error: `none` is not a run directory, and there is no such run in `runs`\n")
    write(tmp_path / "empty", [event("attempt_started", 1)])
    assert ask("empty").err == "error: run `empty` has no metrics yet\n\nhint: ppoctl status empty\n"
    write(tmp_path / "nan", [stage(1, "reward", {REWARD: float("nan")})])
    assert ask("nan", "--metric", REWARD).err.startswith(f"error: no value of `{REWARD}` is a number\n")


def test_event_belongs_to_the_step_before() -> None:
    assert events(LINES) == [JournalEvent(1, "health stop"), JournalEvent(1, "resumed")]
    assert events([event("attempt_started", 1), event("attempt_started", 2)]) == []  # nothing had begun


def test_plot_imports_no_heavy_library(tmp_path: Path) -> None:
    root = str(write(tmp_path / "a", LINES))
    words = (("plot", root), ("plot", root, "--out", str(tmp_path / "a.svg")))
    heavy = {"torch", "numpy", "pyarrow", "mlflow", "matplotlib", "PIL", "transformers"}
    assert [heavy & set(each["loaded"]) for each in front(*words).values()] == [set(), set()]  # type: ignore[call-overload]
