"""The layout changes speed and memory, but not results: real gloo processes compared with one process, on equal
rollouts."""

from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
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

from ppoctl.batch.digest import file_digest
from ppoctl.convert.tensors import weight_names
from ppoctl.engines.megatron.settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.errors import NonFiniteError, StorageError
from ppoctl.ports import OutputRequest
from ppoctl.recipe.schema import BySequences, ParallelTable

LAYOUTS = {
    "DP2": ParallelTable(data=2),
    "DP2 distributed optimizer": ParallelTable(data=2, distributed_optimizer=True),
    "TP2": ParallelTable(tensor=2),
    "TP2 sequence": ParallelTable(tensor=2, sequence=True),
    "PP2": ParallelTable(pipeline=2),
    "PP2 uneven": ParallelTable(pipeline=2, first_stage_layers=1),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True),
    "PP2 interleaved": ParallelTable(pipeline=2, stages_per_rank=2),
    "TP2 PP2 interleaved": ParallelTable(tensor=2, pipeline=2, stages_per_rank=2, sequence=True),
    "DP2 PP2 interleaved": ParallelTable(data=2, pipeline=2, stages_per_rank=2, distributed_optimizer=True),
    "DP2 PP2": ParallelTable(data=2, pipeline=2, distributed_optimizer=True),
    "CP2": ParallelTable(context=2),
    "CP3": ParallelTable(context=3),
    "CP2 TP2 sequence": ParallelTable(context=2, tensor=2, sequence=True),
    "CP2 PP2": ParallelTable(context=2, pipeline=2),
    "CP2 PP2 interleaved": ParallelTable(context=2, pipeline=2, stages_per_rank=2),
    "CP2 DP2": ParallelTable(context=2, data=2, distributed_optimizer=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_gradients_and_steps_do_not_depend_on_layout(pool, model, alone, layout, role):
    kind = "qwen2-deep"
    found, expected = three_steps(pool, settings(model(kind), role, LAYOUTS[layout])), alone(kind, role)
    assert_agree(found, expected, whole=not LAYOUTS[layout].distributed_optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", ["TP2 sequence", "PP2", "CP2"])
def test_recompute_does_not_change_gradients_under_layouts(pool, model, alone, layout, recompute):
    kind = "qwen2-deep"
    made_from = replace(settings(model(kind), "actor", LAYOUTS[layout]), recompute=recompute)
    found, expected = three_steps(pool, made_from), alone(kind, "actor")
    assert_agree(found, expected, whole=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_context_rank_without_read_positions_is_supported(pool, model, role):
    """Row 2 has two input tokens, of which the second is read: the first rank has token 0 and one padding token."""
    rollouts, gradients = lab.make_rollouts(), []
    for layout in (ParallelTable(), LAYOUTS["CP2"]):
        trained = trainer(pool, settings(model("qwen2-deep"), role, layout))
        trained.start()
        is_actor = role == "actor"
        objective = policy_objective(rollouts) if is_actor else lab.value_objective(rollouts)
        trained.update(rollouts, [lab.minibatch(rollouts, rows=(2,), step=STEP)], objective)
        gradients.append(pool.gradients())
    assert max(float(tensor.abs().max()) for tensor in gradients[0].values()) > 1e-3
    assert gap(gradients[1], gradients[0]) < GRADIENT_GAP


def test_dropped_data_rank_gradient_fails_comparison(pool, model, alone):
    """Shows that the comparison above can fail: one data rank's gradient is lost before it is reduced."""
    made_from = settings(model("qwen2-deep"), "actor", LAYOUTS["DP2"])
    trained = trainer(pool, made_from)
    trained.start()
    pool.forget_gradient(1)
    rollouts = lab.make_rollouts()
    objective = policy_objective(rollouts)
    trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
    assert gap(pool.gradients(), alone("qwen2-deep", "actor")["gradient"]) > 0.1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("saved_under", "loaded_under"),
    [
        ("TP2 sequence", "PP2"),
        ("TP2", "alone"),
        ("PP2 uneven", "TP2 PP2"),
        ("DP2 distributed optimizer", "DP2 distributed optimizer"),
        ("DP2 distributed optimizer", "alone distributed optimizer"),
        ("DP2 PP2", "DP2 distributed optimizer"),
        ("alone", "TP2 PP2"),
        ("PP2 interleaved", "TP2"),
        ("PP2", "TP2 PP2 interleaved"),
        ("DP2 PP2 interleaved", "DP2 distributed optimizer"),
        ("CP2 TP2 sequence", "PP2"),
        ("TP2", "CP2"),
        ("CP2 DP2", "DP2 distributed optimizer"),
    ],
)
def test_state_loads_under_other_layout(pool, model, tmp_path, saved_under, loaded_under, dtype):
    layouts = {
        "alone": ParallelTable(),
        "alone distributed optimizer": ParallelTable(distributed_optimizer=True),
        **LAYOUTS,
    }
    saved, loaded = (
        settings(model("qwen2-deep"), "actor", layouts[layout], dtype) for layout in (saved_under, loaded_under)
    )
    assert resumes_under_layout(pool, saved, loaded, tmp_path) < (CHANGE_GAP if dtype is torch.float32 else 0.1)


def test_state_of_other_optimizer_kind_is_rejected_by_key(pool, model, tmp_path):
    folder = model("qwen2-deep")
    saved = trainer(pool, settings(folder, "actor", LAYOUTS["DP2 distributed optimizer"]))
    saved.start()
    lab.save(saved, tmp_path)
    with pytest.raises(StorageError, match=r"distributed_optimizer = true"):
        trainer(pool, settings(folder, "actor", LAYOUTS["DP2"])).load(tmp_path)


NARROW = {
    "alone": ParallelTable(distributed_optimizer=True),
    "DP2": ParallelTable(data=2, distributed_optimizer=True),
    "DP3": ParallelTable(data=3, distributed_optimizer=True),
    "DP2 PP2": ParallelTable(data=2, pipeline=2, distributed_optimizer=True),
    "PP2": ParallelTable(pipeline=2, distributed_optimizer=True),
    "TP2": ParallelTable(tensor=2, distributed_optimizer=True),
    "TP2 sequence": ParallelTable(tensor=2, sequence=True, distributed_optimizer=True),
    "DP2 TP2": ParallelTable(data=2, tensor=2, distributed_optimizer=True),
    "CP2": ParallelTable(context=2, distributed_optimizer=True),
}


def narrow(folder: Path, layout: str, dtype: torch.dtype = torch.float32) -> TrainerSettings:
    return replace(settings(folder, "actor", NARROW[layout], dtype), reshardable="dp")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("saved_under", "loaded_under"),
    [
        ("DP2", "DP2"),
        ("DP2", "alone"),
        ("alone", "DP3"),
        ("DP2 PP2", "PP2"),
        ("TP2 sequence", "DP2 TP2"),
        ("CP2", "DP3"),
        ("alone", "CP2"),
    ],
)
def test_dp_reshardable_state_resumes_with_any_data_ranks(pool, model, tmp_path, saved_under, loaded_under, dtype):
    """Saved after two updates, written in the background during a third; the optimizer that loads it has already
    counted steps."""
    rollouts = lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, step=STEP)]
    folder = model("qwen2-deep")
    first = trainer(pool, narrow(folder, saved_under, dtype))
    first.start()
    first.update(rollouts, minibatches * 2, objective)
    saved = {name: tensor.clone() for name, tensor in pool.tensors()}
    saving = first.save(tmp_path, in_background=True)
    [expected] = first.update(rollouts, minibatches, objective)
    written = saving.finish()
    after = dict(pool.tensors())
    assert written == {path.name: file_digest(path) for path in tmp_path.iterdir()}

    second = trainer(pool, narrow(folder, loaded_under, dtype))
    second.start()
    second.update(rollouts, minibatches * 5, objective)
    second.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in pool.tensors())
    [found] = second.update(rollouts, minibatches, objective)
    assert abs(found.loss - expected.loss) <= (1e-5 if dtype is torch.float32 else 1e-3) * abs(expected.loss)
    changes = [{name: (of[name] - saved[name]).float() for name in saved} for of in (dict(pool.tensors()), after)]
    assert gap(*changes) < (CHANGE_GAP if dtype is torch.float32 else 0.1)


