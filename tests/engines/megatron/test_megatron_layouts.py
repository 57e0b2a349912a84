"""Special cases of layouts: ranks without rows or positions, interleaved stages, and states of a distributed
optimizer that only layouts with other data ranks can load."""

import megatron_lab as lab
import pytest
import torch
from layout_lab import (
    CHANGE_GAP,
    GRADIENT_GAP,
    LOSS_GAP,
    STEP,
    TEMPERATURE,
    gap,
    gap_of_changes,
    objective_of,
    settings_of,
    started,
    trainer,
    weights_of,
)

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.batch.digest import file_digest
from ppoctl.core.errors import NonFiniteError, StorageError
from ppoctl.core.ports import OutputRequest
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.models.convert.tensors import weight_names

DENSE = "qwen2-deep"
ONE_BY_ONE = BySequences(microbatch_seqs=1, logits_chunk_tokens=5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_context_rank_without_read_positions_is_supported(pool, model, role):
    """Row 2 has two input tokens, of which the second is read: the first rank has token 0 and one padding token."""
    rollouts, gradients = lab.make_rollouts(), []
    for layout in ("alone", "CP2"):
        trained = started(pool, settings_of(model, DENSE, layout, role))
        trained.update(rollouts, [lab.minibatch(rollouts, rows=(2,), step=STEP)], objective_of(role, rollouts))
        gradients.append(pool.gradients())
    assert max(float(tensor.abs().max()) for tensor in gradients[0].values()) > 1e-3
    assert gap(gradients[1], gradients[0]) < GRADIENT_GAP


@pytest.mark.parametrize(
    ("kind", "layouts"), [(DENSE, ("DP2 PP2", "DP2 PP2 interleaved")), ("qwen3-moe", ("EP2", "PP2 EP2 sharded"))]
)
def test_ranks_without_rows_match_single_process(pool, model, kind, layouts):
    """Fewer rows than data ranks, and microbatches that only some ranks have: with experts, each rank waits for the
    tokens of the other, even if it has none itself."""
    rollouts, results = lab.make_rollouts(), []
    objective = lab.policy_objective(rollouts)
    minibatches = [lab.minibatch(rollouts, rows, step=STEP) for rows in ((2,), (0, 1, 4))]
    for layout in ("alone", *layouts):
        trained = started(pool, settings_of(model, kind, layout, batching=ONE_BY_ONE))
        results.append(trained.update(rollouts, minibatches, objective))
        assert isinstance(trained, MegatronActor)
        logprobs, _ = lab.scores(trained, lab.make_rollouts(prompts=(3,), lengths=(4,)))
        assert logprobs.shape == (1, 4)
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert abs(found.loss - expected.loss) <= 1e-5
            assert abs(found.grad_norm - expected.grad_norm) <= 1e-4 * expected.grad_norm
            torch.testing.assert_close(found.outputs.primary, expected.outputs.primary, atol=1e-4, rtol=1e-4)


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
    rollouts = lab.make_rollouts(prompts=range(1, 10), lengths=range(9, 0, -1))
    objective = lab.policy_objective(rollouts, temperature=TEMPERATURE)
    batching = ONE_BY_ONE.model_copy(update={"forward_microbatch_seqs": 2})
    found = []
    for layout in (ParallelTable(), parallel):
        trained = started(pool, settings_of(model, "qwen2-six", "alone", parallel=layout, batching=batching))
        said = trained.forward("forward", rollouts, OutputRequest(temperature=TEMPERATURE))
        [result] = trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
        found.append((pool.gradients(), said.primary, result.outputs.primary))
    (expected, *outputs), (gradient, *others) = found
    assert gap(gradient, expected) < GRADIENT_GAP
    torch.testing.assert_close(others, outputs)


def test_interleaved_stages_send_each_weight_once(pool, model):
    actor = started(pool, settings_of(model, DENSE, "PP2 interleaved"))
    sent = [name for name, _ in pool.tensors()]
    assert sorted(sent) == sorted(weight_names(actor.source[1]))
    layers = [int(name.split(".")[2]) for name in sent if name.endswith("input_layernorm.weight")]
    assert layers == [0, 2, 1, 3]  # of the first rank, then of the second


def test_non_finite_loss_stops_every_rank(pool, model):
    trained, rollouts = started(pool, settings_of(model, DENSE, "DP2")), lab.make_rollouts()
    before, weights = weights_of(pool), lab.random_weights(rollouts)
    weights[0, 0] = torch.nan  # one rank's row
    objective = lab.policy_objective(rollouts, weights=weights)
    with pytest.raises(NonFiniteError, match="no step was taken"):
        trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
    lab.assert_same(dict(pool.tensors()), before)


def test_state_of_other_optimizer_kind_is_rejected_by_key(pool, model, tmp_path):
    lab.save(started(pool, settings_of(model, DENSE, "DP2 sharded")), tmp_path)
    with pytest.raises(StorageError, match=r"distributed_optimizer = true"):
        trainer(pool, settings_of(model, DENSE, "DP2")).load(tmp_path)


def narrow(model, layout: str, dtype: torch.dtype = torch.float32) -> TrainerSettings:
    """Return settings of states that only layouts with other data ranks can load."""
    return settings_of(model, DENSE, f"{layout} sharded", dtype=dtype, reshardable="dp")


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("saved_under", "loaded_under"),
    [
        ("DP2", "DP2"),
        ("DP2", "alone"),
        ("alone", "DP3"),
        ("DP2 PP2", "PP2"),
        ("TP2", "DP2 TP2"),
        ("CP2", "DP3"),
        ("alone", "CP2"),
    ],
)
def test_dp_reshardable_state_resumes_with_any_data_ranks(pool, model, tmp_path, saved_under, loaded_under, dtype):
    """Saved after two updates, written in the background during a third; the optimizer that loads it has already
    counted steps."""
    rollouts = lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, step=STEP)]
    first = started(pool, narrow(model, saved_under, dtype))
    first.update(rollouts, minibatches * 2, objective)
    saved = weights_of(pool)
    saving = first.save(tmp_path, in_background=True)
    [expected] = first.update(rollouts, minibatches, objective)
    written = saving.finish()
    after = dict(pool.tensors())
    assert written == {path.name: file_digest(path) for path in tmp_path.iterdir()}

    second = started(pool, narrow(model, loaded_under, dtype))
    second.update(rollouts, minibatches * 5, objective)
    second.load(tmp_path)
    lab.assert_same(dict(pool.tensors()), saved)
    [found] = second.update(rollouts, minibatches, objective)
    assert abs(found.loss - expected.loss) <= LOSS_GAP[dtype] * abs(expected.loss)
    change_gap = gap_of_changes(saved, dict(pool.tensors()), after)
    assert change_gap < (CHANGE_GAP if dtype is torch.float32 else 0.1)


