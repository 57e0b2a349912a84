"""Fingerprints cover the keys that change results, below the paths that a stage reads, and no others."""

import hashlib
from pathlib import Path

import pytest

from ppoctl.recipe.fingerprint import fingerprint, result_differences
from ppoctl.recipe.loading.load import load


def of(file: Path, *sets: str, paths: tuple[str, ...] = ("rollout", "seed")) -> str:
    return fingerprint(load([file], sets, {}).recipe, paths)


def test_fingerprint_covers_only_listed_paths(smallest: Path) -> None:
    assert of(smallest) != of(smallest, "rollout.temperature=0.5")
    assert of(smallest) != of(smallest, "seed=1")
    assert of(smallest) == of(smallest, "actor.optimizer.lr=1.0")
    assert of(smallest, paths=("rollout.temperature",)) == of(smallest, "seed=1", paths=("rollout.temperature",))


def test_fingerprint_ignores_excluded_keys_and_longer_names(smallest: Path) -> None:
    def left_out(*sets: str) -> str:
        return fingerprint(load([smallest], sets, {}).recipe, ("reward",), without=("reward.scale",))

    assert left_out("reward.scale={from=[0, 1], to=[-1, 1]}") == left_out()
    assert left_out("reward.strict=false") != left_out()
    # `gae_lambda_value` is not below `gae_lambda`.
    paths = ("ppo.advantages.gae_lambda",)
    assert of(smallest, "ppo.advantages.gae_lambda_value=0.5", paths=paths) == of(smallest, paths=paths)
    assert of(smallest, "ppo.advantages.gae_lambda=0.5", paths=paths) != of(smallest, paths=paths)


def test_fingerprint_ignores_speed_and_reporting_keys(smallest: Path) -> None:
    paths = ("rollout", "generator", "actor", "checkpoint", "eval", "reward", "name", "steps")
    sets = ("rollout.keep_finished_every_s=1", "actor.batching.microbatch_seqs=1", "name=other", "steps=99")
    sets += ("generator.compile=true", "eval.every_steps=3", "reward.timeout_s=1", "checkpoint.every_steps=5")
    assert of(smallest, paths=paths) == of(smallest, *sets, paths=paths)


def test_fingerprint_includes_chosen_alternative(smallest: Path) -> None:
    loss = ("ppo.kl={place='loss', estimator='k3', coef=0.1}",)
    reward = ("ppo.kl={place='reward', estimator='k3', coef=0.1}",)
    assert of(smallest, *loss, paths=("ppo.kl",)) != of(smallest, *reward, paths=("ppo.kl",))


def test_fingerprint_ignores_number_notation(smallest: Path) -> None:
    assert of(smallest, "rollout.temperature=1") == of(smallest, "rollout.temperature=1.0") == of(smallest)


def test_fingerprint_path_may_name_absent_eval_set_or_key(smallest: Path) -> None:
    assert of(smallest, paths=("data.eval.any.path", "ppo.kl.coef")) == of(smallest, paths=())


def test_fingerprint_of_critic_model_path_is_unchanged(smallest: Path) -> None:
    """A run in progress is resumed by this fingerprint, so it must not change."""
    written = '{"model.critic":"org/judge","model.path":"org/base"}'
    sets = ("model.path=org/base", "model.critic=org/judge")
    assert of(smallest, *sets, paths=("model",)) == hashlib.sha256(written.encode()).hexdigest()
    assert of(smallest, *sets, "model.critic.dtype=float32", paths=("model",)) != of(
        smallest, *sets, paths=("model",)
    )


@pytest.mark.parametrize("path", ["rolout", "rollout.temprature", "seed.x", ""])
def test_fingerprint_of_misspelled_path_raises_value_error(smallest: Path, path: str) -> None:
    with pytest.raises(ValueError, match="is not a recipe key"):
        of(smallest, paths=(path,))


def test_result_differences_list_key_old_and_new_value(smallest: Path) -> None:
    old = load([smallest], [], {}).recipe
    new = load([smallest], ["seed=1", "ppo.kl={place='loss', coef=0.1}", "steps=99"], {}).recipe
    assert result_differences(old, old) == []
    assert sorted(result_differences(old, new)) == [
        ("ppo.kl.coef", None, 0.1),
        ("ppo.kl.estimator", None, "k3"),
        ("ppo.kl.gradient", None, "estimator"),
        ("ppo.kl.place", "none", "loss"),
        ("seed", 42, 1),
    ]


def test_fingerprint_ignores_keys_at_default(smallest: Path) -> None:
    """A later version may add such a key."""
    losses = ("ppo.value_loss", "ppo.policy_loss", "ppo.rollout_correction")
    assert of(smallest, paths=losses) == of(smallest, paths=())
    assert of(smallest, "ppo.policy_loss.clip_high=0.28", paths=losses) != of(smallest, paths=())


def test_fingerprint_includes_alternative_with_default_keys(smallest: Path) -> None:
    paths = ("ppo.rollout_correction",)
    chosen = of(smallest, "ppo.rollout_correction={kind='tis'}", paths=paths)
    assert chosen != of(smallest, paths=paths)
