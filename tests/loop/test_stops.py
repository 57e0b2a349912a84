"""Runs on fakes are stopped in every stage by every means, then resumed: they end as an undisturbed run does, and
states that there was time to save are not replayed."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, open_run, result, saved_checkpoints
from ppoctl.core.errors import InterruptedByUserError, PpoctlError, PreemptedError
from ppoctl.run.loop.steps import run
from ppoctl.run.shutdown.signals import SignalGate, signal_gate
from ppoctl.run.shutdown.time_left import TimeLeft
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths

BEFORE_TRAINING = ("rollout", "reward", "values", "logprobs", "advantages")
STAGES = (*BEFORE_TRAINING, "critic_update", "actor_update", "eval")
IN_PIECES = ("rollout", "reward", "eval")
"""Stages that can end between two samples."""
RECIPE = fake_recipe(steps=3, checkpoint={"every_steps": 3}, eval={"every_steps": 1})
"""No state is saved before the end except by a stop."""
STEP = 2
"""Step in which the runs are stopped."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
DAILY: dict[str, tuple[Sequence[object], ...]] = {
    "rollout": ([signal.SIGUSR1], ["stage", "step"]),
    "values": ([signal.SIGTERM], ["now"]),
    "critic_update": ([signal.SIGINT], ["step"]),
    "actor_update": ([signal.SIGUSR1], ["stage", "now"]),
    "eval": ([signal.SIGTERM], ["stage", "now"]),
}
"""Each kind of stage (before training, in pieces or not; each update; after training), with the signals and the
requests that stop it in CI."""


def cases(place: int, kinds: Sequence[object], first: Collection[tuple[str, object]]) -> list[Any]:
    """Return all pairs of a stage and a kind of stop. `make test` runs `first`, CI also those that `DAILY` has
    at this place; the others are slow."""

    def marks(stage: str, kind: object) -> list[pytest.MarkDecorator]:
        if (stage, kind) in first:
            return []
        return [OTHER_STAGES if kind in DAILY.get(stage, ([], []))[place] else pytest.mark.slow]

    return [pytest.param(stage, kind, marks=marks(stage, kind)) for stage in STAGES for kind in kinds]


