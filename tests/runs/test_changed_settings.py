"""Resuming with changed keys: from which step they apply, and when they cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, finished, new_run_dir, open_run, play, stop_at
from ppoctl.cli.app import run as app
from ppoctl.core.batch.records import Rollouts, decode
from ppoctl.core.errors import RecipeError, StorageError
from ppoctl.core.user_functions import digest_of
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.run.changed_settings import adopt, change
from ppoctl.run.loop.steps import run
from ppoctl.run.run_recipe import as_recorded
from ppoctl.store.attempt import claim
from ppoctl.store.discard import roll_back
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RECORD, RunPaths

PPO = {"epochs": 2, "minibatch_seqs": 4}
REDO = {"checkpoint": {"every_steps": 5}, "steps": 5}


def starts(paths: RunPaths) -> list[int]:
    return sorted(RecordedRun(paths).recipes)


def test_change_applies_from_the_first_step_without_a_rollout(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    faster = fake_recipe(**REDO, actor={"optimizer": {"lr": 0.1}})
    adopt(claim(layout), RecordedRun(layout), faster)
    assert starts(layout) == [1, 3]
    wiring = open_run(layout.root, fake_recipe(**REDO), Witness(), recipes={1: fake_recipe(**REDO), 3: faster})
    run(wiring.job)
    rates = {step: wiring.job.journal.metrics(step)["policy/lr"] for step in range(1, 6)}
    assert rates == {1: 0.05, 2: 0.05, 3: 0.1, 4: 0.1, 5: 0.1}


def test_changed_recipe_applies_to_the_failed_step(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 actor_update starts", **REDO)
    adopt(claim(layout), RecordedRun(layout), fake_recipe(**REDO, actor={"optimizer": {"lr": 0.01}}))
    assert starts(layout) == [1, 3]


def test_step_keeps_its_recipe_if_committed_stages_read_the_key(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 actor_update starts", **REDO)
    adopt(claim(layout), RecordedRun(layout), fake_recipe(**REDO, critic={"optimizer": {"lr": 0.01}}))
    assert starts(layout) == [1, 4]


def test_changed_prompt_order_is_refused_between_checkpoints(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 values starts", **REDO)
    before = layout.recipe_resolved.read_bytes()
    with pytest.raises(RecipeError, match="`seed` cannot change now"):
        adopt(claim(layout), RecordedRun(layout), fake_recipe(**REDO, seed=9))
    assert (starts(layout), layout.recipe_resolved.read_bytes()) == ([1], before)


SUM = {"kind": "python", "path": "env:Sum", "turns": 3, "tokens": 16, "on_failure": {"score": 0.0}}
EPISODES = {**REDO, "steps": 3, "reward": {"kind": "exact_match", "max_error_frac": 1.0}}


@pytest.mark.parametrize(("moment", "first"), [("2 rollout starts", 2), ("2 values starts", 3)])
def test_changed_limit_of_episodes_applies_from_the_first_step_without_a_rollout(
    tmp_path: Path, moment: str, first: int
) -> None:
    recipes = {turns: fake_recipe(**EPISODES, environment={**SUM, "turns": turns}) for turns in (3, 1)}
    layout = stop_at(tmp_path / "run", moment, **EPISODES, environment=SUM)
    adopt(claim(layout), RecordedRun(layout), recipes[1])
    assert starts(layout) == [1, first]
    run(open_run(layout.root, recipes[3], Witness(), recipes={1: recipes[3], first: recipes[1]}).job)
    most = {}
    for step in (1, 2, 3):
        record = decode((layout.stage(step, "rollout") / RECORD).read_bytes())
        assert isinstance(record, Rollouts)
        most[step] = max(len(episode["turns"]) for episode in record.episodes or ())
    assert {step for step, turns in most.items() if turns == 1} == set(range(first, 4))


@pytest.mark.parametrize(
    "tables",
    [{"environment": {**SUM, "path": "env:Other"}}, {"environment": {**SUM, "tokens": 12}}, {"environment": None}],
    ids=["path", "tokens", "no environment"],
)
def test_environment_cannot_change_while_a_step_may_generate_with_it(tmp_path: Path, tables: dict[str, Any]) -> None:
    """The rest of the step, such as its evaluation, would run in the new environment under the old recipe."""
    layout = stop_at(tmp_path / "run", "2 values starts", **EPISODES, environment=SUM)
    with pytest.raises(RecipeError, match=r"`environment.* cannot change now: step 2 is unfinished") as error:
        adopt(claim(layout), RecordedRun(layout), fake_recipe(**EPISODES, **tables))
    steps = " ".join(str(layout.step(step)) for step in range(3))
    assert error.value.hint == f"delete these steps, which are then generated again: rm -r {steps}"
    adopt(
        claim(layout),
        RecordedRun(layout),
        fake_recipe(**EPISODES, environment={**SUM, "on_failure": {"score": 1.0}}),
    )
    assert starts(layout) == [1, 3]


def test_environment_can_change_from_the_last_saved_step(tmp_path: Path) -> None:
    """The hint names a step that the run can continue from, although step 3 is done."""
    tables = {**EPISODES, "steps": 5, "checkpoint": {"every_steps": 2}}
    layout = stop_at(tmp_path / "run", "4 values starts", **tables, environment=SUM)
    changed = fake_recipe(**tables, environment={**SUM, "tokens": 12})
    with pytest.raises(RecipeError, match=r"`environment.tokens` cannot change now: step 4 is unfinished") as error:
        adopt(claim(layout), RecordedRun(layout), changed)
    assert error.value.hint == f"ppoctl resume {layout.root} --back-to 2  # later steps are repeated"
    roll_back(RecordedRun(layout), 2)
    adopt(claim(layout), RecordedRun(layout), changed)
    assert starts(layout) == [1, 3]


def test_changed_file_of_a_loss_is_refused_while_updates_would_be_replayed_with_it(tmp_path: Path) -> None:
    """The run does not store the file, so that steps in the redo log could not be replayed."""
    file = tmp_path / "mine.py"

    def recipe(factor: int, **changes: Any) -> Recipe:
        file.write_text(f"def loss(batch):\n    return -{factor} * batch.advantages * batch.logprobs\n")
        named = {"kind": "python", "function": f"{file}:loss", "digest": digest_of(f"{file}:loss"), **changes}
        return fake_recipe(**REDO, ppo={**PPO, "policy_loss": named})

    layout = stop_at(tmp_path / "run", "3 values starts", ppo=recipe(1).model_dump(by_alias=True)["ppo"], **REDO)
    with pytest.raises(RecipeError, match=r"`ppo.policy_loss.digest` cannot change now: steps after the saved step"):
        adopt(claim(layout), RecordedRun(layout), recipe(2))
    # Another loss, or an option, may follow: the file of the recorded recipe is still there.
    recipe(1)
    adopt(claim(layout), RecordedRun(layout), recipe(1, options={"scale": 2.0}))
    adopt(claim(layout), RecordedRun(layout), fake_recipe(**REDO, ppo=PPO))
    assert starts(layout) == [1, 3]


@pytest.mark.parametrize("moment", ["3 rollout starts", "3 actor_update starts"])
def test_changed_file_of_a_loss_applies_after_a_saved_step(tmp_path: Path, moment: str) -> None:
    """So a step whose loss failed continues with a corrected file."""
    file, saved = tmp_path / "mine.py", {"checkpoint": {"every_steps": 1, "asynchronous": False}, "steps": 5}

    def recipe(factor: int) -> Recipe:
        file.write_text(f"def loss(batch):\n    return -{factor} * batch.advantages * batch.logprobs\n")
        named = {"kind": "python", "function": f"{file}:loss", "digest": digest_of(f"{file}:loss")}
        return fake_recipe(**saved, ppo={**PPO, "policy_loss": named})

    layout = stop_at(tmp_path / "run", moment, ppo=recipe(1).model_dump(by_alias=True)["ppo"], **saved)
    adopt(claim(layout), RecordedRun(layout), recipe(2))
    assert starts(layout) == [1, 3]


def test_changed_coefficient_is_used_from_its_step(tmp_path: Path) -> None:
    first = fake_recipe(steps=2)
    play(tmp_path / "run", first)
    ppo = {"epochs": 2, "minibatch_seqs": 4, "kl": {"place": "reward", "coef": 0.5}}
    second = fake_recipe(steps=4, ppo=ppo)
    wiring = open_run(tmp_path / "run", first, Witness(), recipes={1: first, 3: second})
    run(wiring.job)
    assert [wiring.job.journal.metrics(step)["kl/coef"] for step in (1, 2, 3, 4)] == [0.05, 0.05, 0.5, 0.5]


@pytest.mark.parametrize(("moment", "corrected"), [("2 values starts", [2, 3]), ("3 rollout starts", [3])])
def test_changed_key_selects_another_step_function_from_its_step(
    tmp_path: Path, moment: str, corrected: list[int]
) -> None:
    redo = {"checkpoint": {"every_steps": 5}, "steps": 3}
    first = fake_recipe(**redo)
    second = fake_recipe(**redo, ppo={**PPO, "rollout_correction": {"kind": "tis"}})
    layout = stop_at(tmp_path / "run", moment, **redo)
    adopt(claim(layout), RecordedRun(layout), second)
    wiring = open_run(layout.root, first, Witness(), recipes={1: first, corrected[0]: second})
    run(wiring.job)
    assert [step for step in (1, 2, 3) if "correction" in RecordedRun(layout).outlines.at(step).names] == corrected
    assert [step for step in (1, 2, 3) if wiring.job.journal.metrics(step).get("correction/weight_mean")] == corrected
    assert not plan_resume(RecordedRun(layout)).broken


def test_critic_only_steps_can_be_added_on_resume(tmp_path: Path) -> None:
    first, second = fake_recipe(steps=3), fake_recipe(steps=3, ppo={**PPO, "critic_only_steps": 2})
    layout = stop_at(tmp_path / "run", "2 rollout starts", steps=3)
    adopt(claim(layout), RecordedRun(layout), second)
    run(open_run(layout.root, first, Witness(), recipes={1: first, 2: second}).job)
    assert [RecordedRun(layout).outlines.at(step).story for step in (1, 2, 3)] == ["ppo", "critic_only", "ppo"]
    assert not layout.stage(2, "actor_update").exists()
    assert not plan_resume(RecordedRun(layout)).broken


@pytest.mark.parametrize(
    ("was", "new_value", "fits"),
    [
        (0, 0, None),
        (0, 2, 0),  # after a step that trained the actor, its first step would change
        (3, 1, 2),  # two steps are done: it begins no earlier than in the third
        (3, 2, None),
        (3, 5, None),
    ],
)
def test_step_ticked_rate_counts_from_the_first_trained_step(
    tmp_path: Path, was: int, new_value: int, fits: int | None
) -> None:
    counted = {"optimizer": {"lr": 0.05, "lr_schedule": "linear", "lr_ticks": "step"}}
    constant = {"optimizer": {"lr": 0.05, "lr_ticks": "step"}}

    def recipe(steps: int, actor: dict[str, Any]) -> Recipe:
        return fake_recipe(**REDO, ppo={**PPO, "critic_only_steps": steps}, actor=actor)

    tables = recipe(was, counted).model_dump(mode="json", by_alias=True)
    layout = stop_at(tmp_path / "run", "3 rollout starts", **{**REDO, "ppo": tables["ppo"], "actor": counted})
    if fits is None:
        change(RecordedRun(layout), recipe(new_value, counted))
        return
    with pytest.raises(RecipeError, match=f"`{new_value}`, was `{was}`, and 2 steps are done") as raised:
        change(RecordedRun(layout), recipe(new_value, counted))
    assert raised.value.hint.endswith(f"--set ppo.critic_only_steps={fits}")
    change(RecordedRun(layout), recipe(fits, counted))
    change(RecordedRun(layout), recipe(new_value, constant))
    # A warm-up alone also changes the rate.
    warmed = {"optimizer": {"lr": 0.05, "lr_ticks": "step", "lr_warmup_updates": 8}}
    with pytest.raises(RecipeError, match="2 steps are done"):
        change(RecordedRun(layout), recipe(new_value, warmed))


def laid_out_tables(reshardable: str = "full", **parallel: object) -> dict[str, Any]:
    actor = {"optimizer": {"lr": 0.05}, "parallel": {"distributed_optimizer": True, **parallel}}
    return {"actor": actor, "checkpoint": {"reshardable": reshardable}}


def laid_out(reshardable: str = "full", **parallel: object) -> Recipe:
    return fake_recipe(**laid_out_tables(reshardable, **parallel))


@pytest.mark.parametrize(
    ("saved_as", "layout_keys"),
    [
        ("full", {"tensor": 2, "pipeline": 2, "data": 3}),
        ("dp", {"data": 3}),
        ("dp", {}),
    ],
)
def test_state_can_be_loaded_under_another_layout(tmp_path: Path, saved_as: str, layout_keys: dict[str, Any]) -> None:
    change(RecordedRun(finished(tmp_path / "run", **laid_out_tables(saved_as))), laid_out(**layout_keys))


@pytest.mark.parametrize("layout_keys", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "first_stage_layers": 3}])
def test_limited_layout_state_error_has_the_reshard_command(tmp_path: Path, layout_keys: dict[str, Any]) -> None:
    paths = finished(tmp_path / "run", **laid_out_tables("dp"))
    with pytest.raises(StorageError, match=r"actor's state of step 3 was saved under `actor\.parallel\.") as raised:
        change(RecordedRun(paths), laid_out("full", **layout_keys))
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"resume {paths.root} --save-only --set checkpoint.reshardable=full")


def test_state_of_the_other_optimizer_kind_is_refused(tmp_path: Path) -> None:
    paths = finished(tmp_path / "run", **laid_out_tables())
    with pytest.raises(StorageError, match=r"distributed_optimizer = true.*distributed_optimizer = false") as raised:
        change(RecordedRun(paths), laid_out(distributed_optimizer=False))
    assert raised.value.hint is not None
    assert "keep `distributed_optimizer`" in raised.value.hint


def stopped(folder: Path, moment: str, **changes: Any) -> RunPaths:
    """Run until this moment, with a recipe that can be written to a file and read again."""
    tables = {
        **REDO,
        "reward": {"kind": "gsm8k"},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": {"format": "gsm8k", "path": str(folder / "none")}},
        **changes,
    }
    layout = stop_at(folder / "run", moment, **tables)
    layout.recipe_toml.write_text(recipe_as_toml(fake_recipe(**tables)))
    return layout


def test_resume_plan_shows_the_first_step_of_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = stopped(tmp_path, "3 rollout starts")
    before = layout.recipe_toml.read_bytes()
    for key, end in [
        ("actor.optimizer.lr=0.1", "\n  steps 3 to 5  run\n  actor.optimizer.lr 0.05 -> 0.1 from step 3\n"),
        ("steps=9", "\n  steps 3 to 9  run\n  steps 5 -> 9 from step 3\n"),
        ("actor.optimizer.lr=0.05", "\n  steps 3 to 5  run\n  --set changes nothing\n"),
    ]:
        code = app(["resume", str(layout.root), "--plan", "--set", key])
        assert code == 0, capsys.readouterr().err
        assert capsys.readouterr().out.endswith(end)
    assert layout.recipe_toml.read_bytes() == before
    assert starts(layout) == [1]


def test_resume_plan_counts_the_finished_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = stopped(tmp_path, "inside rollout after 4 samples")
    assert app(["resume", str(layout.root), "--plan"]) == 0
    assert capsys.readouterr().out.endswith("\n  4 of 8 samples of `rollout` of step 1 reused\n")
    assert app(["resume", str(layout.root), "--plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["finished_samples"]
    assert found == [{"step": 1, "stage": "rollout", "samples": 4}]


def test_change_lists_each_key_with_both_values(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    faster = fake_recipe(**{**REDO, "ppo": {"minibatch_seqs": 2, "epochs": 2}}, actor={"optimizer": {"lr": 0.1}})
    change = adopt(claim(layout), RecordedRun(layout), faster)
    assert change is not None
    assert change.lines() == [
        "ppo.minibatch_seqs 4 -> 2 from step 3",
        'ppo.kl.place "reward" -> "none" from step 3',
        'ppo.kl.estimator "k1" -> absent from step 3',
        "ppo.kl.coef 0.05 -> absent from step 3",
        "actor.optimizer.lr 0.05 -> 0.1 from step 3",
    ]
    assert adopt(claim(layout), RecordedRun(layout), faster) is None


def test_name_and_too_few_steps_cannot_be_changed(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "4 rollout starts", **REDO)
    before = fake_recipe(**REDO)
    with pytest.raises(RecipeError, match="`name` is `other`, but this run is `fake`: a run keeps its name"):
        adopt(claim(layout), RecordedRun(layout), before.model_copy(update={"name": "other"}))
    with pytest.raises(RecipeError, match="`steps` is `2`, but 3 steps of the run are done") as caught:
        adopt(claim(layout), RecordedRun(layout), before.model_copy(update={"steps": 2}))
    assert caught.value.hint == f"ppoctl resume {layout.root} --set steps=3"
    assert starts(layout) == [1]
    assert adopt(claim(layout), RecordedRun(layout), before.model_copy(update={"steps": 3})) is not None


def test_refused_changes_of_resume_plan_and_of_resume_before_libraries_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = stopped(tmp_path, "4 actor_update starts", checkpoint={"every_steps": 2})
    for key, code, says in [
        ("actor.wieghts=3", 2, "unknown key `actor.wieghts`"),
        ("seed=9", 2, "`seed` cannot change now"),
        ("actor.parallel={distributed_optimizer=true}", 8, "cannot be loaded under"),
    ]:
        assert app(["resume", str(layout.root), "--plan", "--set", key]) == code
        assert says in capsys.readouterr().err
    monkeypatch.delattr("ppoctl.cli.resume.loading")
    for key, code in [("steps=2", 2), ("actor.parallel={distributed_optimizer=true}", 8)]:
        assert app(["resume", str(layout.root), "--set", key]) == code


TOP = {"optimizer": {"lr": 0.05}, "train": {"top_layers": 1}}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"actor": TOP}, "`actor.train.top_layers` is `1`, but the run was started with"),
        ({"actor": TOP}, {"actor": {**TOP, "train": {"top_layers": 2}}}, "`actor.train.top_layers` is `2`"),
        ({"actor": TOP}, {"actor": {**TOP, "freeze": ["*.bias"]}}, "`actor.freeze` is"),
        ({}, {"critic": {"optimizer": {"lr": 0.1}, "freeze": ["*.bias"]}}, "`critic.freeze` is"),
    ],
)
def test_resume_keeps_the_parameters_that_train(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    layout = new_run_dir(tmp_path / "run", as_recorded(fake_recipe(**before)))
    with pytest.raises(RecipeError, match="the run was started with") as caught:
        change(RecordedRun(layout), fake_recipe(**after))
    assert says in str(caught.value)
    assert "another `name`" in str(caught.value.hint)
