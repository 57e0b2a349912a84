"""Adapters are checked against the model's config.json before anything is started."""

import json
from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.rules import lora_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of
from recipe.conftest import model_as_read, refusal

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
ATTENTION = "`q_proj`, `k_proj`, `v_proj`, `o_proj`"
ALL = f"{ATTENTION}, `gate_proj`, `up_proj`, `down_proj`"

# The quickstart's model is a qwen2: 128 wide, 4 heads of 32, 2 key heads, MLP of 384.
CASES: list[tuple[str, list[str], str, str]] = [
    (
        "check_targets_exist",
        ["actor.train={lora={targets=['o_proj', 'q_porj', 'down_proj']}}"],
        f"the model has no projection `q_porj`; the projections that can have adapters are {ALL}",
        '--set \'actor.train.lora.targets=["o_proj", "q_proj", "down_proj"]\'',
    ),
    (
        "check_targets_exist",
        ["critic.train={lora={targets=['linear_fc1', 'linear_qkv', 'v_proj']}}"],
        "the model has no projection `linear_fc1`, `linear_qkv`; ",
        '--set \'critic.train.lora.targets=["gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"]\'',
    ),
    (
        "check_targets_exist",
        ["actor.train={lora={targets=['lm_head']}}"],
        "the model has no projection `lm_head`; ",
        '"o_proj", "gate_proj", "up_proj", "down_proj"]\'',
    ),
    (
        "check_targets_exist",
        ["actor.train={lora={targets=[]}}"],
        "no projection is a target; ",
        'targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]\'',
    ),
    (
        "check_rank_fits_targets",
        ["critic.train={lora={rank=65}}"],
        "`k_proj` has 128 inputs and 64 outputs, so a rank above 64 adds nothing",
        "--set critic.train.lora.rank=64",
    ),
    (
        "check_rank_fits_targets",
        ["actor.train={lora={rank=129, targets=['down_proj', 'o_proj']}}"],
        "`o_proj` has 128 inputs and 128 outputs, so a rank above 128 adds nothing",
        "--set actor.train.lora.rank=128",
    ),
    (
        "check_freeze_leaves_adapters",
        ["actor.train={lora={targets=['q_proj', 'v_proj']}}", "actor.freeze=['*.linear_qkv.weight']"],
        "no projection of the actor has an adapter, because the patterns match the weights of all targets",
        "--set 'actor.freeze=[]'",
    ),
    (
        "check_freeze_leaves_adapters",
        ["critic.train={lora={}}", "critic.freeze=['decoder.*']"],
        "no projection of the critic has an adapter",
        "--set 'critic.freeze=[]'",
    ),
    (
        "check_copied_layers_have_no_adapters",
        ["critic={on='actor', layers_copied=1}", "actor.train={lora={}}"],
        "layers with adapters cannot be copied for a value head: `critic.layers_copied` = `1` (--set)",
        "--set critic.layers_copied=0",
    ),
]


@pytest.mark.parametrize(("rule", "sets", "says", "hint"), CASES)
def test_adapters_that_do_not_fit_the_model_are_refused_with_one_message(
    rule: str, sets: list[str], says: str, hint: str
) -> None:
    caught = refusal([QUICKSTART], sets)
    assert says in caught.message
    assert len(caught.message.splitlines()) == 1
    assert hint in str(caught.hint)


def test_every_rule_about_adapters_has_a_failing_case() -> None:
    tested_with_experts = "check_targets_are_not_routed_experts"
    assert {rule for rule, *_ in CASES} | {tested_with_experts} == {check.__name__ for check in rules_of(lora_rules)}


@pytest.mark.parametrize(
    "sets",
    [
        ["actor.train={lora={}}", "critic.train={lora={targets='all-linear'}}"],
        ["actor.train={lora={rank=64, targets=['down_proj', 'k_proj']}}"],
        ["critic.train={lora={rank=128, targets=['q_proj', 'o_proj']}}"],
        ["actor.train={lora={targets=['q_proj', 'down_proj']}}", "actor.freeze=['*.linear_qkv.weight']"],
        ["critic={on='actor', head='mlp'}", "actor.train={lora={}}"],
        ["critic={on='actor', layers_copied=1}"],
    ],
)
def test_adapters_that_fit_the_model_are_accepted(sets: list[str]) -> None:
    load([QUICKSTART], sets)


