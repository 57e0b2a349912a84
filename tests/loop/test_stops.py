"""Runs that are stopped at every stage by every means, on fakes, and gone on with: nothing of them is other than in
the run that nobody stopped, and what there was time to save is not replayed."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, open_run, result, saved_pairs
from ppoctl.errors import InterruptedByUserError, PpoctlError, PreemptedError
from ppoctl.loop.run import run
from ppoctl.shutdown import signals
from ppoctl.shutdown.signals import SignalGate, signal_gate
from ppoctl.shutdown.time_left import TimeLeft
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths

BEFORE_TRAINING = ("rollout", "reward", "values", "logprobs", "advantages")
STAGES = (*BEFORE_TRAINING, "critic_update", "actor_update", "eval")
IN_PIECES = ("rollout", "reward", "eval")
"""Stages that end between two samples."""
RECIPE = fake_recipe(steps=3, checkpoint={"every_steps": 3}, eval={"every_steps": 1})
"""No state is saved before the end but by a stop."""
STEP = 2
"""In which the runs are stopped."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where there is such a place: the drill flushes thousands of files."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ppoctl-stops-", dir=parent) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, object]:
    run(open_run(folder / "whole", RECIPE, Witness()).job)
    return result(folder / "whole")


@dataclass
class Stopped:
    """A run that was stopped."""

    root: Path
    error: PpoctlError
    moments: list[str]
    said: list[str] = field(default_factory=list)

    @property
    def kept(self) -> dict[str, int]:
        """Role -> step of the state that the stop left beside those of the steps."""
        paths = RunPaths(self.root)
        found = {role: manifests.read(paths.at_stop / role) for role in ("actor", "critic")}
        return {role: manifest.step for role, manifest in found.items() if manifest is not None}

    def go_on(self) -> list[str]:
        """Do the rest. Returns what was said of replays."""
        job = open_run(self.root, RECIPE, Witness()).job
        job.states.notify = self.said.append
        run(job)
        return [text for text in self.said if text.startswith("replayed")]


def stop(
    root: Path, act: Callable[[SignalGate, str], None], time_left: TimeLeft, asked: Callable[[], str | None]
) -> Stopped:
    """Run until the gate ends it. `act` is told each moment."""
    with signal_gate("go on") as gate, gate.working(time_left, asked):
        witness = Witness(act=lambda _, moment: act(gate, moment))
        job = open_run(root, RECIPE, witness, gate=gate).job
        with pytest.raises((PreemptedError, InterruptedByUserError)) as told:
            run(job)
    return Stopped(root, told.value, witness.moments)


def nobody_asks() -> None:
    """Nothing is asked of the run."""


SLOW = TimeLeft(stage_s=lambda _: 1000.0, is_job=True)


@cache
def by_signal(root: Path, number: signal.Signals, stage: str, *, fits: bool) -> Stopped:
    """A run that met the signal as the stage began."""

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} {stage} starts":
            if not fits:
                gate._time = replace(gate._time, ends_at=gate.clock() + 60)
            os.kill(os.getpid(), number)

    return stop(root, act, TimeLeft() if fits else SLOW, nobody_asks)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_stop_commits_finishing_stage_and_saves_states(
    folder: Path, expected: dict[str, object], number: signal.Signals, stage: str
) -> None:
    stopped = by_signal(folder / f"{number.name}-{stage}", number, stage, fits=True)
    paths = RunPaths(stopped.root)
    assert stopped.error.exit_code == (130 if number == signal.SIGINT else 75)
    if stage not in IN_PIECES:
        assert f"{STEP} {stage} renamed" in stopped.moments
    # A pair where both engines are at the last finished step; what trained since by itself.
    if stage in BEFORE_TRAINING:
        assert (saved_pairs(paths), stopped.kept) == ([STEP - 1], {})
    elif stage == "critic_update":
        assert (saved_pairs(paths), stopped.kept) == ([], {"critic": STEP, "actor": STEP - 1})
    else:
        assert (saved_pairs(paths), stopped.kept) == ([], {"critic": STEP, "actor": STEP})
    assert stopped.go_on() == []
    assert result(stopped.root) == expected
    assert stopped.kept == {}
    assert not paths.at_stop.exists()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_stop_abandons_stage_that_cannot_finish_in_time(
    folder: Path, expected: dict[str, object], number: signal.Signals, stage: str
) -> None:
    stopped = by_signal(folder / f"{number.name}-{stage}-late", number, stage, fits=False)
    assert f"at `{stage}` of step {STEP}" in stopped.error.message
    assert f"{STEP} {stage} starts" in stopped.moments[-1:]
    assert not RunPaths(stopped.root).stage(STEP, stage).exists()
    # An engine that was interrupted is not believed.
    assert (saved_pairs(RunPaths(stopped.root)), stopped.kept) == ([], {})
    stopped.go_on()
    assert result(stopped.root) == expected


