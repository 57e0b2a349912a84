"""Resume: reused, refused and moved-aside artifacts, and samples of an unfinished rollout."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import pytest
import torch

from fakes.components import BigramGenerator, EvenScorer, fake_components, fake_recipe
from fakes.job import BuiltStages, StopError, Stops, Witness, open_run, play, result, stop_at, undisturbed
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.cli.app import run as run_command
from ppoctl.core.errors import CorruptArtifactError, PreemptedError, StorageError, SupersededError
from ppoctl.core.ports import Sample, SampleSetKey
from ppoctl.run.loop.steps import run
from ppoctl.run.shutdown.signals import signal_gate
from ppoctl.run.shutdown.time_left import TimeLeft, unknown
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.discard import repair
from ppoctl.store.finished_samples import FinishedSampleFiles, decoded
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import MANIFEST, RunPaths

REDO = {"checkpoint": {"every_steps": 5}}
ONE = SampleSetKey(1, "rollout", "one")


def a_sample(key: str) -> Sample:
    return Sample(key, (2, 1), (-0.5, -0.25), True, "2 1", "actor@0:aa")


def test_stage_made_from_other_inputs_is_refused(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "1 values starts", **REDO)
    other = stop_at(tmp_path / "other", "1 values starts", **REDO, seed=4)
    rmtree(layout.stage(1, "reward"))
    other.stage(1, "reward").rename(layout.stage(1, "reward"))
    with pytest.raises(StorageError, match="20-reward` was created from other inputs"):
        play(layout.root, fake_recipe(**REDO))


def test_damage_to_eval_samples_is_named(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    samples = layout.stage(2, "eval") / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-1] + b" ")
    with pytest.raises(CorruptArtifactError, match=r"80-eval/samples\.jsonl"):
        play(layout.root, fake_recipe(**REDO))


def test_no_stage_starts_after_a_stop_request(tmp_path: Path) -> None:
    witness, gate = Witness(), Stops(when=lambda gate: True)
    with pytest.raises(PreemptedError):
        run(open_run(tmp_path / "run", fake_recipe(), witness, gate=gate).job)
    assert witness.moments == []
    assert gate.at == (0, "eval")


def test_finished_samples_of_a_stopped_rollout_are_not_regenerated(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "inside rollout after 4 samples", steps=1)
    assert len(list(layout.parts(1, "rollout").iterdir())) == 1
    wiring = open_run(layout.root, fake_recipe(steps=1, eval={"at_start": False}), Witness())
    generator = cast(BigramGenerator, wiring.generator)
    stages, actor = BuiltStages(wiring.job, 1), wiring.job.states.initial["actor"]
    wiring.job.runner.at(1)(stages.rollout, actor, wiring.job.prompts(1))
    assert generator.num_generated == 4
    run(wiring.job)
    assert result(layout.root)["states"] == undisturbed(steps=1)["states"]


@pytest.mark.parametrize("source", ["sampler", pytest.param("current", marks=pytest.mark.ci("sampler"))])
def test_run_without_old_logprobs_resumes_to_the_same_result(tmp_path: Path, source: str) -> None:
    kl = {"place": "loss", "coef": 0.05}
    tables = {"steps": 2, "ppo": {"epochs": 1, "minibatch_seqs": 8, "kl": kl, "old_logprobs": source}}
    for moment in ("2 logprobs starts", "2 logprobs renamed", "2 actor_update starts", "2 actor_update renamed"):
        layout = stop_at(tmp_path / moment, moment, **tables)
        play(layout.root, fake_recipe(**tables))
        assert result(layout.root)["states"] == undisturbed(**tables)["states"]


EVALUATED = 4 + 4 * 1
"""Samples of an evaluation on fakes: four prompts, greedy and sampled."""


def test_stopped_evaluation_generates_only_missing_samples(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", f"inside eval after {EVALUATED // 2} samples", steps=1)
    assert len(list(layout.parts(0, "eval").iterdir())) == 1
    assert run_command(["status", str(layout.root)]) == 0
    assert not plan_resume(RecordedRun(layout)).broken
    wiring = open_run(layout.root, fake_recipe(steps=1), Witness())
    generator = cast(BigramGenerator, wiring.generator)
    stage = BuiltStages(wiring.job, 0).eval
    assert stage is not None
    wiring.job.runner.at(0)(stage, wiring.job.states.initial["actor"])
    assert generator.num_generated == EVALUATED - EVALUATED // 2
    assert not layout.parts(0, "eval").exists()
    run(wiring.job)
    assert result(layout.root) == undisturbed(steps=1)


def test_signal_stops_an_evaluation_after_the_current_sample(tmp_path: Path) -> None:
    def act(number: int, name: str) -> None:
        if name == f"inside eval after {EVALUATED // 2} samples" and not paths.has_committed(1):
            os.kill(os.getpid(), signal.SIGTERM)

    paths = RunPaths(tmp_path / "run")
    with signal_gate("ppoctl resume runs/mine") as gate, gate.working(TimeLeft(), unknown):
        wiring = open_run(paths.root, fake_recipe(steps=1), Witness(act=act), gate=gate)
        with pytest.raises(PreemptedError, match="stopped by SIGTERM at `eval` of step 0"):
            run(wiring.job)
    assert cast(BigramGenerator, wiring.generator).num_generated == EVALUATED // 2
    again = play(paths.root, fake_recipe(steps=1))
    assert (
        cast(BigramGenerator, again.generator).num_generated == EVALUATED // 2 + 8 + EVALUATED
    )  # step 0, step 1, its eval
    assert result(paths.root) == undisturbed(steps=1)


def test_evaluation_keeps_samples_if_its_scorer_fails(tmp_path: Path) -> None:
    class Fails(EvenScorer):
        def submit(self, request: Any) -> Any:
            raise StopError

    recipe, root = fake_recipe(steps=1), tmp_path / "run"
    wiring = open_run(root, recipe, Witness(), components=replace(fake_components(recipe), scorer=Fails()))
    with pytest.raises(StopError):
        run(wiring.job)
    again = play(root, recipe)
    assert cast(BigramGenerator, again.generator).num_generated == 8 + EVALUATED  # step 1 and its evaluation


def test_finished_samples_load_only_for_their_key_and_if_intact(paths: RunPaths) -> None:
    parts = FinishedSampleFiles(paths, claim(paths), every_s=1e-9)
    with parts.writer(ONE) as keep:
        keep(a_sample("p#0"))
    assert parts.load(ONE) == {"p#0": a_sample("p#0")}
    assert parts.load(replace(ONE, fingerprint="other")) == {}
    (path,) = paths.parts(1, "rollout").iterdir()
    whole = path.read_bytes()
    for torn in (whole.replace(b"\2\0\0\0\1\0\0\0", b"\3\0\0\0\1\0\0\0"), whole[:-1], b""):
        assert torn != whole
        path.write_bytes(torn)
        assert parts.load(ONE) == {}


@pytest.mark.parametrize("to_the_end", [True, False])
def test_last_samples_are_written_after_a_normal_end_only_on_request(paths: RunPaths, to_the_end: bool) -> None:
    parts = FinishedSampleFiles(paths, claim(paths), every_s=float("inf"))
    with parts.writer(ONE, to_the_end=to_the_end) as keep:
        keep(a_sample("p#0"))
    assert parts.load(ONE) == ({"p#0": a_sample("p#0")} if to_the_end else {})


def test_each_sample_is_written_to_one_file(paths: RunPaths) -> None:
    parts = FinishedSampleFiles(paths, claim(paths), every_s=1e-9)
    with parts.writer(ONE) as keep:
        for number in range(3):
            keep(a_sample(f"p#{number}"))
    written = [decoded(path.read_bytes(), ONE.fingerprint) for path in sorted(paths.parts(1, "rollout").iterdir())]
    assert written == [[a_sample(f"p#{number}")] for number in range(3)]


def test_leftover_samples_are_removed_when_their_stage_is_reused(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "1 reward starts", steps=1)
    with FinishedSampleFiles(layout, claim(layout), every_s=1e-9).writer(ONE) as keep:
        keep(a_sample("p#0"))
    assert layout.parts(1, "rollout").exists()
    play(layout.root, fake_recipe(steps=1))
    assert not layout.parts(1, "rollout").exists()


def test_finished_samples_round_trip(paths: RunPaths) -> None:
    odd = Sample(
        "p#1",
        (151_000,),
        (-1 / 3,),
        False,
        'an "\u00e4"\n\U0001f600',
        "actor@0:aa+r1",
        sends=2,
        experts=b"\x07\xff\x00",
    )
    parts = FinishedSampleFiles(paths, claim(paths), every_s=float("inf"))
    with suppress(StopError), parts.writer(ONE) as keep:
        keep(a_sample("p#0"))
        keep(odd)
        raise StopError
    found = parts.load(ONE)
    # A record stores log-probs as float32, too.
    assert found == {"p#0": a_sample("p#0"), "p#1": replace(odd, logprobs=found["p#1"].logprobs)}
    assert found["p#1"].logprobs == tuple(torch.tensor(odd.logprobs).tolist())


def test_finished_samples_in_the_old_format_are_regenerated(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "inside rollout after 4 samples", steps=1)
    (part,) = layout.parts(1, "rollout").iterdir()
    old = b'{"fingerprint": "", "samples": []}'
    part.with_name(f"1-00000-{sha256(old).hexdigest()[:16]}.json").write_bytes(old)
    part.unlink()
    play(layout.root, fake_recipe(steps=1))
    assert result(layout.root) == undisturbed(steps=1)
    assert not layout.parts(1, "rollout").exists()


def test_superseded_attempt_writes_no_finished_samples(paths: RunPaths) -> None:
    parts = FinishedSampleFiles(paths, claim(paths), every_s=1e-9)
    claim(paths)
    with pytest.raises(SupersededError), parts.writer(ONE) as keep:
        keep(a_sample("p#0"))
    assert not paths.parts(1, "rollout").exists()


def test_missing_stage_is_named_and_later_stages_are_moved_aside(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 critic_update starts", **REDO)
    rmtree(layout.stage(1, "values"))
    plan = plan_resume(RecordedRun(layout))
    assert [(item.name, item.action) for item in plan.broken] == [("steps/000001/30-values", "missing")]
    with pytest.raises(StorageError, match=r"`steps/000001/30-values` \(missing\)"):
        plan.require_intact(layout)
    whole, moved = repair(RecordedRun(layout), plan)
    names = trace(PPO).outline.names
    after = [f"steps/000001/{layout.stage(1, name).name}" for name in names[3:]]
    second = [f"steps/000002/{layout.stage(2, name).name}" for name in names[:5]]
    assert moved == [f"moved aside {name}" for name in after + second]
    assert not whole.broken
    assert not plan_resume(RecordedRun(layout)).broken
    assert sorted(path.name for path in layout.step(1).iterdir()) == ["10-rollout", "20-reward"]


def test_earlier_recipe_change_replaces_a_later_change(paths: RunPaths) -> None:
    for step in (1, 5, 3):
        run_dir.change_recipe(claim(paths), {"from": step}, from_step=step)
    assert RecordedRun(paths).recipes == {1: {"from": 1}, 3: {"from": 3}}


def test_stage_folder_without_manifest_is_rerun(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 values starts", **REDO)
    (layout.stage(2, "reward") / MANIFEST).unlink()  # as after a kill during its removal
    play(layout.root, fake_recipe(**REDO))
    assert result(layout.root) == undisturbed(**REDO)


@pytest.mark.parametrize(
    "stage", ["60-critic_update", pytest.param("70-actor_update", marks=pytest.mark.ci("60-critic_update"))]
)
def test_records_older_than_the_checkpoint_are_not_read(tmp_path: Path, stage: str) -> None:
    # The folders of steps before a checkpoint remain until the next checkpoint. None of them is in the plan, so none
    # may be required.
    tables = {"steps": 5, "checkpoint": {"every_steps": 3}}
    half = stop_at(tmp_path / "half", "4 actor_update starts", **tables)
    record = half.step(1) / stage / "record.safetensors"
    record.unlink()
    assert plan_resume(RecordedRun(half)).start == 3
    play(half.root, fake_recipe(**tables))
    assert result(half.root) == undisturbed(**tables)
