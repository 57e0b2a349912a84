"""Rules about a value head on the actor's model: keys of a critic with a model of its own are refused."""

import json
from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.load import examine, load
from ppoctl.recipe.loading.rules import value_head_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of
from recipe.conftest import SMALLEST, Write, refusal

NO_CRITIC = SMALLEST[: SMALLEST.index("[critic.optimizer]")]
WITH_HEAD = f'{NO_CRITIC}[critic]\non = "actor"\nhead = "mlp"\nlayers_copied = 2\n'
ON = '`critic.on` = `"actor"` (r.toml:19)'
NONE_OF_ITS_OWN = (
    "is of a critic that has a model of its own, but the critic is a value head on the actor's model, which the "
    "actor's update trains"
)

# Settings on top of a recipe with a value head; message; hint.
CASES: list[tuple[list[str], str, str]] = [
    *(
        (
            [f"{key}={value}"],
            f"`{key}` {NONE_OF_ITS_OWN}: `{key}` = `{value}` (--set), {ON}",
            f"remove `{key}`",
        )
        for key, value in (("ppo.critic_epochs", 2), ("ppo.critic_minibatch_seqs", 1), ("ppo.critic_only_steps", 1))
    ),
    (
        ["ppo.critic_only_until={explained_variance=0.5, at_most=3}"],
        f"`ppo.critic_only_until` {NONE_OF_ITS_OWN}: `ppo.critic_only_until.explained_variance` = `0.5` (--set), "
        f"`ppo.critic_only_until.at_most` = `3` (--set), {ON}",
        "remove `ppo.critic_only_until.explained_variance` and `ppo.critic_only_until.at_most`",
    ),
    (
        ["model.critic=org/judge"],
        f'`model.critic` {NONE_OF_ITS_OWN}: `model.critic.path` = `"org/judge"` (--set), {ON}',
        "remove `model.critic.path`",
    ),
    (
        ["cluster.offload=['actor', 'critic']"],
        "the critic is a value head on the actor's model and is offloaded with the actor: `cluster.offload` = "
        f'`["actor", "critic"]` (--set), {ON}',
        "change the recipe, or add `--set 'cluster.offload=[\"actor\"]'`",
    ),
    (
        ["rollout.groups={critic_sees='all'}", "rollout.samples_per_prompt=2"],
        "the critic is a value head on the actor's model, so one update trains both on the same responses: "
        f'`rollout.groups.critic_sees` = `"all"` (--set), {ON}',
        "change the recipe, or add `--set rollout.groups.critic_sees=kept`",
    ),
    (
        ["ppo.resample={kind='pow'}"],
        "rows are sampled again only for a critic that has a model of its own, but the critic is a value head on the "
        f'actor\'s model: `ppo.resample.kind` = `"pow"` (--set), {ON}',
        "change the recipe, or add `--set ppo.resample.kind=none`",
    ),
    (
        ["ppo.old_logprobs=sampler"],
        "the values come from the trainer's forward pass of the log-probs, which `ppo.old_logprobs` (`sampler`) "
        f'leaves out: `ppo.old_logprobs` = `"sampler"` (--set), {ON}',
        "change the recipe, or add `--set ppo.old_logprobs=trainer`",
    ),
    (
        ["ppo.advantages={kind='grpo'}", "rollout.samples_per_prompt=2"],
        f"[critic] has no effect, because the advantages train no critic: {ON}, "
        '`ppo.advantages.kind` = `"grpo"` (--set)',
        "remove the table [critic], or add `--set ppo.advantages.kind=gae`",
    ),
]


@pytest.mark.parametrize(("sets", "message", "hint"), CASES, ids=[sets[0].partition("=")[0] for sets, _, _ in CASES])
def test_key_of_a_critic_with_its_own_model_is_refused(
    write: Write, sets: list[str], message: str, hint: str
) -> None:
    file = write(WITH_HEAD)
    load([file], {})
    caught = refusal([file], sets, {})
    assert caught.message.split(": ", 1)[1] == message
    assert caught.hint == hint


def test_joint_coefficient_is_refused_without_a_value_head(smallest: Path) -> None:
    with pytest.raises(RecipeError, match="contains this factor, but there is no such head") as caught:
        load([smallest], ["ppo.value_loss.coef=0.3"], environ={})
    assert caught.value.hint == "set `ppo.value_loss.scale` instead, or add `--set critic.on=actor`"


@pytest.mark.parametrize(
    ("parallel", "copied", "last"),
    [
        ("{}", 6, 6),
        ("{pipeline=2}", 4, 3),
        ("{pipeline=3, last_stage_layers=1, first_stage_layers=3}", 2, 1),
        ("{pipeline=2, stages_per_rank=3}", 2, 1),
    ],
)
def test_copied_layers_must_be_on_the_last_pipeline_stage(
    write: Write, tmp_path: Path, parallel: str, copied: int, last: int
) -> None:
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 48, "vocab_size": 101}
    config |= {"intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    file = write(WITH_HEAD)

    def conflicts(layers: int) -> list[str]:
        sets = [f"actor.parallel={parallel}", f"critic.layers_copied={layers}"]
        loaded, _ = examine([file], sets, {}, judges=())
        assert loaded is not None
        return [conflict.hint or "" for rule in rules_of(value_head_rules) for conflict in rule(loaded.recipe)]

    assert conflicts(last) == []
    assert conflicts(last + 1) == [f"--set critic.layers_copied={last}"]
    assert (copied > last) == bool(conflicts(copied))


def test_bootstrap_needs_room_for_a_further_token_of_the_actor(write: Write) -> None:
    file, tokens = write(WITH_HEAD), "actor.batching={max_tokens_per_microbatch=32}"
    load([file], [tokens], environ={})
    with pytest.raises(RecipeError, match="a microbatch of 32 tokens cannot contain a sequence of 33"):
        load([file], [tokens, "ppo.truncated=bootstrap"], environ={})
