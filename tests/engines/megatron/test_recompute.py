"""Recomputed activations: equal gradients, fewer bytes between forward and backward.

Verified: gradients and outputs are bit-equal on a CPU; kept bytes, counted. Not verified: the peak of a GPU.
"""

from dataclasses import replace

import megatron_lab as lab
import pytest
import torch
from torch import Tensor

from fakes.components import fake_recipe
from ppoctl.algorithms.role_table import BySequences, Recompute
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.microbatches import MicrobatchPlan, cut_rows
from ppoctl.engines.megatron.packed_input import ReadSettings
from ppoctl.engines.megatron.trainer import MegatronTrainer
from ppoctl.models.cost import token_cost

TOKENS = 38
"""Input tokens of all rows of the rollouts: 6 + 11 + 2 + 10 + 9."""


def recomputing(trainer: MegatronTrainer, recompute: Recompute) -> MegatronTrainer:
    """Return another started trainer whose settings differ only in recomputation."""
    return lab.started(replace(trainer.settings, recompute=recompute))


def kept_bytes(trainer: MegatronTrainer) -> int:
    """Return the bytes that the graph of one forward pass over all rows holds, without weights."""
    model = lab.rank_of(trainer).models[0]
    cut = MicrobatchPlan(
        BySequences(microbatch_seqs=5), ReadSettings(torch.device("cpu")), token_cost(model.settings.shape)
    )
    [microbatch] = cut_rows(lab.make_rollouts(), torch.arange(5), cut)
    assert microbatch.input.tokens.numel() == TOKENS
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with megatron_device(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(microbatch.input)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "role", "dtype"),
    [
        *(("qwen2", role, dtype) for role in ("actor", "critic") for dtype in ("float32", "bfloat16")),
        ("gemma2", "actor", "bfloat16"),
        ("gemma3", "actor", "bfloat16"),
        ("qwen2-moe", "actor", "float32"),
        ("deepseek-v3-low-rank", "actor", "bfloat16"),
    ],
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gradients_are_bitwise_equal(model, kind, role, dtype, recompute):
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)
    keeping = getattr(lab, role)(model(kind), dtype=dtype)
    found, expected = recomputing(keeping, recompute), keeping
    results = [one.update(rollouts, [lab.minibatch(rollouts)], objective) for one in (found, expected)]
    assert torch.equal(results[0][0].outputs.primary, results[1][0].outputs.primary)
    gradients, wanted = lab.gradients_of(found), lab.gradients_of(expected)
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    assert sum(float(tensor.abs().sum()) for tensor in wanted.values()) > 0.1


def test_full_recompute_keeps_only_layer_inputs(model):
    """Two models that differ by two layers, so that everything outside of layers cancels."""
    deep, shallow = (kept_bytes(recomputing(lab.actor(model(kind)), "full")) for kind in ("qwen2-deep", "qwen2-tied"))
    assert deep - shallow == 2 * TOKENS * lab.SIZES["hidden_size"] * 4


def test_recompute_reduces_kept_activation_bytes(model):
    trainer = lab.actor(model("qwen2-deep"))
    none, selective, full = (kept_bytes(recomputing(trainer, how)) for how in ("none", "selective", "full"))
    # In the MLP: gate and up together, silu of the gate, and the input of the last projection.
    inside_mlp = 4 * TOKENS * lab.SIZES["intermediate_size"] * 4
    assert none - selective >= 4 * inside_mlp
    assert none > 1.5 * selective > 6 * full


def test_fused_kernels_keep_gate_up_and_product(model):
    """Each of four layers keeps neither the silu of the gate nor a copy of up."""
    plain = lab.actor(model("qwen2-deep"))
    fused = lab.started(replace(plain.settings, kernels="fused"))
    assert kept_bytes(plain) - kept_bytes(fused) == 4 * 2 * TOKENS * lab.SIZES["intermediate_size"] * 4


def test_recompute_does_not_change_forward_outputs(model):
    rollouts = lab.make_rollouts()
    keeping = lab.actor(model("qwen2"))
    found = recomputing(keeping, "full").forward("forward", rollouts, OutputRequest())
    assert torch.equal(found.primary, keeping.forward("forward", rollouts, OutputRequest()).primary)


def test_each_role_uses_its_own_recompute_setting():
    recipe = fake_recipe(critic={"optimizer": {"lr": 1.0}, "recompute": "full"})
    assert [trainer_settings(recipe, role).recompute for role in ("actor", "critic")] == ["none", "full"]
