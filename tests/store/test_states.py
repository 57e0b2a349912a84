"""States: the nearest ancestor is loaded, the rest is replayed, and a replay that differs is detected."""

import shutil
from pathlib import Path
from typing import cast

import pytest

from fakes.bigram import BigramTrainer
from fakes.components import fake_recipe
from fakes.job import (
    StopError,
    Stops,
    Witness,
    open_run,
    play,
    result,
    saved_checkpoints,
    stop_at,
    stopping_at,
    undisturbed,
)
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.core.errors import PreemptedError, StorageError
from ppoctl.recipe.parallel import saved_layout
from ppoctl.run.loop.steps import run, start_point
from ppoctl.store import manifest as manifests
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import largest_gap

EVERY_SECOND = {"checkpoint": {"every_steps": 2}, "steps": 4}


def trainers(wiring: object) -> dict[str, BigramTrainer]:
    return cast(dict[str, BigramTrainer], wiring.job.states.engines)  # type: ignore[attr-defined]


def test_resume_loads_the_nearest_state_and_replays_the_rest(tmp_path: Path) -> None:
    stop_at(tmp_path / "run", "4 rollout starts", **EVERY_SECOND)
    witness = Witness()
    wiring = open_run(tmp_path / "run", fake_recipe(**EVERY_SECOND), witness)
    assert start_point(wiring.job)[0] == 2
    run(wiring.job)
    actor, critic = trainers(wiring)["actor"], trainers(wiring)["critic"]
    assert (actor.starts, actor.loads, actor.count) == (0, 1, 4 * 4)
    assert (critic.starts, critic.loads, critic.count) == (0, 1, 4 * 4)
    # One replay of each role (step 3), then step 4: the second minibatch of each update is recorded.
    assert [name for name in witness.moments if name.startswith("inside critic")] == [
        "inside critic_update after a minibatch"
    ] * 2


def test_resident_state_is_not_loaded_again(tmp_path: Path) -> None:
    wiring = play(tmp_path / "run", fake_recipe())
    for trainer in trainers(wiring).values():
        assert (trainer.starts, trainer.loads) == (1, 0)


def test_replay_with_other_metrics_is_refused(tmp_path: Path) -> None:
    stop_at(tmp_path / "run", "4 rollout starts", **EVERY_SECOND)
    wiring = open_run(tmp_path / "run", fake_recipe(**EVERY_SECOND), Witness())
    actor = trainers(wiring)["actor"]
    load = actor.load

    def load_something_else(folder: Path) -> None:
        load(folder)
        actor.table = actor.table + 0.1 * actor.table.roll(1)

    actor.load = load_something_else  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="the replay of actor at step 3 differs"):
        run(wiring.job)


def minibatch_metrics(*losses: float, clip_frac: float = 0.0) -> dict[str, list[float]]:
    return {"loss": list(losses), "grad_norm": [1.0], "lr": [0.1], "clip_frac": [clip_frac]}


def test_replay_gap_is_relative_and_infinite_for_other_shapes() -> None:
    assert largest_gap(minibatch_metrics(1.0, 2.0), minibatch_metrics(1.0, 2.0)) == 0
    assert largest_gap(minibatch_metrics(1.0, 2.0), minibatch_metrics(1.0, 2.2)) == pytest.approx(0.2 / 2.2)
    assert largest_gap(minibatch_metrics(1.0), minibatch_metrics(1.0, 2.0)) == float("inf")
    assert largest_gap(minibatch_metrics(1.0), minibatch_metrics(float("nan"))) == float("inf")


def test_clip_fraction_changed_by_one_token_is_only_inexact() -> None:
    assert 0 < largest_gap(minibatch_metrics(1.0, clip_frac=0.5), minibatch_metrics(1.0, clip_frac=0.4)) < 1e-3


def test_retention_keeps_two_checkpoints_and_periodic_rollouts(tmp_path: Path) -> None:
    recipe = fake_recipe(
        steps=6,
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_rollouts_every_steps": 3},
        eval={"at_start": False},
    )
    play(tmp_path / "run", recipe)
    paths = RunPaths(tmp_path / "run")
    assert paths.saved_steps("actor") == paths.saved_steps("critic") == [5, 6]
    kept = {step: sorted(path.name for path in paths.step(step).iterdir()) for step in paths.committed_steps()}
    assert kept == {
        3: ["10-rollout", "20-reward", "30-values", "40-logprobs", "50-advantages"],
        6: sorted(paths.stage(6, stage).name for stage in (*trace(PPO).outline.names, "eval")),
    }


