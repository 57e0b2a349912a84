"""docs/screens.md shows the output of commands: every screen of the page is current, and it has no others."""

import io
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from cli.screens import PAGE, SCREENS, blocks, captured, kind, unpack
from fakes.components import fake_components, fake_recipe
from ppoctl.cli import summary
from ppoctl.cli.app import run
from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.errors import ExpectationError, InterruptedByUserError
from ppoctl.core.metric_registry import find
from ppoctl.run import new_run, session
from ppoctl.run.shutdown.signals import signal_gate
from ppoctl.show.tracking.forwarder import Sent
from ppoctl.show.tracking.screen import LiveScreen
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths

ON_FAKES = ("train", "terminal", "narrow", "verbose", "quiet", "stop", "stop-twice", "resume", "rollout")
"""Screens of a training. The lines of engines while they start are checked by the quickstart's end-to-end test."""
ENGINES = re.compile(r"\b(loading|reading|trying|starting|checking) ")
SHOWN = blocks(PAGE.read_text("utf-8"))


def test_every_screen_of_the_page_is_checked() -> None:
    assert sorted(SHOWN) == sorted([*SCREENS, *ON_FAKES, "eval", "track"])
    page = re.sub(r"[\u2500-\u257f\u2581-\u2588\u2800-\u28ff]", "", PAGE.read_text("utf-8"))
    assert [line for line in page.splitlines() if len(line) > 132 or not line.isascii()] == []


def settled(text: str) -> str:
    """Return the screen without sizes of files: they depend on the path of the checkout."""
    return re.sub(r"[\d.]+ [KMG]iB *", "# ", text)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the fixture runs, for commands that change none."""
    unpack(folder := tmp_path_factory.mktemp("unpacked"))
    return folder


@pytest.mark.parametrize("name", SCREENS)
def test_screen_on_the_page_equals_the_printed_output(name: str, unpacked: Path, tmp_path: Path) -> None:
    folder = unpacked
    if name == "rm":
        shutil.copytree(unpacked, folder := tmp_path / "copy", symlinks=True)
    assert settled(captured(name, folder)) == settled(SHOWN[name]), "make docs"


Act = Callable[[str, int, io.StringIO], None]


def trained(expect: dict[str, Any], act: Act = lambda role, number, stream: None, width: int = 160) -> str:
    """Return what `train -v` shows of the run `runs/quickstart` on fakes, on a terminal; `act` is called for each
    minibatch."""
    stream = io.StringIO()

    def on_minibatch(role: str, number: int) -> None:
        with ACTIVITIES.track("minibatch", 2) as at:
            at.done = number
            time.sleep(0.02)  # so that the status is shown
            act(role, number, stream)

    recipe = fake_recipe(name="quickstart", steps=2, expect=expect, reward={"kind": "gsm8k"}, model=MODEL, data=DATA)
    paths = RunPaths(Path("runs/quickstart"))
    new_run.create(paths, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")
    components = fake_components(recipe, on_minibatch=on_minibatch)
    opened = session.OpenedRun(paths, {1: recipe}, components, plan=ResumePlan(start=0, items=()))
    rich = RichConsole(file=stream, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    try:
        with closing(LiveScreen(rich, "stages", refresh_per_second=100)) as screen:  # noqa: SIM117
            with signal_gate("again", screen.line) as gate:
                ended = session.attempt_run(opened, gate=gate, screen=screen)
        with redirect_stdout(stream), redirect_stderr(stream):
            summary.print_rollout(ended, as_json=False)
            summary.print_summary(ended, as_json=False)
    except (InterruptedByUserError, ExpectationError) as error:
        stream.write(f"error: {error.message}\nhint: {error.hint}\n")
    return stream.getvalue()


ROWS = {"format": "gsm8k", "path": "/nowhere/rows.jsonl"}
MODEL = {"path": "/nowhere/model", "dtype": "float32"}
DATA = {"train": ROWS, "eval": {"held": ROWS}}
PASSED, GREEDY = "eval/held/pass_at_1", "eval/held/greedy_pass_at_1"


def interrupted(times: int) -> Act:
    """Press Ctrl-C in the second step's update of the actor, and again when it was answered."""
    seen = []

    def act(role: str, number: int, stream: io.StringIO) -> None:
        seen.append(role)
        if role == "actor" and seen.count("actor") == 5:
            for count in range(1, times + 1):
                os.kill(os.getpid(), signal.SIGINT)
                until = time.monotonic() + 10.0
                while stream.getvalue().count("SIGINT") < count and time.monotonic() < until:
                    time.sleep(0.005)

    return act


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of trainings on fakes (met, unmet and interrupted), normalized by `kind`."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        for expect, act in (
            ({PASSED: {"min": 2.0, "rise_min": 0.3}, GREEDY: {"min": 2.0}}, lambda *_: None),
            ({PASSED: {"min": -1.0, "rise_min": -2.0}, GREEDY: {"min": -1.0}}, lambda *_: None),
            ({}, interrupted(1)),
            ({}, interrupted(2)),
        ):
            folder = tmp_path_factory.mktemp("screens")
            patch.chdir(folder)
            texts.append(trained(expect, act).replace(f"{folder}/", ""))
            if act.__name__ == "<lambda>":
                stream = io.StringIO()
                patch.setattr("sys.stdout", stream)
                patch.setattr("sys.stderr", stream)
                run(["resume", "runs/quickstart"])
                patch.undo()
                texts.append(stream.getvalue().replace(f"{folder}/", ""))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "\n".join(texts))
    return kind(plain.replace("held/", "heldout/"))


@pytest.mark.parametrize("name", ON_FAKES)
def test_training_screen_has_lines_in_the_printed_format(name: str, printed: str) -> None:
    command, *lines = SHOWN[name].splitlines()
    assert command.startswith("$ ppoctl ")
    kinds = [kind(line.removesuffix(" ...")) for line in lines if line != "..." and not ENGINES.search(line)]
    assert [each for each in kinds if each not in printed and each.removeprefix("step #/# ") not in printed] == []


def test_eval_and_track_screens_have_known_names() -> None:
    table, _, last = SHOWN["eval"].partition("value\n")[2].partition("\n\n")
    assert [name for name in (line.split()[0] for line in table.splitlines()) if find(name) is None] == []
    assert kind(last) == kind("state: actor@2:2de2e2bdd72abfa4")
    counts = dict(line.split() for line in SHOWN["track"].splitlines()[2:])
    assert counts.keys() <= {each.name for each in fields(Sent)}
    assert "0" not in counts.values()