def test_dp_reshardable_state_files_are_deterministic(pool, model, tmp_path):
    """Megatron-Core leaves gaps between parameters, and saves them."""
    first = trainer(pool, narrow(model("qwen2-deep"), "DP2"))
    first.start()
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.append(first.save(tmp_path / name, in_background=False).finish())
        digests[-1].pop(".metadata")
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_dp_reshardable_state_needs_full_save_for_other_tensor(pool, model, tmp_path):
    folder = model("qwen2-deep")
    first = trainer(pool, narrow(folder, "DP2"))
    first.start()
    lab.save(first, tmp_path)
    with pytest.raises(StorageError, match=r"saved with `tensor = 1`") as refused:
        trainer(pool, narrow(folder, "TP2")).load(tmp_path)
    assert refused.value.hint is not None
    assert "checkpoint.reshardable = full" in refused.value.hint
    wide = tmp_path / "wide"
    wide.mkdir()
    again = trainer(pool, settings(folder, "actor", NARROW["alone"]))
    again.load(tmp_path)
    expected = dict(pool.tensors())
    lab.save(again, wide)
    trainer(pool, narrow(folder, "TP2")).load(wide)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pool.tensors())


def test_full_disk_on_one_rank_fails_save_on_all_ranks(pool, model, tmp_path):
    (tmp_path / "__1_0.distcp").symlink_to("/dev/full")
    first = trainer(pool, narrow(model("qwen2-deep"), "DP2"))
    first.start()
    for in_background in (False, True):
        with pytest.raises(StorageError, match=r"cannot be written .*No space left"):
            lab.save(first, tmp_path, in_background=in_background)


