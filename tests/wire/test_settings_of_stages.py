"""Settings of stages from the recipe: which stages generate, and which recipe holds at a step."""

from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import BuiltStages, Witness, open_run
from ppoctl.algorithms.choose import step_function_at
from ppoctl.algorithms.formulas.kl_coefficient import KlTarget
from ppoctl.run.given_resources import time_left
from ppoctl.run.wire.run_context import StepsOfRun

PPO = {"epochs": 2, "minibatch_seqs": 4}


def ppo(**tables: Any) -> dict[str, Any]:
    return {"ppo": {**PPO, **tables}}


@pytest.mark.parametrize("over", ["token", "sequence"])
def test_kl_target_has_the_unit_of_its_key(over: str) -> None:
    adaptive = {f"target_per_{over}": 0.5, "horizon_seqs": 40}
    penalty = fake_recipe(**ppo(kl={"place": "reward", "coef": 0.05, "adaptive": adaptive})).ppo.kl.build()
    assert penalty is not None
    assert penalty.target == KlTarget(0.5, over, 40)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tis", "tis_sequence", "icepop", "icepop_sequence", "sequence_mask"])
@pytest.mark.parametrize("over", [None, "kept_tokens", "tokens", "sequences"])
def test_correction_weights_are_normalized_as_configured(kind: str, over: str | None) -> None:
    table = {"kind": kind, "min_ratio": 0.5, "max_ratio": 2.0}
    normalized = {} if over is None else {"normalize": True, "normalize_over": over}
    stage: Any = fake_recipe(**ppo(rollout_correction={**table, **normalized})).ppo.build_correction(fingerprint="")
    assert (None if stage.normalize is None else stage.normalize.keywords) == (
        None if over is None else {"over": over}
    )


@pytest.mark.parametrize(("critics", "lam_value"), [(None, 0.9), (0.5, 0.5), (0.0, 0.0)])
def test_critic_lambda_defaults_to_the_policy_lambda(critics: float | None, lam_value: float) -> None:
    table = {"kind": "gae", "gae_lambda": 0.9, "gae_lambda_value": critics}
    estimator: Any = fake_recipe(**ppo(advantages=table)).ppo.advantages.estimator()
    assert (estimator.lam, estimator.lam_value) == (0.9, lam_value)


def test_recipe_applies_from_its_start_step() -> None:
    parts: Any = None
    steps = StepsOfRun({1: fake_recipe(), 3: fake_recipe(seed=9)}, parts, step_function_at)
    assert [steps.valid_from(step) for step in (0, 1, 2, 3, 9)] == [1] * 3 + [3] * 2


def test_evaluation_uses_the_recipe_of_its_step(tmp_path: Path) -> None:
    first, other = (fake_recipe(seed=seed) for seed in (1, 9))
    job = open_run(tmp_path / "run", first, Witness(), recipes={1: first, 3: other}).job
    alone = open_run(tmp_path / "alone", first, Witness()).job
    assert (
        BuiltStages(job, 2).eval.fingerprint
        == BuiltStages(alone, 2).eval.fingerprint
        != BuiltStages(job, 3).eval.fingerprint
    )


def test_second_rounds_generate_like_first_rounds(tmp_path: Path) -> None:
    job = open_run(tmp_path / "run", fake_recipe(), Witness()).job
    draws = time_left(job).draws
    assert [stage for stage in ("rollout", "rollout.2", "reward", "eval", "values.2") if draws(stage)] == [
        "rollout",
        "rollout.2",
        "eval",
    ]
