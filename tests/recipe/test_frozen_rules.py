"""The part of a model that trains is checked against the model's config.json before anything is started."""

from pathlib import Path

import pytest

from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.rules import frozen_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of
from recipe.conftest import model_as_read, refusal

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"

# The quickstart's model is a qwen2 with 4 layers and tied embeddings.
CASES = [
    (
        "check_top_layers",
        "actor.train={top_layers=5}",
        "the model has only 4 layers",
        "--set actor.train.top_layers=4",
    ),
    (
        "check_top_layers",
        "critic.train={top_layers=9}",
        "the model has only 4 layers",
        "--set critic.train.top_layers=4",
    ),
    (
        "check_freeze_patterns",
        "actor.freeze=['decoder.layers.*.mlp.*', 'decoder.layers.*.self_atention.linear_qkv.bias']",
        "no parameter has a name like `decoder.layers.*.self_atention.linear_qkv.bias`; the nearest names are "
        "`decoder.layers.*.self_attention.linear_qkv.bias`, `decoder.layers.*.self_attention.linear_qkv.weight`",
        "--set 'actor.freeze=[\"decoder.layers.*.self_attention.linear_qkv.bias\"]'",
    ),
    (
        "check_freeze_patterns",
        "critic.freeze=decoder.layers.4.mlp.linear_fc1.weight",
        "no parameter has a name like `decoder.layers.4.mlp.linear_fc1.weight`",
        "`critic.freeze` =",
    ),
    (
        "check_freeze_patterns",
        "actor.freeze=value_head.*",
        "no parameter has a name like `value_head.*`",
        "actor.freeze=",
    ),
    (
        "check_something_trains",
        "actor.freeze=['embedding.*', 'decoder.*']",
        "no parameter of the actor trains",
        "--set 'actor.freeze=[]'",
    ),
]


@pytest.mark.parametrize(("rule", "written", "says", "hint"), CASES)
def test_part_that_does_not_fit_model_raises(rule: str, written: str, says: str, hint: str) -> None:
    assert rule in {check.__name__ for check in rules_of(frozen_rules)}
    caught = refusal([QUICKSTART], [written])
    assert says in str(caught)
    assert hint in f"{caught} {caught.hint}"


@pytest.mark.parametrize(
    "written",
    [
        "actor.train={top_layers=4}",
        "actor.freeze=['embedding.word_embeddings.weight', '*.bias']",
        "critic.freeze=['embedding.*', 'decoder.*']",
        "actor.freeze=['decoder.layers.?.self_attention.*']",
    ],
)
def test_part_that_fits_model_is_accepted(written: str) -> None:
    """A critic whose layers are all frozen trains its head; the actor's output layer is the frozen embedding."""
    load([QUICKSTART], [written])


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """A mixture with 12 experts, as far as `load` reads it."""
    sizes = {"num_key_value_heads": 2, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return model_as_read(tmp_path, model_type="qwen3_moe", **sizes)


def test_experts_of_a_layer_are_frozen_together(experts: str) -> None:
    for together in ("decoder.layers.*.mlp.router.weight", "decoder.layers.1.*", "*.local_experts.*.linear_fc2.*"):
        load([QUICKSTART], [experts, f"actor.freeze={together}"])
    some = "actor.freeze=*.local_experts.1*.linear_fc2.*"
    caught = refusal([QUICKSTART], [experts, some])
    assert "freezes some experts of a layer, but not `decoder.layers.0.mlp.experts.local_experts.0." in str(caught)
    assert "`, and a saved state has the experts of a layer in one tensor: " in str(caught)
    load([QUICKSTART], [experts, some, "actor.train={lora={}}"])  # a state of adapters has no experts
    assert "--set 'actor.freeze=[\"*.local_experts.*.linear_fc2.*\"]'" in str(caught.hint)


def test_pattern_of_misspelled_expert_names_the_experts(experts: str) -> None:
    caught = refusal([QUICKSTART], [experts, "actor.freeze=decoder.layers.*.mlp.gate.weight"])
    assert "`decoder.layers.*.mlp.router.weight`" in str(caught)