def test_keep_last_all_keeps_checkpoints_and_two_steps_of_records(tmp_path: Path) -> None:
    checkpoint = {"every_steps": 2, "keep_last": "all", "keep_rollouts_every_steps": 0}
    recipe = fake_recipe(steps=6, checkpoint=checkpoint, eval={"at_start": False})
    play(tmp_path / "run", recipe)
    paths = RunPaths(tmp_path / "run")
    assert paths.saved_steps("actor") == paths.saved_steps("critic") == [2, 4, 6]
    # The folder of a stage that is not in the outline, an evaluation, remains.
    assert [step for step in paths.committed_steps() if paths.stage(step, "rollout").is_dir()] == [5, 6]


def test_checkpoint_of_a_stop_is_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    tables = {"steps": 8, "checkpoint": {"every_steps": 3, "keep_last": 2, "asynchronous": False}}
    recipe, layout, found = fake_recipe(**tables), RunPaths(tmp_path / "run"), []
    for at, saves in (((5, "rollout"), True), ((6, "rollout"), False), ((7, "values"), True), ((8, "rollout"), True)):
        gate = Stops(when=lambda gate, at=at: gate.at == at, saves=saves)
        with pytest.raises(PreemptedError):
            run(open_run(layout.root, recipe, Witness(), gate=gate).job)
        found.append(saved_checkpoints(layout))
    # Only steps 3 and 6 are regular saves. Step 4 stays after step 5, which was not saved, and until 6 is saved.
    assert found == [[3, 4], [3, 4], [3, 6], [3, 6, 7]]
    assert manifests.require(layout.state("actor", 7)).extra["at_stop"]
    play(layout.root, recipe)
    assert saved_checkpoints(layout) == [6, 8]
    assert result(layout.root) == undisturbed(**tables)


def test_state_of_one_role_is_removed_after_a_later_checkpoint(tmp_path: Path) -> None:
    """A second stop ended the save of step 3 after the critic. Fewer than three checkpoints follow."""
    checkpoint, paths = {"every_steps": 3, "keep_last": 3}, RunPaths(tmp_path / "run")
    play(paths.root, fake_recipe(steps=6, checkpoint=checkpoint))
    shutil.rmtree(paths.state("actor", 3))
    play(paths.root, fake_recipe(steps=9, checkpoint=checkpoint))
    assert paths.saved_steps("actor") == paths.saved_steps("critic") == [6, 9]


def test_critic_only_steps_do_not_train_the_actor(tmp_path: Path) -> None:
    ppo = {"epochs": 1, "minibatch_seqs": 4, "critic_only_steps": 2}
    wiring = play(tmp_path / "run", fake_recipe(steps=3, ppo=ppo))
    paths = RunPaths(tmp_path / "run")
    assert not paths.stage(2, "actor_update").exists()
    assert paths.stage(3, "actor_update").is_dir()
    assert trainers(wiring)["actor"].count == 2
    assert trainers(wiring)["critic"].count == 6


@pytest.mark.parametrize(
    "warmup",
    [
        {"critic_only_steps": 2},
        pytest.param(
            {"critic_only_until": {"explained_variance": 1.0, "at_most": 2}},
            marks=pytest.mark.ci("a fixed number of steps"),
        ),
    ],
    ids=str,
)
def test_unchanged_actor_states_are_hard_links(tmp_path: Path, warmup: dict[str, object]) -> None:
    tables = {"steps": 3, "checkpoint": {"keep_last": 3}}
    ppo = {"epochs": 1, "minibatch_seqs": 4, **warmup}
    play(tmp_path / "run", fake_recipe(ppo=ppo, **tables))
    paths = RunPaths(tmp_path / "run")
    first, second, third = (paths.state("actor", step) / "table.bin" for step in (1, 2, 3))
    assert first.samefile(second)
    assert not second.samefile(third)
    assert plan_resume(RecordedRun(paths)).broken == ()
    shutil.rmtree(paths.state("actor", 1))  # each name is a separate state
    for role in ("actor", "critic"):
        shutil.rmtree(paths.state(role, 3))
    play(paths.root, fake_recipe(ppo=ppo, **tables))
    assert result(paths.root) == undisturbed(ppo=ppo, **tables)


