"""A mixture of experts under every layout, compared with one process.

Routing is a discrete choice: if the last chosen and the first rejected expert nearly tie, rounding decides, and
layouts cannot be compared. `test_softmax_routing_of_fixture_has_no_near_ties` shows that these weights and tokens
have no near ties.
"""

from dataclasses import replace

import megatron_lab as lab
import pytest
import rank_pool
import torch
from layout_lab import (
    CHANGE_GAP,
    GRADIENT_GAP,
    STEP,
    assert_agree,
    gap,
    policy_objective,
    resumes_under_layout,
    settings,
    three_steps,
    trainer,
)
from safetensors.torch import load_file

from ppoctl.convert.tensors import weight_names
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.model.shape_reader import read_shape
from ppoctl.ports import OutputRequest
from ppoctl.recipe.schema import BySequences, ParallelTable

LAYOUTS = {
    "EP2": ParallelTable(data=2, expert=2),
    "EP2 distributed optimizer": ParallelTable(data=2, expert=2, distributed_optimizer=True),
    "EP4": ParallelTable(data=4, expert=4),
    "EP2 DP2": ParallelTable(data=4, expert=2),
    "EP2 DP2 distributed optimizer": ParallelTable(data=4, expert=2, distributed_optimizer=True),
    "DP2": ParallelTable(data=2),
    "CP2": ParallelTable(context=2),
    "CP2 EP2": ParallelTable(context=2, expert=2),
    "CP2 DP2 EP4": ParallelTable(context=2, data=2, expert=4),
    "CP2 TP2, experts split": ParallelTable(context=2, tensor=2, sequence=True, expert_tensor=2),
    "TP2, experts whole": ParallelTable(tensor=2, sequence=True),
    "TP2, experts split": ParallelTable(tensor=2, sequence=True, expert_tensor=2),
    "TP2 EP2": ParallelTable(tensor=2, sequence=True, expert=2),
    "TP2 DP2 EP2": ParallelTable(tensor=2, data=2, sequence=True, expert=2),
    "TP2 DP2 EP2, experts split": ParallelTable(tensor=2, data=2, sequence=True, expert=2, expert_tensor=2),
    "PP2": ParallelTable(pipeline=2, first_stage_layers=1),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True, first_stage_layers=1),
    "PP2 EP2": ParallelTable(pipeline=2, data=2, expert=2, first_stage_layers=1, distributed_optimizer=True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_gradients_and_steps_do_not_depend_on_layout(pool, model, alone, layout, role):
    kind = "qwen3-moe"
    found, expected = three_steps(pool, settings(model(kind), role, LAYOUTS[layout])), alone(kind, role)
    assert_agree(found, expected, whole=not LAYOUTS[layout].distributed_optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_mixes_layers_with_and_without_experts(pool, model, alone, stages):
    """Only the second of four layers has experts: the last rank has none, or each rank has two stages of one
    layer."""
    parallel = ParallelTable(pipeline=2, data=2, expert=2, stages_per_rank=stages)
    found = three_steps(pool, settings(model("qwen3-moe-mixed"), "actor", parallel))
    expected = alone("qwen3-moe-mixed", "actor")
    assert_agree(found, expected, whole=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_experts_exchange_tokens_again(pool, model, alone, recompute):
    made_from = replace(settings(model("qwen3-moe"), "actor", LAYOUTS["EP2"]), recompute=recompute)
    assert gap(three_steps(pool, made_from)["gradient"], alone("qwen3-moe", "actor")["gradient"]) < GRADIENT_GAP


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen2-moe"])
def test_softmax_routing_of_fixture_has_no_near_ties(kind):
    """The gap between the last chosen and the first rejected expert is more than 1e-4 in probability for every token
    and layer: a hundred times the effect of rounding."""
    hugging_face, rollouts = lab.hugging_face_model(kind), lab.make_rollouts()
    margins = []
    for sequence in rollouts.unpadded():
        with torch.no_grad():
            layers = hugging_face(input_ids=sequence[None], output_router_logits=True).router_logits
        for logits in layers:
            likely = logits.softmax(-1).sort(dim=-1, descending=True).values
            margins.append((likely[:, 1] - likely[:, 2]).min())
    assert torch.stack(margins).min() > 1e-4


def test_dropped_expert_gradient_fails_comparison(pool, model, alone):
    """Shows that the comparison above can fail: the gradients of one expert rank are lost before they are reduced."""
    trained = trainer(pool, settings(model("qwen3-moe"), "actor", LAYOUTS["EP2"]))
    trained.start()
    pool.forget_gradient(1, only="local_experts")
    rollouts = lab.make_rollouts()
    objective = policy_objective(rollouts)
    [result] = trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
    expected = alone("qwen3-moe", "actor")
    assert gap(pool.gradients(), expected["gradient"]) > 0.1
    assert abs(result.grad_norm / float(expected["reported"]["0 grad_norm"]) - 1) > 1e-2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("saved_under", "loaded_under"),
    [
        ("EP2", "alone"),
        ("EP2", "TP2, experts whole"),
        ("EP2", "PP2"),
        ("alone", "TP2 DP2 EP2, experts split"),
        ("EP2 distributed optimizer", "alone distributed optimizer"),
        ("EP2 DP2 distributed optimizer", "PP2 EP2"),
    ],
)
def test_expert_state_loads_under_other_layout(pool, model, tmp_path, saved_under, loaded_under, dtype):
    layouts = {
        "alone": ParallelTable(),
        "alone distributed optimizer": ParallelTable(distributed_optimizer=True),
        **LAYOUTS,
    }
    saved, loaded = (
        settings(model("qwen3-moe"), "actor", layouts[layout], dtype) for layout in (saved_under, loaded_under)
    )
    # In bfloat16 another layout may round a close choice of experts differently.
    assert resumes_under_layout(pool, saved, loaded, tmp_path) < (CHANGE_GAP if dtype is torch.float32 else 0.2)


def test_ranks_without_rows_join_expert_token_exchange(pool, model):
    """One row for two data ranks, and more microbatches on one than on the other: each waits for the tokens of the
    other, even if it has none itself."""
    folder, rollouts = model("qwen3-moe"), lab.make_rollouts()
    objective = lab.policy_objective(rollouts)
    minibatches = [lab.minibatch(rollouts, rows, step=STEP) for rows in ((2,), (0, 1, 4))]
    results = []
    for parallel in (ParallelTable(), LAYOUTS["EP2"], LAYOUTS["PP2 EP2"]):
        one_by_one = BySequences(microbatch_seqs=1, logits_chunk_tokens=5)
        made_from = replace(settings(folder, "actor", parallel), batching=one_by_one)
        trained = trainer(pool, made_from)
        trained.start()
        results.append(trained.update(rollouts, minibatches, objective))
        assert isinstance(trained, MegatronActor)
        logprobs, _ = lab.scores(trained, lab.make_rollouts(prompts=(3,), lengths=(4,)))
        assert logprobs.shape == (1, 4)
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            assert abs(one.loss - expected.loss) <= 1e-5
            assert abs(one.grad_norm - expected.grad_norm) <= 1e-4 * expected.grad_norm
            torch.testing.assert_close(one.outputs.primary, expected.outputs.primary, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["EP2", "TP2 EP2", "TP2 DP2 EP2, experts split", "PP2 EP2"])
def test_exported_expert_weights_equal_source_model(pool, model, tmp_path, layout):
    trained = trainer(pool, settings(model("qwen3-moe"), "actor", LAYOUTS[layout]))
    trained.start()
    trained.save_weights(tmp_path)
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, model("qwen3-moe")))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["EP2 DP2", "TP2, experts split", "TP2 DP2 EP2, experts split", "PP2 EP2"])
def test_generator_receives_all_experts_bucket_by_bucket(pool, model, monkeypatch, layout):
    """Only the ranks that hold one copy of a stage's experts send; a bucket has about two experts."""
    monkeypatch.setattr(rank_pool, "BUCKET_BYTES", 40_000)
    made_from = settings(model("qwen3-moe"), "actor", LAYOUTS[layout])
    pool.open(made_from)
    pool.call("start")
    found = dict(pool.tensors())
    expected = load_file(model("qwen3-moe") / "model.safetensors")
    assert list(found) == list(weight_names(read_shape(model("qwen3-moe"))))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["EP2", "TP2 DP2 EP2, experts split"])
def test_expert_layout_logprobs_match_transformers(pool, model, layout):
    actor = trainer(pool, settings(model("qwen3-moe"), "actor", LAYOUTS[layout]))
    assert isinstance(actor, MegatronActor)
    actor.start()
    rollouts = lab.make_rollouts()
    expected, entropy = lab.expected_logprobs(lab.hugging_face_model("qwen3-moe"), rollouts, 0.8)
    found = lab.scores(actor, rollouts, 0.8)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], entropy, atol=1e-4, rtol=0)
    reference = actor.reference_logprobs(rollouts, OutputRequest(temperature=0.8))
    torch.testing.assert_close(reference, expected, atol=1e-4, rtol=0)
