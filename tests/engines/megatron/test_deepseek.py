"""deepseek_v3: its configuration is followed or refused, its router bias is kept but not trained, and the comparison
with transformers detects conversion errors."""

import json
import math
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file, save_file

from ppoctl.errors import EnvironmentProblemError, RecipeError
from ppoctl.model.cost import token_cost
from ppoctl.model.rope import Rope, YarnScaling
from ppoctl.model.shape import ExpertShape, LatentShape, SigmoidRouting
from ppoctl.model.shape_reader import read_shape
from ppoctl.ports import OptimizerStep
from ppoctl.recipe.schema import BySequences, ByTokens
from tolerance import EXACT, FLOAT32

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


def test_missing_router_bias_is_named_in_error(model, tmp_path):
    write(json.loads((model("deepseek-v3") / "config.json").read_text()), tmp_path)
    tensors = load_file(model("deepseek-v3") / "model.safetensors")
    del tensors[f"model.layers.2.mlp.gate.{BIAS}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentProblemError, match=rf"`model\.layers\.2\.mlp\.gate\.{BIAS}` missing"):
        lab.actor(tmp_path)


@pytest.mark.parametrize("batching", [BySequences(microbatch_seqs=5), ByTokens(max_tokens_per_microbatch=16)])
def test_packing_does_not_change_deepseek_logprobs(model, batching):
    rollouts, folder = lab.make_rollouts(), model("deepseek-v3")
    one_by_one = lab.scores(lab.actor(folder, batching=BySequences(microbatch_seqs=1)), rollouts)
    packed = lab.scores(lab.actor(folder, batching=batching), rollouts)
    for found, expected in zip(packed, one_by_one, strict=True):
        FLOAT32.check(found, expected)


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


def swap(tensors: dict[str, torch.Tensor], one: str, other: str) -> None:
    for name in [name for name in tensors if one in name]:
        twin = name.replace(one, other)
        tensors[name], tensors[twin] = tensors[twin], tensors[name]


def drop_the_bias(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(BIAS)]:
        tensors[name] = torch.zeros_like(tensors[name])


def rope_as_halves(tensors: dict[str, torch.Tensor]) -> None:
    """Move the rows of rotated channels (2i, 2i + 1) to (i, i + 4), as other families have them."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        heads = tensors[name].view(6, 20, 48)
        tensors[name] = torch.cat([heads[:, :12], heads[:, 12:][:, order]], dim=1).flatten(0, 1).contiguous()
    for name in [name for name in tensors if "kv_a_proj" in name]:
        tensors[name] = torch.cat([tensors[name][:24], tensors[name][24:][order]])


def halves_of_rope_swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Swap the halves of the rotated channels, in the key only."""
    for name in [name for name in tensors if "kv_a_proj" in name]:
        latent, first, second = tensors[name].split([24, 4, 4])
        tensors[name] = torch.cat([latent, second, first])


DEFECTS = {
    "an expert permuted": lambda tensors: swap(tensors, "layers.1.mlp.experts.2.", "layers.1.mlp.experts.3."),
    "a shared expert's gate and up swapped": lambda tensors: swap(
        tensors, "shared_experts.gate_proj", "shared_experts.up_proj"
    ),
    "the bias dropped": drop_the_bias,
    "rope by halves": rope_as_halves,
    "halves of the shared key swapped": halves_of_rope_swapped,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_logprobs_reveal_each_weight_defect(model, tmp_path, defect):
    """The defect must exceed the tolerance of the comparison with transformers by a factor of 100."""
    write(json.loads((model("deepseek-v3") / "config.json").read_text()), tmp_path)
    tensors = load_file(model("deepseek-v3") / "model.safetensors")
    DEFECTS[defect](tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    rollouts = lab.make_rollouts()
    expected, _ = lab.expected_logprobs(lab.hugging_face_model("deepseek-v3"), rollouts, 1.0)
    found, _ = lab.scores(lab.actor(tmp_path), rollouts)
    assert (found - expected).abs().max() > 1e-2