@pytest.mark.parametrize("stage", STAGES)
def test_stage_that_exceeds_time_limit_is_not_started(folder: Path, expected: dict[str, object], stage: str) -> None:
    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP - 1} {stage} renamed":
            known = TimeLeft(stage_s=lambda name: 50.0 if name == stage else 0.0, save_s=lambda: 0.0, is_job=True)
            gate._time = replace(known, ends_at=gate.clock() + 50)

    stopped = stop(folder / f"limit-{stage}", act, TimeLeft(), nobody_asks)
    assert stopped.error.message.startswith(
        f"`{stage}` of step {STEP} was not started: with a save it takes about 55 s"
    )
    assert f"{STEP} {stage} starts" not in stopped.moments
    assert stopped.go_on() == []
    assert result(stopped.root) == expected


@pytest.mark.parametrize("after", ["stage", "step", "now"])
@pytest.mark.parametrize("stage", ["rollout", "values", "actor_update", "eval"])
def test_stop_request_is_obeyed_and_resume_matches(
    folder: Path,
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    after: str,
) -> None:
    monkeypatch.setattr(signals, "POLL_S", 0.01)
    asked: list[str] = []

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} {stage} starts":
            asked.append(after)
            if after == "now":
                signal.pause()  # the watch does not wait for the stage

    stopped = stop(folder / f"{after}-{stage}", act, TimeLeft(), lambda: asked[0] if asked else None)
    paths = RunPaths(stopped.root)
    assert stopped.error.exit_code == 130
    assert f"`ppoctl stop --after {after}`" in stopped.error.message
    assert (f"{STEP} {stage} renamed" in stopped.moments) == (after != "now")
    assert (f"{STEP} eval renamed" in stopped.moments) == (after == "step" or (stage, after) == ("eval", "stage"))
    if after == "step":
        assert saved_pairs(paths) == [STEP]
    replayed = stopped.go_on()
    assert replayed == [] or after == "now"
    assert result(stopped.root) == expected


def test_stop_saves_nothing_if_time_is_short(folder: Path, expected: dict[str, object]) -> None:
    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} reward starts":
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = stop(folder / "no-time", act, TimeLeft(save_s=lambda: 100.0, is_job=True), nobody_asks)
    assert (saved_pairs(RunPaths(stopped.root)), stopped.kept) == ([], {})
    assert len(stopped.go_on()) == 2  # the actor and the critic of the first step
    assert result(stopped.root) == expected


def test_damaged_state_of_stop_is_recreated_on_resume(folder: Path, expected: dict[str, object]) -> None:
    stopped = by_signal(folder / "damaged", signal.SIGTERM, "critic_update", fits=True)
    table = RunPaths(stopped.root).at_stop / "critic" / "table.bin"
    table.write_bytes(bytes(table.stat().st_size))
    assert [text.split(" (")[0] for text in stopped.go_on()] == [
        "replayed critic update of step 1",
        "replayed critic update of step 2",
    ]
    assert [text for text in stopped.said if "table.bin" in text and text.endswith("the state is computed again")]
    assert result(stopped.root) == expected


def test_stop_succeeds_if_states_cannot_be_written(folder: Path, expected: dict[str, object]) -> None:
    root = folder / "full"

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} critic_update starts":
            RunPaths(root).states.mkdir()
            RunPaths(root).at_stop.write_bytes(b"in the way")
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = stop(root, act, TimeLeft(), nobody_asks)
    assert stopped.error.exit_code == 75
    assert stopped.kept == {}
    RunPaths(root).at_stop.unlink()
    stopped.go_on()
    assert result(root) == expected


def test_repeated_stops_replay_no_updates(folder: Path, expected: dict[str, object]) -> None:
    root, stops, said = folder / "often", 0, list[str]()
    while saved_pairs(RunPaths(root))[-1:] != [3]:
        began: list[str] = []

        def act(gate: SignalGate, moment: str, began: list[str] = began) -> None:
            if moment.endswith("starts"):
                began.append(moment)
                if len(began) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

        with signal_gate("go on") as gate, gate.working(TimeLeft(), nobody_asks):
            witness = Witness(act=lambda _, moment, gate=gate, act=act: act(gate, moment))
            job = open_run(root, RECIPE, witness, gate=gate).job
            job.states.notify = said.append
            try:
                run(job)
            except PreemptedError:
                stops += 1
        assert stops < 30
    assert stops > 8
    assert not [text for text in said if text.startswith("replayed")]
    assert result(root) == expected
