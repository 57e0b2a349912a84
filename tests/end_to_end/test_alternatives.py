"""Every alternative of the algorithm trains the quickstart's model on the real engines, and changes its weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from end_to_end.cli_process import Forked

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    "steps=2",
    "expect={}",
    "data.eval={}",
    "rollout.prompts_per_step=16",
    "ppo.minibatch_seqs=8",
    "checkpoint.every_steps=2",
    "tracking={kind='none'}",
    "cluster.threads=1",
)
WITH_CRITIC = ("quickstart", "ppo.advantages.gae_lambda=0.9")
"""The recipe and the settings that the alternatives of PPO change."""
WITHOUT_CRITIC = ("quickstart-grpo",)
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "lambda of the values": ("ppo.advantages.gae_lambda_value=1.0",),
    "lambda by length": ("ppo.advantages.length_adaptive_alpha=0.2",),
    "monte carlo": ("ppo.advantages={kind='monte_carlo'}",),
    "the critic first": ("ppo.critic_only_until={explained_variance=1.0, at_most=1}",),
    "no whitening": ("ppo.advantages.whiten=false",),
    "truncated bootstrap": ("ppo.truncated=bootstrap", "rollout.max_new_tokens=12"),
    "truncated filter": ("ppo.truncated=filter", "rollout.max_new_tokens=20"),
    "clip and moments": (
        "reward.clip={low=-1.0, high=0.9, place='after_moments'}",
        "reward.moments={kind='running'}",
    ),
    "reference moments": ("reward.moments={kind='reference'}",),
    "lengths": (
        "reward.overlong={buffer_tokens=16, penalty=0.5}",
        "reward.length_penalty={per_token=0.01, free_tokens=4}",
        "reward.unfinished_factor=0.5",
        "rollout.max_new_tokens=24",
    ),
    "k1 in the reward": ("ppo.kl={place='reward', estimator='k1', coef=0.05}",),
    "k2 in the reward, adaptive": (
        "ppo.kl={place='reward', estimator='k2', coef=0.05, adaptive={target_per_sequence=0.1, horizon_seqs=100}}",
    ),
    "abs in the reward, clamped": ("ppo.kl={place='reward', estimator='abs', coef=0.05, input_clamp=0.1}",),
    "full in the reward": ("ppo.kl={place='reward', estimator='full', coef=0.05}",),
    "full in the loss": ("ppo.kl={place='loss', estimator='full', coef=0.05}",),
    "k3 straight through": ("ppo.kl={place='loss', estimator='k3', coef=0.05, gradient='k2'}",),
    "k1 with its score": ("ppo.kl={place='loss', estimator='k1', coef=0.05, gradient='score_function'}",),
    "k3 by importance": ("ppo.kl={place='loss', estimator='k3', coef=0.05, gradient='importance'}",),
    "gspo": ("ppo.policy_loss={kind='gspo', clip_low=0.003, clip_high=0.004, entropy_coef=0.01}",),
    "gspo by sequence": ("ppo.policy_loss={kind='gspo', ratio_gradient='sequence'}",),
    "cispo": ("ppo.policy_loss={kind='cispo', clip_high=0.28}",),
    "reinforce": ("ppo.policy_loss={kind='reinforce'}",),
    "sums of tokens": ("ppo.policy_loss.aggregation=sequence_mean_token_sum", "ppo.policy_loss.entropy_coef=0.01"),
    "fixed length": ("ppo.policy_loss.aggregation=fixed_length", "ppo.value_loss.aggregation=fixed_length"),
    "right answers again": ("ppo.policy_loss.positive_nll_coef=0.1", "ppo.policy_loss.dual_clip=3.0"),
    "bypass": ("ppo.old_logprobs=sampler",),
    "forced on-policy": ("ppo.old_logprobs=current", "ppo.minibatch_seqs=32"),
    "tis": ("ppo.rollout_correction={kind='tis', max_ratio=1.00001, min_ratio=0.5}",),
    "tis by sequence": ("ppo.rollout_correction={kind='tis_sequence', max_ratio=1.00001}",),
    "icepop": ("ppo.rollout_correction={kind='icepop', min_ratio=0.9999, max_ratio=1.00001}",),
    "sequence mask": ("ppo.rollout_correction={kind='sequence_mask', min_ratio=0.9999999, max_ratio=1.0000001}",),
    "rejection": ("ppo.rollout_rejection={kind='ratio', statistic='k3', level='sequence_max', max=1e-13}",),
    "gap": ("ppo.max_sequence_gap=1.0000001",),
    "top-p": ("rollout.top_p=0.9",),
    "top-k and min-p": ("rollout.top_k=4", "rollout.min_p=0.02"),
    "full under a filter": ("rollout.top_p=0.8", "ppo.kl={place='loss', estimator='full', coef=0.05}"),
    "minibatches of the critic": ("ppo.critic_minibatch_seqs=16", "ppo.critic_epochs=2", "ppo.value_loss.clip=0.2"),
    "in order": ("ppo.minibatch_order=in_order",),
    "ticks of steps": (
        "actor.optimizer.lr_ticks=step",
        "actor.optimizer.lr_schedule=linear",
        "actor.optimizer.lr_warmup_frac=0.5",
        "actor.optimizer.lr_warmup_init_frac=0.1",
    ),
    "nearly everything": (
        "ppo.advantages.length_adaptive_alpha=0.2",
        "ppo.advantages.gae_lambda_value=0.95",
        "ppo.truncated=bootstrap",
        "rollout.max_new_tokens=20",
        "reward.moments={kind='running', center=true}",
        "reward.overlong={buffer_tokens=8, penalty=0.5}",
        "ppo.kl={place='reward', estimator='full', coef=0.05, adaptive={target_per_token=0.01, horizon_seqs=100}}",
        "ppo.policy_loss={kind='gspo', aggregation='sequence_mean_token_mean', positive_nll_coef=0.1}",
        "ppo.rollout_correction={kind='tis', max_ratio=1.5}",
        "ppo.rollout_rejection={kind='ratio', statistic='k1', level='sequence_mean', min_ratio=0.9, max_ratio=1.1}",
        "rollout.top_p=0.95",
        "ppo.critic_minibatch_seqs=16",
        "ppo.minibatch_order=in_order",
    ),
}

GRPO_ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "advantages without scale": ("ppo.advantages.scale=none",),
    "raw reward": ("ppo.advantages={kind='raw_reward'}", "ppo.kl={place='reward', coef=0.05}"),
    "remax": ("ppo.advantages={kind='remax'}", "ppo.rollout_correction={kind='tis'}"),
    "correction": ("ppo.rollout_correction={kind='tis', max_ratio=1.00001, min_ratio=0.5}",),
    "filtered and shaped": (
        "ppo.truncated=filter",
        "rollout.max_new_tokens=20",
        "reward.length_penalty.per_token=0.01",
    ),
}

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> str:
    """Return the digest of the weights that the unchanged recipe gives."""
    return weights_of(forked, tmp_path_factory.mktemp("plain"), *WITH_CRITIC)


@pytest.fixture(scope="module")
def plain_grpo(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> str:
    """Return the same digest of the recipe without a critic."""
    return weights_of(forked, tmp_path_factory.mktemp("plain"), *WITHOUT_CRITIC)


def weights_of(forked: Forked, folder: Path, recipe: str, *sets: str) -> str:
    """Train in this folder; return the digests of the actor's saved tensors. The `.metadata` beside them differs
    between two runs with equal tensors."""
    words = [word for item in (*SMALL, *sets) for word in ("--set", item)]
    forked.succeeds(folder, "train", str(RECIPES / f"{recipe}.toml"), *words)
    manifest = json.loads((folder / f"runs/{recipe}/states/actor/000002/manifest.json").read_text())
    shards = {name: of_file["sha256"] for name, of_file in manifest["files"].items() if name.endswith(".distcp")}
    assert shards
    return json.dumps(shards, sort_keys=True)


@pytest.mark.parametrize("name", [*list(ALTERNATIVES)[:-1]])
@pytest.mark.slow
@pytest.mark.minutes(0.2)
def test_each_algorithm_alternative_changes_the_trained_weights(
    tmp_path: Path, forked: Forked, plain: str, name: str
) -> None:
    assert weights_of(forked, tmp_path, *WITH_CRITIC, *ALTERNATIVES[name]) != plain


@pytest.mark.parametrize("name", GRPO_ALTERNATIVES)
@pytest.mark.slow
@pytest.mark.minutes(0.2)
def test_each_alternative_without_critic_changes_the_trained_weights(
    tmp_path: Path, forked: Forked, plain_grpo: str, name: str
) -> None:
    assert weights_of(forked, tmp_path, *WITHOUT_CRITIC, *GRPO_ALTERNATIVES[name]) != plain_grpo


@pytest.mark.slow
@pytest.mark.minutes(0.2)
def test_python_copy_of_the_clip_loss_trains_identical_weights(tmp_path: Path, forked: Forked, plain: str) -> None:
    users = Path(__file__).parents[1] / "stages" / "users_training.py"
    copied = f"ppo.policy_loss={{kind='python', function='{users}:clip'}}"
    assert weights_of(forked, tmp_path, *WITH_CRITIC, copied) == plain


@pytest.mark.ci("the run of test_command_line.py, and each alternative against the textbook in tests/wiring")
def test_recipe_with_nearly_all_alternatives_trains(tmp_path: Path, forked: Forked) -> None:
    weights_of(forked, tmp_path, *WITH_CRITIC, *ALTERNATIVES["nearly everything"])


@pytest.mark.ci("the run of test_command_line.py")
def test_recipe_without_critic_trains(tmp_path: Path, forked: Forked) -> None:
    weights_of(forked, tmp_path, *WITHOUT_CRITIC)
    assert sorted(path.name for path in (tmp_path / "runs/quickstart-grpo/states").iterdir()) == ["actor"]