def test_unchanged_actor_is_saved_again_for_another_layout(tmp_path: Path) -> None:
    ppo = {"epochs": 1, "minibatch_seqs": 4, "critic_only_steps": 2}
    tables = {"steps": 3, "checkpoint": {"keep_last": 3, "asynchronous": False}, "ppo": ppo}
    stop_at(tmp_path / "run", "2 rollout starts", **tables)
    again = fake_recipe(**tables, actor={"optimizer": {"lr": 0.05}, "parallel": {"data": 2}})
    play(tmp_path / "run", again)
    paths = RunPaths(tmp_path / "run")
    first, second = (paths.state("actor", step) for step in (1, 2))
    assert not (first / "table.bin").samefile(second / "table.bin")
    layouts = [manifests.require(folder).extra["layout"] for folder in (first, second)]
    assert layouts == [saved_layout(recipe, "actor") for recipe in (fake_recipe(**tables), again)]
    assert layouts[0] != layouts[1]


def test_state_of_an_uncommitted_update_is_not_kept(tmp_path: Path) -> None:
    """The critic is trained, but its record is not written: the next attempt trains it again."""
    tables = {"steps": 3, "checkpoint": {"every_steps": 3}}
    wiring = open_run(tmp_path / "run", fake_recipe(**tables), stopping_at("2 critic_update writing"))
    with pytest.raises(StopError):
        run(wiring.job)
    assert wiring.job.states.keep_residents() == ["actor"]
    paths = RunPaths(tmp_path / "run")
    assert manifests.require(paths.at_stop / "actor").step == 1
    assert manifests.read(paths.at_stop / "critic") is None


@pytest.mark.parametrize(("shards", "replayed"), [(1, []), (2, ["actor", "critic"])])
def test_at_stop_states_load_only_under_the_same_layout(tmp_path: Path, shards: int, replayed: list[str]) -> None:
    tables = {"steps": 3, "checkpoint": {"every_steps": 3}}
    wiring = open_run(tmp_path / "run", fake_recipe(**tables), stopping_at("2 rollout starts"))
    with pytest.raises(StopError):
        run(wiring.job)
    assert wiring.job.states.keep_residents() == ["actor", "critic"]
    again = fake_recipe(**tables, actor={"optimizer": {"lr": 0.05}, "parallel": {"data": shards}})
    job, messages = open_run(tmp_path / "run", again, Witness()).job, list[str]()
    job.states.notify = messages.append
    run(job)
    assert [text.split()[1] for text in messages if text.startswith("replayed")] == replayed


def test_at_stop_states_are_dropped_when_their_step_is_saved(tmp_path: Path) -> None:
    wiring = open_run(tmp_path / "run", fake_recipe(checkpoint={"every_steps": 3}), stopping_at("3 rollout starts"))
    with pytest.raises(StopError):
        run(wiring.job)
    assert wiring.job.states.keep_residents() == ["actor", "critic"]
    folder = RunPaths(tmp_path / "run").at_stop
    wiring.job.retention.drop_kept_at_stop(1)
    assert [manifests.require(folder / role).step for role in ("actor", "critic")] == [2, 2]
    wiring.job.retention.drop_kept_at_stop(2)
    assert list(folder.iterdir()) == []


def test_best_actor_is_kept_as_weights_only(tmp_path: Path) -> None:
    recipe = fake_recipe(steps=4, checkpoint={"best": "reward/score_mean"})
    wiring = play(tmp_path / "run", recipe)
    scores = [wiring.job.journal.metrics(step)["reward/score_mean"] for step in range(1, 5)]
    (kept,) = (tmp_path / "run/states/best").iterdir()
    # The rollout of step n measures the actor at its start, which is that of step n - 1.
    assert int(kept.name) == max(range(4), key=lambda i: (scores[i], i))
    assert sorted(path.name for path in kept.iterdir()) == ["manifest.json", "table.bin"]


def test_late_saved_state_has_the_ledger_size_of_its_step(tmp_path: Path) -> None:
    """Steps 3 and 4 are already in the ledger when the checkpoint of step 2 is made again; they may be generated
    again."""
    ledger_sizes = []
    for lost in (False, True):
        paths = RunPaths(tmp_path / f"lost {lost}")
        stop_at(paths.root, "4 reward starts", **EVERY_SECOND)
        for role in ("actor", "critic") if lost else ():
            shutil.rmtree(paths.state(role, 2))
        play(paths.root, fake_recipe(**EVERY_SECOND))
        found = manifests.read(paths.state("actor", 2))
        assert found is not None
        ledger_sizes.append(found.extra["ledger_bytes"])
    assert ledger_sizes[0] == ledger_sizes[1] > 0