def test_dp_reshardable_state_files_are_deterministic(pool, model, tmp_path):
    """Megatron-Core leaves gaps between parameters, and saves them."""
    first, digests = started(pool, narrow(model, "DP2")), []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.append(first.save(tmp_path / name, in_background=False).finish())
        digests[-1].pop(".metadata")
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_dp_reshardable_state_needs_full_save_for_other_tensor(pool, model, tmp_path):
    lab.save(started(pool, narrow(model, "DP2")), tmp_path)
    with pytest.raises(StorageError, match=r"saved with `tensor = 1`") as refused:
        trainer(pool, narrow(model, "TP2")).load(tmp_path)
    assert refused.value.hint is not None
    assert "checkpoint.reshardable = full" in refused.value.hint
    wide = tmp_path / "wide"
    wide.mkdir()
    again = trainer(pool, settings_of(model, DENSE, "alone sharded"))
    again.load(tmp_path)
    expected = dict(pool.tensors())
    lab.save(again, wide)
    trainer(pool, narrow(model, "TP2")).load(wide)
    lab.assert_same(dict(pool.tensors()), expected)


def test_full_disk_on_one_rank_fails_save_on_all_ranks(pool, model, tmp_path):
    (tmp_path / "__1_0.distcp").symlink_to("/dev/full")
    first = started(pool, narrow(model, "DP2"))
    for in_background in (False, True):
        with pytest.raises(StorageError, match=r"cannot be written .*No space left"):
            lab.save(first, tmp_path, in_background=in_background)


def test_sharded_state_before_first_step_resumes(pool, model, tmp_path):
    """Sharded main weights and moments before the first step."""
    made_from = settings_of(model, DENSE, "DP2 sharded", dtype=torch.bfloat16)
    rollouts = lab.make_rollouts()
    objective, minibatches = lab.policy_objective(rollouts), [lab.minibatch(rollouts, step=STEP)]
    first = started(pool, made_from)
    lab.save(first, tmp_path)
    first.update(rollouts, minibatches, objective)
    expected = dict(pool.tensors())
    second = trainer(pool, made_from)
    second.load(tmp_path)
    second.update(rollouts, minibatches, objective)
    lab.assert_same(dict(pool.tensors()), expected)
