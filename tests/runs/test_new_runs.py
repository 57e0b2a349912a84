"""Names of new runs, the recorded sources of a run, and what MLflow receives about it."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import PPO_STEP_FUNCTIONS, StopError, new_run_dir, open_run, play, stopping_at
from fakes.step_functions import TWO_ROUNDS
from ppoctl.algorithms.trace import trace
from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.core.clock import WORK
from ppoctl.core.errors import StorageError
from ppoctl.models.convert.model_files import companions_digest
from ppoctl.recipe.loading.load import load
from ppoctl.run.loop.steps import run
from ppoctl.run.mlflow_extras import contract_of, trained_on
from ppoctl.run.new_run import ROLLOUT, TRAIN, holds_only_rollouts, is_replaceable
from ppoctl.run.session import AttemptObserver
from ppoctl.run.wire.engines import read_prompts
from ppoctl.run.wire.sources import (
    CLOCK,
    COMPANIONS,
    clock_notes,
    clock_of,
    companions_of,
    require_same_sources,
    same_companions,
    source_digests,
    weights_and_configs,
)
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import StepRecords
from preflight.conftest import folder as folder  # a fixture
from rewards.reward_models import QUICKSTART, reward_model


def made(root: Path, **facts: Any) -> RunPaths:
    return new_run_dir(root, {"steps": 3, **PPO_STEP_FUNCTIONS}, **facts)


def test_run_that_never_began_is_replaceable_unless_submitted(tmp_path: Path) -> None:
    assert is_replaceable(made(tmp_path / "new"))
    assert not is_replaceable(made(tmp_path / "submitted", on="slurm"))
    noted = made(tmp_path / "noted")
    record(noted, JobRecord("7", 1.0, "resume"))
    assert not is_replaceable(noted)
    assert not is_replaceable(RunPaths(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("command", "moment", "only"),
    [
        (ROLLOUT, "1 values starts", True),
        (ROLLOUT, "1 logprobs starts", False),
        (ROLLOUT, "1 advantages starts", False),
        (TRAIN, "1 values starts", False),
    ],
)
def test_run_with_only_untrained_rollouts_is_recognized(
    tmp_path: Path, command: str, moment: str, only: bool
) -> None:
    layout = made(tmp_path / "run", command=command)
    with pytest.raises(StopError):
        run(open_run(layout.root, fake_recipe(), stopping_at(moment)).job)
    assert holds_only_rollouts(layout) == only


def test_changed_or_missing_source_is_named(tmp_path: Path) -> None:
    layout = made(tmp_path / "run", sources={"model": "a" * 64, "data.train": "b" * 64})
    require_same_sources(RecordedRun(layout), {"model": "a" * 64, "data.train": "b" * 64, "tokenizer": "c" * 64})
    with pytest.raises(StorageError, match=r"`data\.train` is not what .* \(digest cccccccccccc, recorded bbb"):
        require_same_sources(RecordedRun(layout), {"model": "a" * 64, "data.train": "c" * 64})
    with pytest.raises(StorageError, match=r"`data\.train` is not what .* \(digest absent, recorded bbb"):
        require_same_sources(RecordedRun(layout), {"model": "a" * 64})


def test_clock_of_a_run_is_recorded_or_its_creation(tmp_path: Path) -> None:
    recorded = made(tmp_path / "run", sources={"clock": "2024-07-26T13:05:00"})
    assert clock_of(RecordedRun(recorded)) == datetime(2024, 7, 26, 13, 5)
    older = made(tmp_path / "older", created=datetime(2024, 7, 26, 14, 0, 0, 7).timestamp())
    assert clock_of(RecordedRun(older)) == datetime(2024, 7, 26, 14)
    assert clock_notes({"clock": "2024-07-26T13:05:00"})[0].endswith("has the time 2024-07-26T13:05:00")


def test_clock_is_a_source_of_runs_whose_templates_read_it(folder: Path) -> None:
    recipe, clock = load([folder / "r.toml"]).recipe, datetime(2024, 7, 26, 13, 5)
    assert CLOCK not in source_digests(recipe, read_prompts(recipe, clock))
    text = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    (folder / "base/chat_template.jinja").write_text(text, "utf-8")
    prompts = read_prompts(recipe, clock)
    assert prompts.train[0].text.startswith("26 Jul 2024 0 + 1?")
    assert source_digests(recipe, prompts)[CLOCK] == "2024-07-26T13:05:00"
    assert CLOCK not in source_digests(recipe, read_prompts(recipe))


def test_companion_files_are_compared_per_role(tmp_path: Path) -> None:
    critic = reward_model(tmp_path / "critic")
    recipe = fake_recipe(model={"path": str(QUICKSTART), "dtype": "float32", "critic": {"path": str(critic)}})
    digests = {COMPANIONS: companions_digest(QUICKSTART), companions_of("critic"): companions_digest(critic)}
    layout = made(tmp_path / "run", sources=digests)
    assert [same_companions(RecordedRun(layout), recipe, role) for role in ("actor", "critic")] == [
        QUICKSTART,
        critic,
    ]
    (critic / "config.json").write_text("{}", "utf-8")
    same_companions(RecordedRun(layout), recipe, "actor")
    with pytest.raises(StorageError, match="is not what run"):
        same_companions(RecordedRun(layout), recipe, "critic")


def test_model_files_are_weights_and_configs_that_affect_results(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.distcp", "config.json", "generation_config.json", "tokenizer.json", "notes.md"):
        (tmp_path / name).write_text("x", "utf-8")
    names = [path.name for path in weights_and_configs(tmp_path)]
    assert names == ["a.distcp", "b.safetensors", "config.json", "generation_config.json"]


def test_second_round_has_the_fingerprint_of_the_first() -> None:
    recipe, rounds = fake_recipe(), trace(TWO_ROUNDS)
    assert rounds["rollout.2"].fingerprint(recipe) == rounds["rollout"].fingerprint(recipe)
    scored = [rounds[name].fingerprint(recipe, "judge") for name in ("reward", "reward.2", "reward.3")]
    assert len(set(scored)) == 1
    assert scored[0] != rounds["reward"].fingerprint(recipe)
    assert "another" not in rounds


def test_starting_time_excludes_replays() -> None:
    watcher = AttemptObserver(SimpleNamespace(), None, None, lambda _: False)  # type: ignore[arg-type]
    wall, work = watcher.began
    watcher.began = (wall - 10.0, work - 4.0)
    watcher.replayed_s = 2.0
    lost = watcher.lost()
    assert (lost["starting_s"], lost["replayed_s"]) == (pytest.approx(4.0, abs=0.5), 2.0)
    assert lost["abandoned_s"] == 0.0
    watcher.unkept_since = WORK.now() - 3.0
    assert watcher.lost()["abandoned_s"] == pytest.approx(3.0, abs=0.5)


def test_mlflow_gets_samples_evenly_spaced_over_a_step(tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 5, "samples_per_prompt": 4, "max_prompt_tokens": 4, "max_new_tokens": 6}
    play(tmp_path / "run", fake_recipe(steps=1, rollout=rollout))
    paths = RunPaths(tmp_path / "run")
    records = StepRecords.read(RecordedRun(paths), 1)
    shown = [(row["response"], row["reward"], row["mean advantage"]) for row in trained_on(paths, 1)]
    every = [(row.response, row.score, row.advantage) for row in records.rows()]
    # Eight of twenty.
    assert shown == [every[row] for row in (0, 2, 5, 7, 10, 12, 15, 17)]
    assert trained_on(paths, 2) == ()


def test_expectations_are_reported_after_the_last_step(tmp_path: Path) -> None:
    expect = {"reward/score_mean": {"min": 0.5}, "policy/lr": {"max": 0.5}}
    paths = new_run_dir(tmp_path / "run", {"steps": 2, "expect": expect, **PPO_STEP_FUNCTIONS})
    lines = [
        {"seq": step, "step": step, "stage": stage, "seconds": 1.0, "figures": metrics, "clocked": {}}
        for step in (1, 2)
        for stage, metrics in (("reward", {"reward/score_mean": 1.0}), ("actor_update", {"policy/lr": 0.9}))
    ]
    paths.journal.write_bytes(b"".join(map(sealed_line, lines[:2])))
    assert contract_of(paths) == {}
    # A run that [until] ended after step 1 is judged, too.
    about = {"seq": 3, "attempt": 1, "at": 1.0}
    attempt = [
        {**about, "event": "attempt_started", "pid": 1, "host": "elsewhere"},
        {**about, "event": "attempt_ended", "status": "unmet", "exit_code": 5, "until": "`a` is 1"},
    ]
    for until, is_judged in ((attempt, True), (attempt[:1], False)):
        paths.journal.write_bytes(b"".join(map(sealed_line, [*lines[:2], *until])))
        assert (contract_of(paths).get("ppoctl.contract") == "unmet") is is_judged
    paths.journal.write_bytes(b"".join(map(sealed_line, lines)))
    found = contract_of(paths)
    assert found.pop("ppoctl.contract") == "unmet"
    assert sorted(verdict.rpartition(": ")[2] for verdict in found.values()) == ["met", "unmet"]
