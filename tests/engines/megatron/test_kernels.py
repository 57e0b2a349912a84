"""Fused kernels: the same function as plain ones, and as float64. `test_recompute.py` counts what they keep. Not
verified: compiled code on a GPU."""

from dataclasses import replace

import megatron_lab as lab
import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

from fakes.components import fake_recipe
from ppoctl.engines.megatron.factory import trainer_settings
from tolerance import BFLOAT16, FLOAT32


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_fused_activation_agrees_with_float64(dtype, level):
    """silu(gate) * up, with a weight per token and without, and all gradients."""
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(size, generator=generator).mul(3).to(dtype) for size in ((7, 22), (7, 1), (7, 11))]
    for is_weighted in (False, True):
        inputs, weights = (each.clone().requires_grad_() for each in given[:2])
        exact, exact_weights = (each.double().requires_grad_() for each in given[:2])
        found = weighted_bias_swiglu_impl(inputs, None, weights) if is_weighted else bias_swiglu_impl(inputs, None)
        gate, up = exact.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up * (exact_weights if is_weighted else 1)
        found.backward(given[2])
        expected.backward(given[2].double())
        level.check(found, expected)
        level.check(inputs.grad, exact.grad)
        if is_weighted:
            level.check(weights.grad, exact_weights.grad)


@pytest.mark.parametrize(
    ("kind", "role", "dtype", "level"),
    [
        ("qwen2", "actor", "float32", FLOAT32),
        ("qwen2", "critic", "bfloat16", BFLOAT16),
        ("qwen2-moe-mixed", "actor", "float32", FLOAT32),
        ("deepseek-v3-low-rank", "critic", "float32", FLOAT32),
    ],
)
def test_update_with_fused_kernels_has_the_gradients_of_plain_ones(model, kind, role, dtype, level):
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)
    plain = getattr(lab, role)(model(kind), dtype=dtype)
    fused = lab.started(replace(plain.settings, kernels="fused"))
    results = [trainer.update(rollouts, [lab.minibatch(rollouts)], objective)[0] for trainer in (fused, plain)]
    level.check(results[0].outputs.primary, results[1].outputs.primary)
    lab.check_all(level, lab.gradients_of(fused), lab.gradients_of(plain))
    assert sum(float(tensor.abs().sum()) for tensor in lab.gradients_of(plain).values()) > 0.1


def test_each_role_uses_its_own_kernels():
    recipe = fake_recipe(critic={"optimizer": {"lr": 1.0}, "kernels": "fused"})
    assert [trainer_settings(recipe, role).kernels for role in ("actor", "critic")] == ["plain", "fused"]
