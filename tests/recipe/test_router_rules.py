"""Rules about the routers of a mixture of experts."""

from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.load import load
from recipe.conftest import model_as_read, refusal

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"


def test_replay_requires_experts_and_a_forward_pass(experts: str) -> None:
    replays = "actor.router_replay=trainer"
    with pytest.raises(RecipeError, match="the model has no experts that a pass could use again") as caught:
        load([QUICKSTART], [replays])
    assert "--set actor.router_replay=off" in str(caught.value.hint)
    assert "but there is none" in str(refusal([QUICKSTART], [experts, replays, "ppo.old_logprobs=sampler"]))
    assert load([QUICKSTART], [experts, replays]).recipe.actor.router_replay == "trainer"
    several = ["rollout.tokens_per_step=8", "ppo.rollout_correction.kind=tis"]
    assert "a response has several" in str(
        refusal([QUICKSTART], [experts, "actor.router_replay=generator", *several])
    )
    load([QUICKSTART], [experts, replays, *several])


def test_replay_requires_experts_that_a_byte_can_number(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "num_experts": 300, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    many = model_as_read(tmp_path, model_type="qwen3_moe", **sizes)
    assert "for at most 256 in a layer; the model has 300" in str(
        refusal([QUICKSTART], [many, "actor.router_replay=trainer"])
    )


def test_balance_requires_experts_and_a_bias_that_is_saved(experts: str) -> None:
    loss, bias = "actor.router_aux_loss_coef=0.001", "actor.router_bias_rate=0.001"
    for key in (loss, bias):
        caught = refusal([QUICKSTART], [key])
        assert "the model has no experts to balance" in str(caught)
        assert f"--set {key.partition('=')[0]}=0" in str(caught.hint)
    load([QUICKSTART], [experts, loss, "actor.train={top_layers=1}"])
    if "deepseek" not in Path(experts.partition("=")[2].strip('"'), "config.json").read_text():
        assert "have no bias that balances" in str(refusal([QUICKSTART], [experts, bias]))
        return
    assert load([QUICKSTART], [experts, loss, bias]).recipe.actor.router_bias_rate == 0.001
    for part in ("actor.train={top_layers=1}", "actor.freeze=*.router.weight"):
        caught = refusal([QUICKSTART], [experts, bias, part])
        assert "biases of routers only if all parameters train" in str(caught)
        assert "--set actor.router_bias_rate=0" in str(caught.hint)
