"""deepseek_v3: its configuration is followed or refused, and its router bias is kept but not trained."""

import json
import math
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file, save_file

from ppoctl.core.errors import EnvironmentProblemError, RecipeError
from ppoctl.core.ports import OptimizerStep
from ppoctl.models.cost import token_cost
from ppoctl.models.rope import Rope, YarnScaling
from ppoctl.models.shape import ExpertShape, LatentShape, SigmoidRouting
from ppoctl.models.shape_reader import read_shape
from tolerance import EXACT

BIAS = "e_score_correction_bias"
MODELS = Path(__file__).parents[3] / "recipes/models"
MOONLIGHT = json.loads((MODELS / "moonshotai--Moonlight-16B-A3B-Instruct/config.json").read_text())


def write(config: dict[str, object], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_reads_published_moonlight_config(tmp_path):
    shape = read_shape(write(MOONLIGHT, tmp_path))
    assert (shape.num_layers, shape.num_heads, shape.head_dim, shape.rope_dim) == (27, 16, 192, 64)
    assert (shape.norm_eps, shape.rope, shape.attention_scale) == (1e-5, Rope(50000.0), None)
    assert shape.latent == LatentShape(
        query_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, norm_eps=1e-6
    )
    assert shape.experts == ExpertShape(
        count=64,
        per_token=6,
        ffn_hidden_size=1408,
        renormalise=True,
        layers=(False, *(True,) * 26),
        shared_ffn_hidden_size=2816,
        sigmoid=SigmoidRouting(groups=1, groups_per_token=1, scale=2.446),
    )


def test_reads_yarn_scaling_from_deepseek_config(tmp_path):
    """The scale of scores by hand: (0.1 log 40 + 1) squared, divided by the square root of 192."""
    kind = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    written = {**MOONLIGHT, "rope_scaling": {**kind, "mscale": 1.0, "mscale_all_dim": 1.0}}
    shape = read_shape(write(written, tmp_path))
    assert shape.rope.scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert shape.rope.attention_factor == 1.0
    assert shape.attention_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))


def test_token_cost_counts_latent_attention_and_active_experts(model):
    """Three layers of 48 x 20 to latent queries, 20 x 6 x 20 on, 48 x (24 + 8), 24 x 6 x (12 + 16), 6 x 16 x 48; one
    MLP of 80; two of eight experts to choose from, three of width 32 and the shared 64."""
    cost = token_cost(read_shape(model("deepseek-v3-low-rank")))
    attention = 48 * 20 + 20 * 120 + 48 * 32 + 24 * 168 + 96 * 48
    assert cost.flops_per_token == 2 * (3 * attention + 48 * 3 * 80 + 2 * 48 * (8 + 3 * (3 * 32 + 64)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("rope_interleave", False),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("num_key_value_heads", 8),
        ("v_head_dim", 200),
        ("n_shared_experts", 0),
        ("n_group", 3),
        ("n_group", 64),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "mscale": 1.0}),
        ("index_topk", 2048),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_unsupported_deepseek_setting_is_rejected_by_name(tmp_path, field, value):
    name = field.replace("rope_scaling", "rope_parameters")
    with pytest.raises(RecipeError, match=f"`{name} = .*not supported"):
        read_shape(write({**MOONLIGHT, field: value}, tmp_path))


def test_multi_token_prediction_layers_are_rejected_by_tensor_name(model, tmp_path):
    source = model("deepseek-v3")
    write(json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}, tmp_path)
    tensors = load_file(source / "model.safetensors") | {"model.layers.3.enorm.weight": torch.ones(48)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        EnvironmentProblemError, match=r"`model\.layers\.3\.enorm\.weight` in .* not part of the actor"
    ):
        lab.actor(tmp_path)


def test_router_bias_stays_float32_and_is_not_trained(model):
    """A step on everything else must not even apply weight decay to it."""
    trainer, rollouts = lab.actor(model("deepseek-v3"), dtype="bfloat16"), lab.make_rollouts()
    source = load_file(model("deepseek-v3") / "model.safetensors")
    step = OptimizerStep(lr=1e-2, weight_decay=0.5, grad_clip=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    trainer.update(rollouts, [lab.minibatch(rollouts, step=step)] * 2, lab.policy_objective(rollouts))
    for name, tensor in lab.weights_of(trainer).items():
        if name.endswith(BIAS):
            EXACT.check(tensor, source[name])
            assert not torch.equal(tensor, tensor.bfloat16().float())  # there was something to round
        else:
            assert tensor.dtype == torch.bfloat16
            assert not torch.equal(tensor, source[name].bfloat16()), name
