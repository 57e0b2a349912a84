"""Latent attention, shared experts and sigmoid routing under every layout, compared with one process.

As in `test_expert_layouts`, layouts cannot be compared if the choice of experts nearly ties.
`test_sigmoid_routing_of_fixture_has_no_near_ties` shows that these weights and tokens have no near ties.
"""

import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, STEP, assert_agree, gap, policy_objective, settings, three_steps, trainer
from safetensors.torch import load_file

from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.recipe.schema import ParallelTable

BIAS = "e_score_correction_bias"
LAYOUTS = {
    "TP2": ParallelTable(tensor=2, sequence=True),
    "TP2, experts split": ParallelTable(tensor=2, sequence=True, expert_tensor=2),
    "PP2": ParallelTable(pipeline=2, first_stage_layers=1),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True, first_stage_layers=1),
    "CP2 TP2": ParallelTable(context=2, tensor=2, sequence=True),
    "EP2": ParallelTable(data=2, expert=2),
    "EP2 distributed optimizer": ParallelTable(data=2, expert=2, distributed_optimizer=True),
    "TP2 EP2": ParallelTable(tensor=2, sequence=True, expert=2),
}


def check_steps(pool, model, alone, layout, kind, role):
    found, expected = three_steps(pool, settings(model(kind), role, LAYOUTS[layout])), alone(kind, role)
    assert_agree(found, expected, whole=not LAYOUTS[layout].distributed_optimizer)
    untrained = [name for name in found["change"] if name.endswith(BIAS)]
    assert len(untrained) == 2
    assert not any(found["change"][name].any() for name in untrained)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_query_gradients_and_steps_do_not_depend_on_layout(pool, model, alone, layout):
    """The model with latent queries has everything that the other model has, except one product."""
    check_steps(pool, model, alone, layout, "deepseek-v3-low-rank", "actor")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "role"), [("TP2", "actor"), ("TP2 PP2", "critic"), ("EP2", "critic")])
def test_direct_query_and_critic_steps_do_not_depend_on_layout(pool, model, alone, layout, role):
    check_steps(pool, model, alone, layout, "deepseek-v3", role)


@pytest.mark.parametrize("kind", ["deepseek-v3", "deepseek-v3-low-rank"])
def test_sigmoid_routing_of_fixture_has_no_near_ties(kind):
    """The gap between the last chosen and the first rejected group, and between experts, is more than 1e-3 for every
    token and layer; and the bias and the groups change most choices."""
    hugging_face, rollouts = lab.hugging_face_model(kind), lab.make_rollouts()
    biases = [tensor for name, tensor in hugging_face.named_buffers() if name.endswith(BIAS)]
    margins, changed = [], []
    for sequence in rollouts.unpadded():
        with torch.no_grad():
            layers = hugging_face(input_ids=sequence[None], output_router_logits=True).router_logits
        for logits, bias in zip(layers, biases, strict=True):
            pairs = (logits.sigmoid() + bias).view(-1, 4, 2)
            groups = pairs.sum(-1).sort(dim=-1, descending=True)
            margins.append((groups.values[:, 1] - groups.values[:, 2]).min())
            taken = pairs.gather(1, groups.indices[:, :2, None].expand(-1, -1, 2)).flatten(1)
            likely = taken.sort(dim=-1, descending=True).values
            margins.append((likely[:, 2] - likely[:, 3]).min())
            plain = logits.sigmoid().topk(3).values.sum(-1)
            weights = taken.topk(3).values.sum(-1)
            changed.append((plain - weights).abs() > 1e-3)
    assert torch.stack(margins).min() > 1e-3
    assert torch.cat(changed).float().mean() > 0.5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["TP2", "PP2", "TP2 PP2", "EP2", "TP2 EP2"])
def test_deepseek_logprobs_match_transformers_and_export_is_exact(pool, model, tmp_path, layout):
    actor = trainer(pool, settings(model("deepseek-v3-low-rank"), "actor", LAYOUTS[layout]))
    assert isinstance(actor, MegatronActor)
    actor.start()
    rollouts = lab.make_rollouts()
    expected, entropy = lab.expected_logprobs(lab.hugging_face_model("deepseek-v3-low-rank"), rollouts, 0.8)
    found = lab.scores(actor, rollouts, 0.8)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], entropy, atol=1e-4, rtol=0)
    actor.save_weights(tmp_path)
    source, target = (load_file(of / "model.safetensors") for of in (model("deepseek-v3-low-rank"), tmp_path))
    assert target.keys() == source.keys()
    assert all(torch.equal(target[name], source[name]) for name in source)
    sent = dict(pool.tensors())
    assert sent.keys() == source.keys()
    assert all(torch.equal(sent[name], source[name]) for name in source)


def test_dropped_shared_key_gradient_fails_comparison(pool, model, alone):
    """Shows that the comparison above can fail: one tensor rank drops its heads' gradient of the key that all heads
    share."""
    trained = trainer(pool, settings(model("deepseek-v3-low-rank"), "actor", LAYOUTS["TP2"]))
    trained.start()
    pool.forget_gradient(1, only="linear_kv_down_proj")
    rollouts = lab.make_rollouts()
    trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], policy_objective(rollouts))
    expected = alone("deepseek-v3-low-rank", "actor")["gradient"]
    assert gap(pool.gradients(), expected) > 100 * GRADIENT_GAP


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("saved_under", "loaded_under"), [("EP2", "alone"), ("alone", "TP2 PP2")])
def test_deepseek_state_loads_under_other_layout(pool, model, tmp_path, saved_under, loaded_under, dtype):
    """This includes the bias, which is zero in a new model."""
    layouts = {"alone": ParallelTable(), **LAYOUTS}
    rollouts = lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, step=STEP)]
    folder = model("deepseek-v3-low-rank")
    first = trainer(pool, settings(folder, "actor", layouts[saved_under], dtype))
    first.start()
    first.update(rollouts, minibatches, objective)
    lab.save(first, tmp_path)
    saved = {name: tensor.clone() for name, tensor in pool.tensors()}
    second = trainer(pool, settings(folder, "actor", layouts[loaded_under], dtype))
    second.load(tmp_path)
    loaded = dict(pool.tensors())
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    source = load_file(folder / "model.safetensors")
    for name in (name for name in source if name.endswith(BIAS)):
        assert torch.equal(loaded[name], source[name])
        assert loaded[name].dtype == torch.float32
