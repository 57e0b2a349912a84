"""The journal's times of a step: start-up is in no stage, sending weights is not generation, and loaded samples were
not generated. The clock is advanced by hand: 30 s to start, 2 s to send weights, 0.5 s per sample."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.clock import Clock
from fakes.components import BigramGenerator, fake_components, fake_recipe
from fakes.job import Stops, Witness, open_run
from ppoctl.core.batch.records import Rollouts, State
from ppoctl.core.clock import WORK
from ppoctl.core.errors import PreemptedError
from ppoctl.core.ports import Actor, Gate, Sample, SampleRequest, SamplingParams
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record

RECIPE = fake_recipe(steps=1, eval={"at_start": False})
"""Eight samples a step."""


class SlowGenerator(BigramGenerator):
    def __init__(self, actor_at: Callable[[State], Actor], clock: Clock) -> None:
        super().__init__(actor_at)
        self.clock = clock
        self.is_started = False

    def prepare(self, state: State) -> None:
        if not self.is_started:
            with WORK.stopped():
                self.clock.now += 30.0
            self.is_started = True
        if self.lineage != state.lineage:
            self.clock.now += 2.0
        super().prepare(state)

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        self.clock.now += 0.5
        return super().generate(request, params)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def play(root: Path, clock: Clock, gate: Gate | None = None) -> None:
    components = replace(
        fake_components(RECIPE), generator=lambda actor_at, notify, logs: SlowGenerator(actor_at, clock)
    )
    run(open_run(root, RECIPE, Witness(), gate=gate, components=components).job)


def rollout_line(root: Path) -> JournalLine:
    [line] = [line for line in read_lines(RunPaths(root).journal) if line.get("stage") == "rollout"]
    return line


def test_rollout_time_excludes_startup_and_generation_excludes_sync(tmp_path: Path, clock: Clock) -> None:
    play(tmp_path / "run", clock)
    line = rollout_line(tmp_path / "run")
    assert line["seconds"] == 2.0 + 8 * 0.5
    tokens = line["figures"]["rollout/tokens"]
    assert tokens == 8 * line["figures"]["rollout/response_tokens_mean"]
    assert line["clocked"] == {
        "throughput/generated_tokens_per_s": tokens / (8 * 0.5),
        "time/generation_s": 8 * 0.5,
        "time/transfer_s": 0.0,
    }


def test_loaded_samples_do_not_count_as_generated(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(PreemptedError):
        play(tmp_path / "run", clock, Stops(when=lambda gate: gate.between_calls == 5))
    play(tmp_path / "run", clock)
    whole = tmp_path / "whole"
    play(whole, clock)
    line, undisturbed = rollout_line(tmp_path / "run"), rollout_line(whole)
    assert line["figures"] == undisturbed["figures"]
    # The fake generates the last request first: five samples were kept, the first three are generated now.
    paths = RunPaths(tmp_path / "run")
    manifest = manifests.read(paths.stage(1, "rollout"))
    assert manifest is not None
    rollouts = load_record(paths, 1, "rollout", manifest)
    assert isinstance(rollouts, Rollouts)
    rate = int(rollouts.lengths[:3].sum()) / (3 * 0.5)
    assert line["clocked"] == {
        "throughput/generated_tokens_per_s": rate,
        "time/generation_s": 3 * 0.5,
        "time/transfer_s": 0.0,
    }
    assert line["seconds"] == 2.0 + 3 * 0.5