OTHER_STAGES = pytest.mark.ci("stages of another kind")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Use memory if possible: the drill flushes thousands of files."""
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
    messages: list[str] = field(default_factory=list)

    @property
    def kept(self) -> dict[str, int]:
        """Role -> step of the state that the stop saved, other than those of the steps."""
        paths = RunPaths(self.root)
        found = {role: manifests.read(paths.at_stop / role) for role in ("actor", "critic")}
        return {role: manifest.step for role, manifest in found.items() if manifest is not None}

    def go_on(self) -> list[str]:
        """Finish the run. Return the messages about replays."""
        job = open_run(self.root, RECIPE, Witness()).job
        job.states.notify = self.messages.append
        run(job)
        return [text for text in self.messages if text.startswith("replayed")]


def stop(
    root: Path, act: Callable[[SignalGate, str], None], time_left: TimeLeft, stop_request: Callable[[], str | None]
) -> Stopped:
    """Run until the gate ends it. `act` is called at each moment."""
    with signal_gate("go on") as gate:
        gate.poll_s = 0.01
        witness = Witness(act=lambda _, moment: act(gate, moment))
        job = open_run(root, RECIPE, witness, gate=gate).job
        with gate.working(time_left, stop_request), pytest.raises((PreemptedError, InterruptedByUserError)) as raised:
            run(job)
    return Stopped(root, raised.value, witness.moments)


def no_stop_request() -> None:
    """Report no request to stop."""


SLOW = TimeLeft(stage_s=lambda _: 1000.0, is_job=True)


@cache
def by_signal(root: Path, number: signal.Signals, stage: str, *, fits: bool) -> Stopped:
    """Run until this signal arrives at the start of the stage."""

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} {stage} starts":
            if not fits:
                gate._time = replace(gate._time, ends_at=gate.clock() + 60)
            os.kill(os.getpid(), number)

    return stop(root, act, TimeLeft() if fits else SLOW, no_stop_request)


@pytest.mark.parametrize(
    ("stage", "number"),
    cases(
        0,
        SIGNALS,
        [("rollout", signal.SIGUSR1), ("critic_update", signal.SIGINT), ("actor_update", signal.SIGUSR1)],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_stop_commits_finishing_stage_and_saves_states(
    folder: Path, expected: dict[str, object], number: signal.Signals, stage: str
) -> None:
    stopped = by_signal(folder / f"{number.name}-{stage}", number, stage, fits=True)
    paths = RunPaths(stopped.root)
    assert stopped.error.exit_code == (130 if number == signal.SIGINT else 75)
    if stage not in IN_PIECES:
        assert f"{STEP} {stage} renamed" in stopped.moments
    # Roles at the last finished step get a checkpoint. Otherwise each role's current state is kept separately.
    if stage in BEFORE_TRAINING:
        assert (saved_checkpoints(paths), stopped.kept) == ([STEP - 1], {})
    elif stage == "critic_update":
        assert (saved_checkpoints(paths), stopped.kept) == ([], {"critic": STEP, "actor": STEP - 1})
    else:
        assert (saved_checkpoints(paths), stopped.kept) == ([], {"critic": STEP, "actor": STEP})
    assert stopped.go_on() == []
    assert result(stopped.root) == expected
    assert stopped.kept == {}
    assert not paths.at_stop.exists()


@pytest.mark.parametrize(
    ("stage", "number"),
    cases(0, SIGNALS, [("values", signal.SIGTERM), ("critic_update", signal.SIGINT)]),
    ids=lambda value: getattr(value, "name", value),
)
def test_stop_abandons_stage_that_cannot_finish_in_time(
    folder: Path, expected: dict[str, object], number: signal.Signals, stage: str
) -> None:
    stopped = by_signal(folder / f"{number.name}-{stage}-late", number, stage, fits=False)
    assert f"at `{stage}` of step {STEP}" in stopped.error.message
    assert f"{STEP} {stage} starts" in stopped.moments[-1:]
    assert not RunPaths(stopped.root).stage(STEP, stage).exists()
    # The state of an interrupted trainer is not trusted.
    assert (saved_checkpoints(RunPaths(stopped.root)), stopped.kept) == ([], {})
    stopped.go_on()
    assert result(stopped.root) == expected


@pytest.mark.parametrize(
    "stage",
    [
        *("rollout", "actor_update"),
        *(pytest.param(stage, marks=OTHER_STAGES) for stage in ("values", "critic_update", "eval")),
        *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES if stage not in DAILY),
    ],
)
def test_stage_that_exceeds_time_limit_is_not_started(folder: Path, expected: dict[str, object], stage: str) -> None:
    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP - 1} {stage} renamed":
            known = TimeLeft(stage_s=lambda name: 50.0 if name == stage else 0.0, save_s=lambda: 0.0, is_job=True)
            gate._time = replace(known, ends_at=gate.clock() + 50)

    stopped = stop(folder / f"limit-{stage}", act, TimeLeft(), no_stop_request)
    assert stopped.error.message.startswith(
        f"`{stage}` of step {STEP} was not started: with a save it takes about 55 s"
    )
    assert f"{STEP} {stage} starts" not in stopped.moments
    assert stopped.go_on() == []
    assert result(stopped.root) == expected


@pytest.mark.parametrize(
    ("stage", "after"),
    cases(
        1,
        ["stage", "step", "now"],
        [("rollout", "step"), ("values", "now"), ("actor_update", "stage"), ("eval", "stage")],
    ),
)
def test_stop_request_is_obeyed_and_resume_matches(
    folder: Path,
    expected: dict[str, object],
    stage: str,
    after: str,
) -> None:
    stop_requests: list[str] = []

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} {stage} starts":
            stop_requests.append(after)
            if after == "now":
                time.sleep(60)  # the watching thread does not wait for the stage

    stopped = stop(folder / f"{after}-{stage}", act, TimeLeft(), lambda: stop_requests[0] if stop_requests else None)
    paths = RunPaths(stopped.root)
    assert stopped.error.exit_code == 130
    assert f"`ppoctl stop --after {after}`" in stopped.error.message
    assert (f"{STEP} {stage} renamed" in stopped.moments) == (after != "now")
    assert (f"{STEP} eval renamed" in stopped.moments) == (after == "step" or (stage, after) == ("eval", "stage"))
    if after == "step":
        assert saved_checkpoints(paths) == [STEP]
    replayed = stopped.go_on()
    assert replayed == [] or after == "now"
    assert result(stopped.root) == expected


def test_stop_saves_nothing_if_time_is_short(folder: Path, expected: dict[str, object]) -> None:
    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} reward starts":
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = stop(folder / "no-time", act, TimeLeft(save_s=lambda: 100.0, is_job=True), no_stop_request)
    assert (saved_checkpoints(RunPaths(stopped.root)), stopped.kept) == ([], {})
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
    assert [text for text in stopped.messages if "table.bin" in text and text.endswith("the state is computed again")]
    assert result(stopped.root) == expected


def test_stop_succeeds_if_states_cannot_be_written(folder: Path, expected: dict[str, object]) -> None:
    root = folder / "full"

    def act(gate: SignalGate, moment: str) -> None:
        if moment == f"{STEP} critic_update starts":
            RunPaths(root).states.mkdir()
            RunPaths(root).at_stop.write_bytes(b"in the way")
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = stop(root, act, TimeLeft(), no_stop_request)
    assert stopped.error.exit_code == 75
    assert stopped.kept == {}
    RunPaths(root).at_stop.unlink()
    stopped.go_on()
    assert result(root) == expected


def test_repeated_stops_replay_no_updates(folder: Path, expected: dict[str, object]) -> None:
    root, stops, messages = folder / "often", 0, list[str]()
    while saved_checkpoints(RunPaths(root))[-1:] != [3]:
        began: list[str] = []

        def act(gate: SignalGate, moment: str, began: list[str] = began) -> None:
            if moment.endswith("starts"):
                began.append(moment)
                if len(began) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

        with signal_gate("go on") as gate, gate.working(TimeLeft(), no_stop_request):
            witness = Witness(act=lambda _, moment, gate=gate, act=act: act(gate, moment))
            job = open_run(root, RECIPE, witness, gate=gate).job
            job.states.notify = messages.append
            try:
                run(job)
            except PreemptedError:
                stops += 1
        assert stops < 30
    assert stops > 8
    assert not [text for text in messages if text.startswith("replayed")]
    assert result(root) == expected