def test_pattern_that_matches_only_adapters_is_refused() -> None:
    """It would freeze nothing: patterns of `freeze` match weights of the model."""
    with pytest.raises(RecipeError, match=r"no parameter has a name like `\*\.adapters\.q_proj\.\*`"):
        load([QUICKSTART], ["actor.train={lora={}}", "actor.freeze=['*.adapters.q_proj.*']"])


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 2,
}
WITH_DENSE_LAYERS = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


OF_MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("config", "adaptable", "of_routed_experts"),
    [
        (MIXTURE, ["q_proj", "k_proj", "v_proj", "o_proj"], ["up_proj", "gate_proj"]),
        ({**MIXTURE, "mlp_only_layers": [1]}, ["q_proj", "k_proj", "v_proj", "o_proj", *OF_MLP], ["experts.up_proj"]),
        (
            WITH_DENSE_LAYERS,
            ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *OF_MLP],
            ["mlp.experts.gate_up_proj", "gate"],
        ),
    ],
    ids=["qwen3_moe", "qwen3_moe with an MLP", "deepseek_v3"],
)
def test_routed_experts_and_routers_are_refused_as_targets(
    tmp_path: Path, config: dict[str, object], adaptable: list[str], of_routed_experts: list[str]
) -> None:
    """Names that MLPs or shared experts have too mean these."""
    model = model_as_read(tmp_path, num_hidden_layers=3, **config)
    for accepted in (adaptable, "'all-linear'"):
        load([QUICKSTART], [model, f"actor.train={{lora={{rank=3, targets={accepted}}}}}"])
    for targets, hint in ((["o_proj", *of_routed_experts], ["o_proj"]), (of_routed_experts, adaptable)):
        caught = refusal([QUICKSTART], [model, f"actor.train={{lora={{rank=3, targets={targets}}}}}"])
        assert (
            "routed experts and routers have no adapters, but targets name them: "
            f"{', '.join(f'`{name}`' for name in of_routed_experts)}. peft has no plain adapter for them, and merged "
            "experts would be nearly the whole model at each transfer; the projections that can have adapters are "
            f"{', '.join(f'`{name}`' for name in adaptable)}: "
        ) in caught.message
        assert len(caught.message.splitlines()) == 1
        assert f"actor.train.lora.targets={json.dumps(hint)}'" in str(caught.hint)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("actor.train={lora={r=4}}", "it is a key of peft; use `actor.train.lora.rank`"),
        ("critic.train={lora={lora_alpha=4}}", "it is a key of peft; use `critic.train.lora.alpha`: 8 in peft"),
        ("actor.train={lora={lora_dropout=0.1}}", "dropout is not offered: PPO compares the log-probs of two passes"),
        ("actor.train={lora={dropout=0.1}}", "dropout is not offered"),
        (
            "actor.train={lora={use_dora=true}}",
            "DoRA, which also trains the length of each row of the weight, is not",
        ),
        ("actor.train={lora={dora=true}}", "DoRA, "),
        ("critic.train={lora={use_rslora=true}}", "use `critic.train.lora.alpha`: rsLoRA is not offered; its factor"),
        ("actor.train={lora={qlora=true}}", "quantized weights (QLoRA) are not offered"),
        ("actor.train={lora={bias='all'}}", "biases, norms and the embedding are frozen"),
        (
            "actor.train={lora={layers_to_transform=[0]}}",
            "a target has an adapter of the same rank and alpha in every",
        ),
        ("actor.lora.rank=8", "`lora` belongs under [actor.train] or [critic.train]"),
        ("actor.lora_rank=8", "verl's `actor_rollout_ref.model.lora_rank` is `actor.train.lora.rank` in ppoctl"),
        ("critic.lora_rank=8", "verl's `critic.model.lora_rank` is `critic.train.lora.rank` in ppoctl"),
        ("model.lora={rank=8}", "use `actor.train.lora.rank` and `critic.train.lora.rank`"),
        ("actor.peft_config={r=8}", "peft's `actor.train.lora.r` is `actor.train.lora.rank` in ppoctl"),
        ("actor.optimizer.optimizer_cpu_offload=true", 'is `actor.optimizer.on = "cpu"` in ppoctl'),
        ("critic.optimizer.optimizer_offload_fraction=0.5", "is `critic.optimizer.on` in ppoctl: a fraction in"),
    ],
)
def test_key_of_other_systems_for_adapters_names_ours_or_what_is_not_offered(written: str, says: str) -> None:
    assert says in refusal([QUICKSTART], [written]).message
