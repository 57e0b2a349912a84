"""The metric `policy/merge_error`, by hand, by numpy, and on ranks."""

from dataclasses import replace

import layout_lab
import lora_lab
import megatron_lab as lab
import numpy as np
import pytest
import torch
from layout_lab import STEP, settings, trainer
from lora_lab import ALL, adapted
from safetensors.torch import load_file

import tolerance
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron import merge_error
from ppoctl.models.convert.adapters import adapters

pytestmark = pytest.mark.engines


def test_merge_error_of_four_numbers_by_hand():
    """In units of 2^-8, the products are 1 and 3 (row 1), and 8 and 24 (row 2). bfloat16 has a distance of 2 units
    above 1, so 1 + 1 rounds to 1 and 1 + 3 to 1 + 4: both lose one unit. 0 + 8 is exact. It has a distance of 16
    above 8, so 8 + 24 rounds to 8 + 32: it gains 8 units."""
    weight = torch.tensor([[1.0, 1.0], [0.0, 8.0]], dtype=torch.bfloat16)
    a = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    b = torch.tensor([[2.0**-9], [2.0**-6]], dtype=torch.bfloat16)
    unit = 2.0**-16
    expected = torch.tensor([1 + 1 + 0 + 64, 1 + 9 + 64 + 576], dtype=torch.float64) * unit
    tolerance.EXACT.check(merge_error.squares(weight, a, b, 2.0), expected)
    nothing = merge_error.squares(weight, a, torch.zeros_like(b), 2.0)
    tolerance.EXACT.check(nothing, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("at_once", [1, 30, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_numpy_however_rows_are_cut(dtype, at_once):
    generator = torch.Generator().manual_seed(2)
    weight, a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((7, 10), (3, 10), (7, 3)))
    exact = weight.double().numpy() + 0.3 * (b.double().numpy() @ a.double().numpy())
    rounded = torch.from_numpy(exact).to(dtype).double().numpy()
    product = exact - weight.double().numpy()
    lost, whole = merge_error.squares(weight, a, b, 0.3, at_once).tolist()
    assert whole == pytest.approx(np.square(product).sum(), rel=1e-9)
    ideal = np.square(rounded - exact).sum()
    # A float32 weight is the sum of three products, each of which is rounded.
    assert 0 < 0.999 * ideal <= lost < ideal * (20 if dtype is torch.float32 else 1.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "trainable", "layout"),
    [
        ("qwen2-deep", ALL, ParallelTable(tensor=2, sequence=True)),
        ("qwen2-deep", ALL, ParallelTable(pipeline=2, stages_per_rank=2)),
        ("qwen2-deep", ALL, ParallelTable(data=2, distributed_optimizer=True)),
        ("deepseek-v3-low-rank", ALL, ParallelTable(tensor=2, sequence=True)),
    ],
    ids=["TP2", "PP2 interleaved", "DP2", "latents TP2"],
)
def test_last_minibatch_reports_the_error_of_the_sent_weights(pool, model, tmp_path, kind, trainable, layout):
    """The weights that engines receive are compared with the matrices of the saved state."""
    made = replace(settings(model(kind), "actor", layout, torch.bfloat16), trainable=trainable)
    actor = trainer(pool, made)
    actor.start()
    rollouts = lab.make_rollouts()
    minibatches = [lab.minibatch(rollouts, rows, step=STEP) for rows in ((0, 1, 2, 3, 4), (3, 0, 2, 1))]
    results = actor.update(rollouts, minibatches, layout_lab.policy_objective(rollouts))
    sent = {name: tensor.double() for name, tensor in pool.tensors()}
    matrices = lora_lab.matrices_of(actor, lora_lab.saved(actor, tmp_path / "state"))
    base, sums = load_file(model(kind) / "model.safetensors"), np.zeros(2)
    assert made.trainable.lora is not None
    for each in adapters(actor.source[1], made.trainable):
        a, b = (matrices[matrix.name].double() for matrix in (each.a, each.b))
        product = made.trainable.lora.scale * b @ a
        lost = sent[each.base.name] - base[each.base.name].bfloat16().double() - product
        sums += float(lost.square().sum()), float(product.square().sum())
    assert results[0].merge_error is None
    expected = float(np.sqrt(sums[0] / sums[1]))
    assert results[1].merge_error is not None
    assert 0.01 < expected < 1.5
    tolerance.STEP.check(results[1].merge_error, expected)


def test_only_an_actor_with_adapters_has_a_merge_error(model):
    """A rate of 0 leaves B at 0, so all products are 0."""
    rollouts = lab.make_rollouts()
    objective, still = lab.policy_objective(rollouts), lab.minibatch(rollouts, step=replace(lab.STEP, lr=0.0))
    actor = lora_lab.started(model("qwen2"), adapted("q_proj"))
    assert actor.update(rollouts, [still], objective)[0].merge_error == 0.0
    assert lab.actor(model("qwen2")).update(rollouts, [still], objective)[0].merge_error is None
    critic = lora_lab.started(model("qwen2"), adapted("q_proj"), "critic")
    [result] = critic.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    assert result.merge_error is None