def test_sharded_state_before_first_step_resumes(pool, model, tmp_path):
    """Sharded main weights and moments before the first step."""
    made_from = settings(model("qwen2-deep"), "actor", LAYOUTS["DP2 distributed optimizer"], torch.bfloat16)
    rollouts = lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, step=STEP)]
    first = trainer(pool, made_from)
    first.start()
    lab.save(first, tmp_path)
    first.update(rollouts, minibatches, objective)
    expected = dict(pool.tensors())
    second = trainer(pool, made_from)
    second.load(tmp_path)
    second.update(rollouts, minibatches, objective)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pool.tensors())


def test_data_ranks_without_rows_match_single_process(pool, model):
    """Fewer rows than data ranks, and microbatches that only some ranks have."""
    folder, rollouts = model("qwen2-deep"), lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, (2,), step=STEP)]
    results = []
    waiting = ParallelTable(data=2, pipeline=2), ParallelTable(data=2, pipeline=2, stages_per_rank=2)
    for parallel in (ParallelTable(), *waiting):
        made_from = replace(
            settings(folder, "actor", parallel), batching=BySequences(microbatch_seqs=1, logits_chunk_tokens=5)
        )
        trained = trainer(pool, made_from)
        trained.start()
        results += trained.update(rollouts, minibatches, objective)
    expected, *others = results
    for found in others:
        assert abs(found.loss - expected.loss) <= 1e-6
        assert abs(found.grad_norm - expected.grad_norm) <= 1e-5 * expected.grad_norm
        torch.testing.assert_close(found.outputs.primary, expected.outputs.primary)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelTable(pipeline=2, stages_per_rank=3),
        ParallelTable(pipeline=2, stages_per_rank=2, first_stage_layers=2),
        ParallelTable(pipeline=3, stages_per_rank=2),
    ],
    ids=["three stages", "uneven", "three ranks"],
)
def test_interleaved_stages_match_single_process(pool, model, parallel):
    """Six layers, more microbatches than are in flight at once, and a different number in a forward-only pass."""
    folder = model("qwen2-six")
    rollouts = lab.make_rollouts(prompts=range(1, 10), lengths=range(9, 0, -1))
    objective, minibatches = lab.policy_objective(rollouts, temperature=0.8), [lab.minibatch(rollouts, step=STEP)]
    batching = BySequences(microbatch_seqs=1, forward_microbatch_seqs=2, logits_chunk_tokens=5)
    found = []
    for layout in (ParallelTable(), parallel):
        trained = trainer(pool, replace(settings(folder, "actor", layout), batching=batching))
        trained.start()
        said = trained.forward("forward", rollouts, OutputRequest(temperature=0.8))
        [result] = trained.update(rollouts, minibatches, objective)
        found.append((pool.gradients(), said.primary, result.outputs.primary))
    (expected, *outputs), (gradient, *others) = found
    assert gap(gradient, expected) < GRADIENT_GAP
    torch.testing.assert_close(others, outputs)


def test_interleaved_stages_send_each_weight_once(pool, model):
    made_from = settings(model("qwen2-deep"), "actor", LAYOUTS["PP2 interleaved"])
    actor = trainer(pool, made_from)
    actor.start()
    sent = [name for name, _ in pool.tensors()]
    assert sorted(sent) == sorted(weight_names(actor.source[1]))
    layers = [int(name.split(".")[2]) for name in sent if name.endswith("input_layernorm.weight")]
    assert layers == [0, 2, 1, 3]  # of the first rank, then of the second


def test_exported_sharded_weights_equal_source_model(pool, model, tmp_path):
    """A complete Hugging Face folder from shards; the padding of the vocabulary is removed."""
    trained = trainer(pool, settings(model("qwen2-deep"), "actor", LAYOUTS["TP2 PP2"]))
    trained.start()
    trained.save_weights(tmp_path)
    expected = lab.hugging_face_model("qwen2-deep").state_dict()
    found = type(lab.hugging_face_model("qwen2-deep")).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["TP2", "TP2 PP2", "PP2 interleaved"])
def test_expert_layout_logprobs_match_transformers(pool, model, layout):
    made_from = settings(model("qwen2-deep"), "actor", LAYOUTS[layout])
    actor = trainer(pool, made_from)
    assert isinstance(actor, MegatronActor)
    actor.start()
    rollouts = lab.make_rollouts()
    expected, entropy = lab.expected_logprobs(lab.hugging_face_model("qwen2-deep"), rollouts, 0.8)
    for found in (
        lab.scores(actor, rollouts, 0.8)[0],
        actor.reference_logprobs(rollouts, OutputRequest(temperature=0.8)),
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(lab.scores(actor, rollouts, 0.8)[1], entropy, atol=1e-4, rtol=0)


def test_non_finite_loss_stops_every_rank(pool, model):
    made_from = settings(model("qwen2-deep"), "actor", LAYOUTS["DP2"])
    trained = trainer(pool, made_from)
    trained.start()
    before = {name: tensor.clone() for name, tensor in pool.tensors()}
    rollouts = lab.make_rollouts()
    weights = lab.random_weights(rollouts)
    weights[0, 0] = torch.nan  # one rank's row
    objective = lab.policy_objective(rollouts, weights=weights)
    with pytest.raises(NonFiniteError, match="no step was taken"):
        trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pool.tensors())
