"""Saved states and retention: what a state records, which checkpoint may be removed, and what counts as a
checkpoint."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fakes.bigram import BigramTrainer
from fakes.components import fake_recipe
from fakes.job import Wiring, Witness, open_run, play, result, saved_checkpoints, stop_at, undisturbed
from ppoctl.core.batch.records import Carry, State
from ppoctl.core.errors import HealthStopError, StorageError
from ppoctl.run.loop.steps import run, start_point
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import claim
from ppoctl.store.discard import repair
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.retention import Retention
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import Recorded, saved_state
from store.conftest import stops_from

EVERY_SECOND = {"checkpoint": {"every_steps": 2, "asynchronous": False}, "steps": 4}
WARMED = {"lr": 0.05, "lr_schedule": "linear", "lr_warmup_updates": 3}


def trainer(wiring: Wiring, role: str) -> BigramTrainer:
    return cast(BigramTrainer, wiring.job.states.engines[role])


def test_saved_state_has_its_updates_and_carry(tmp_path: Path) -> None:
    play(tmp_path / "run", fake_recipe(**EVERY_SECOND))
    for role in ("actor", "critic"):
        saved = saved_state(RunPaths(tmp_path / "run"), role, 4)
        assert saved is not None
        state, carry = saved
        assert (state.role, state.step, state.updates, carry.kl_coef) == (role, 4, 16, 0.05)


@pytest.mark.parametrize(
    "moment", ["3 advantages renamed", pytest.param("4 rollout starts", marks=pytest.mark.ci("3 advantages renamed"))]
)
def test_trained_totals_count_all_steps_and_survive_a_resume(tmp_path: Path, moment: str) -> None:
    layout = stop_at(tmp_path / "run", moment, **EVERY_SECOND)
    journal = play(layout.root, fake_recipe(**EVERY_SECOND)).job.journal
    num_tokens = [journal.metrics(step)["rollout/tokens"] for step in range(1, 5)]
    counted = [journal.metrics(step)["trained/tokens"] for step in range(1, 5)]
    assert counted == [sum(num_tokens[: step + 1]) for step in range(4)]
    assert [journal.metrics(step)["trained/seqs"] for step in range(1, 5)] == [8, 16, 24, 32]
    assert saved_state(layout, "actor", 4)[1].trained_tokens == counted[-1]


@pytest.mark.parametrize(
    "moment",
    [
        "4 state/actor writing",
        *(
            pytest.param(moment, marks=pytest.mark.ci("4 state/actor writing"))
            for moment in ("3 values starts", "4 critic_update written", "5 rollout starts")
        ),
    ],
)
def test_resume_from_a_checkpoint_equals_an_uninterrupted_run(tmp_path: Path, moment: str) -> None:
    tables = {**EVERY_SECOND, "steps": 5, "actor": {"optimizer": WARMED}, "critic": {"optimizer": WARMED}}
    layout = stop_at(tmp_path / "run", moment, **tables)
    play(layout.root, fake_recipe(**tables))
    assert result(layout.root) == undisturbed(**tables)


@pytest.mark.parametrize("schedule", [WARMED, {**WARMED, "lr_ticks": "step", "lr_warmup_updates": 4}])
def test_replay_counts_steps_and_updates_like_the_first_run(tmp_path: Path, schedule: dict[str, Any]) -> None:
    ppo = {"epochs": 1, "critic_epochs": 2, "minibatch_seqs": 4, "critic_only_steps": 1}
    tables = {"steps": 3, "ppo": ppo, "actor": {"optimizer": schedule}, "critic": {"optimizer": schedule}}
    tables["checkpoint"] = {"every_steps": 5}
    layout = stop_at(tmp_path / "run", "3 values starts", **tables)
    play(layout.root, fake_recipe(**tables))
    assert result(layout.root) == undisturbed(**tables)


def test_state_of_one_role_is_not_a_checkpoint(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 state/actor writing", **EVERY_SECOND)
    assert (layout.saved_steps("critic"), layout.saved_steps("actor"), saved_checkpoints(layout)) == ([2], [], [])
    wiring = open_run(layout.root, fake_recipe(**EVERY_SECOND), Witness())
    assert start_point(wiring.job)[0] == 0


def test_state_with_another_lineage_is_refused(tmp_path: Path) -> None:
    wiring = play(tmp_path / "run")
    state = State("actor", 3, 12, "another")
    with pytest.raises(StorageError, match="has a state that is not the result of step 3"):
        wiring.job.states.save(state, Carry(0.0), {}, Recorded(0, 0), healthy=True)


def test_trainer_with_a_failed_update_reloads_its_state(tmp_path: Path) -> None:
    wiring = open_run(tmp_path / "run", fake_recipe(), Witness())
    states, actor = wiring.job.states, trainer(wiring, "actor")
    start = states.initial["actor"]
    with suppress(ZeroDivisionError), states.advancing(start, to=replace(start, step=1, lineage="next")):
        actor.table += 1  # half an update
        raise ZeroDivisionError
    states.actor_at(start)
    assert actor.starts == 2


def test_replay_to_another_lineage_is_refused(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "4 rollout starts", **EVERY_SECOND)
    job = open_run(layout.root, fake_recipe(**EVERY_SECOND), Witness()).job
    as_recorded = job.states.replay
    assert as_recorded is not None
    job.states.replay = lambda *parts: replace(as_recorded(*parts), lineage="elsewhere")
    with pytest.raises(StorageError, match="recorded with other inputs or recipe keys"):
        run(job)


def test_inexact_replays_are_recorded_in_the_saved_state(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "4 rollout starts", **EVERY_SECOND)
    wiring = open_run(layout.root, fake_recipe(**EVERY_SECOND), Witness())
    actor = trainer(wiring, "actor")
    load = actor.load

    def load_with_rounding(folder: Path) -> None:
        load(folder)
        actor.table = actor.table * (1 + 1e-6)

    actor.load = load_with_rounding  # type: ignore[method-assign]
    run(wiring.job)
    assert [wiring.job.states.replays(role) for role in ("actor", "critic")] == [1, 0]
    states = open_run(layout.root, fake_recipe(**{**EVERY_SECOND, "steps": 5}), Witness()).job.states
    saved = saved_state(layout, "actor", 4)
    assert saved is not None
    assert states.stamped(saved[0]).stamp.endswith("+r1")


def test_health_stop_saves_an_unhealthy_checkpoint_that_can_resume(tmp_path: Path) -> None:
    tables = {"steps": 4, "checkpoint": {"every_steps": 5}}
    with pytest.raises(HealthStopError, match="step 2: policy/entropy_mean is"):
        play(tmp_path / "run", fake_recipe(**tables, health=stops_from(2)))
    paths = RunPaths(tmp_path / "run")
    assert saved_checkpoints(paths) == [2]
    assert [manifests.require(paths.state(role, 2)).extra["healthy"] for role in ("actor", "critic")] == [
        False,
        False,
    ]
    assert not paths.step(3).exists()
    play(paths.root, fake_recipe(**tables))
    assert result(paths.root) == undisturbed(**tables)


def test_last_healthy_checkpoint_outlives_unhealthy_checkpoints(tmp_path: Path) -> None:
    tables = {"steps": 4, "checkpoint": {"every_steps": 1, "keep_last": 2}}
    for step in (3, 4):
        with pytest.raises(HealthStopError):
            play(tmp_path / "run", fake_recipe(**tables, health=stops_from(step)))
    paths = RunPaths(tmp_path / "run")
    Retention(claim(paths), RecordedRun(paths).outlines, keep_last=2, keep_rollouts_every_steps=0).apply()
    assert saved_checkpoints(paths) == [1, 2, 3, 4]
    assert paths.stage(2, "actor_update").is_dir()


def test_half_removed_state_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = stop_at(
        tmp_path / "run",
        "4 rollout starts",
        checkpoint={"every_steps": 1, "keep_last": 3, "asynchronous": False},
        steps=4,
    )
    with monkeypatch.context() as killed:  # killed before the first file of a folder is removed
        killed.setattr(shutil, "rmtree", lambda folder, **options: None)
        Retention(claim(layout), RecordedRun(layout).outlines, keep_last=1, keep_rollouts_every_steps=0).apply()
    assert saved_checkpoints(layout) == [3]
    assert manifests.read(layout.stage(2, "rollout")) is None


def test_resume_from_an_older_checkpoint_gives_the_same_result(tmp_path: Path) -> None:
    tables = {"steps": 5, "checkpoint": {"every_steps": 2, "keep_last": 2, "asynchronous": False}}
    layout = stop_at(tmp_path / "run", "5 actor_update starts", **tables)
    assert (saved_checkpoints(layout), layout.stage(2, "actor_update").exists()) == ([2, 4], False)
    (layout.state("actor", 4) / "table.bin").unlink()
    repair(RecordedRun(layout), plan_resume(RecordedRun(layout)))
    play(layout.root, fake_recipe(**tables))
    assert result(layout.root) == undisturbed(**tables)


def test_unreachable_state_is_named(tmp_path: Path) -> None:
    wiring = play(tmp_path / "run")
    with pytest.raises(StorageError, match=r"no saved state and no recorded update leads to actor@3:unknown"):
        wiring.job.states.actor_at(State("actor", 3, 12, "unknown"))


def test_best_actor_of_a_regenerated_step_is_replaced(tmp_path: Path) -> None:
    tables = {"steps": 1, "checkpoint": {"best": "eval/held/pass_at_1", "every_steps": 5}}
    layout = stop_at(tmp_path / "run", "1 state/critic writing", **tables)
    for step in layout.committed_steps():
        shutil.rmtree(layout.step(step))
    again = play(layout.root, fake_recipe(**tables, seed=9))
    manifest = manifests.read(layout.best / "000001")
    assert manifest is not None
    assert manifest.identity == start_point(again.job)[1]["actor"].lineage
