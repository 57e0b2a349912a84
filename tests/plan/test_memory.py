"""Memory estimated before launch, computed by hand. tests/engines/megatron compares it with real engines."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.step_functions import NO_CRITIC
from plan.small_model import SMALL as DENSE
from ppoctl.algorithms.ppo import PPO, PPO_CORRECTED
from ppoctl.algorithms.role_table import Recompute
from ppoctl.algorithms.trace import trace
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.ray.placement import DevicePlacement
from ppoctl.models.head import Head
from ppoctl.models.model import Model
from ppoctl.models.shape_reader import read_shape, shape_if_known
from ppoctl.plan.memory import generator_memory, pools
from ppoctl.plan.memory.activations import backward_bytes, forward_bytes, saved
from ppoctl.plan.memory.driver import StepBatch, batch_of, driver_bytes, records_of, update_input_bytes
from ppoctl.plan.memory.estimate import Memory, estimate, misfit, training_of
from ppoctl.plan.memory.generator_memory import GeneratorBytes
from ppoctl.plan.memory.parameter_memory import rank_parameters
from ppoctl.plan.memory.pipeline import stages_of
from ppoctl.plan.memory.residency import MemoryItem, resident, schedule_of
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision
from ppoctl.plan.memory.trainer_memory import Training, ranks_of, runs_under_way, state_bytes
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import devices, is_one_process, per_device, processes
from ppoctl.recipe.schema import ClusterTable, GeneratorTable, Recipe

DEEPSEEK_7B = Path(__file__).parents[2] / "recipes/models/deepseek-ai--DeepSeek-R1-Distill-Qwen-7B"

SMALL = replace(DENSE, family="qwen2", num_layers=3, qkv_bias=True)
# A layer: query and output 8 x 16 each, key and value 8 x 8 each, biases 16 + 8 + 8; three matrices 8 x 20.
ATTENTION, MLP, NORMS = 2 * 128 + 2 * 64 + 32, 3 * 160, 2 * 8
TABLE = 128 * 8  # 100 rows, padded to 128
ALONE = ParallelTable()


def test_parameters_of_each_rank() -> None:
    [alone] = stages_of(SMALL, ALONE)
    layer = ATTENTION + MLP + NORMS
    assert rank_parameters(Model(SMALL, "token"), alone, ALONE).total == 3 * layer + 8 + 2 * TABLE
    assert (
        rank_parameters(Model(SMALL, "value"), alone, ALONE).total == 3 * layer + 8 + TABLE + 8
    )  # one row of values, one table
    assert (
        rank_parameters(Model(SMALL, "token"), alone, ParallelTable(tensor=2)).total
        == 3 * ((ATTENTION + MLP) // 2 + NORMS) + 8 + TABLE
    )
    first, last = stages_of(SMALL, ParallelTable(pipeline=2, first_stage_layers=1))
    assert (first.layers, last.layers) == ((0,), (1, 2))
    assert rank_parameters(Model(SMALL, "token"), first, ALONE).total == layer + TABLE
    assert rank_parameters(Model(SMALL, "token"), last, ALONE).total == 2 * layer + 8 + TABLE
    assert rank_parameters(Model(SMALL, "value"), last, ALONE).total == 2 * layer + 8 + 8
    tied = replace(SMALL, tied_embeddings=True)
    assert rank_parameters(Model(tied, "token"), alone, ALONE).total == 3 * layer + 8 + TABLE
    assert rank_parameters(Model(tied, "token"), last, ALONE).total == 2 * layer + 8 + TABLE  # a separate copy


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (ParallelTable(pipeline=4), [2, 2, 2, 2]),
        (ParallelTable(pipeline=4, first_stage_layers=1, last_stage_layers=3), [1, 2, 2, 3]),
        (ParallelTable(pipeline=3, last_stage_layers=2), [3, 3, 2]),
        (ParallelTable(pipeline=2, first_stage_layers=1, last_stage_layers=7), [1, 7]),
    ],
)
def test_layers_are_split_over_pipeline_ranks(layout: ParallelTable, layers: Sequence[int]) -> None:
    assert [len(stage.layers) for stage in stages_of(replace(SMALL, num_layers=8), layout)] == layers


def _part(
    weight: int, device: str, layout: ParallelTable = ALONE, head: Head = "token", layers: int = 3
) -> ModelShard:
    stage = replace(stages_of(SMALL, layout)[-1], layers=tuple(range(layers)))
    return ModelShard(Model(SMALL, head), layout, stage, Precision(weight, device))


def test_forward_pass_saved_activations() -> None:
    """10 tokens, 6 of them read; 3 layers; logits of 4 positions at a time."""
    batch = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)
    activations = saved(_part(4, "cpu"), batch)
    assert activations.norms == 10 * 3 * 2 * (2 * 4 * 8 + 4)
    assert activations.projections == 10 * 3 * 2 * 4 * 8
    # Rotated queries 16 and keys 8, the fused projection 32; outputs twice, a statistic for each of 4 heads.
    assert activations.attention == 10 * 3 * 4 * (16 + 8 + 32 + 16 + 16 + 4)
    assert activations.mlp == 10 * 3 * 5 * 4 * 20
    # Ids, sine and cosine, the last norm; per position read: hidden numbers, four ids or indices, two values.
    assert activations.ends == 10 * (8 + 4 * 4 + 2 * 4 * 8 + 4) + 6 * (4 * 8 + 4 * 8 + 2 * 4)
    assert activations.logits == 4 * 100 * 4

    in_bfloat16 = saved(_part(2, "cpu"), batch)
    assert in_bfloat16.norms == activations.norms  # float32 in both cases
    assert in_bfloat16.attention == 10 * 3 * (4 * (16 + 8 + 8) + 4 * 16 + 2 * 16 + 4 * 4)
    on_gpu = saved(_part(2, "gpu"), batch)
    assert on_gpu.norms == 10 * 3 * 2 * (2 * 8 + 4)
    assert on_gpu.attention == 10 * 3 * (2 * (16 + 8 + 32 + 16) + 4 * 4)

    split = saved(_part(4, "cpu", ParallelTable(tensor=2)), batch)
    assert (split.norms, split.projections) == (activations.norms, activations.projections)
    assert (split.attention, split.mlp) == (activations.attention // 2, activations.mlp // 2)
    assert split.logits == 4 * 64 * 4  # the first rank has 64 of the 128 padded rows
    shared = saved(_part(4, "cpu", ParallelTable(tensor=2, sequence=True)), batch)
    assert (shared.norms, shared.projections) == (activations.norms // 2, activations.projections // 2)
    of_critic = saved(_part(2, "cpu", head="value"), batch)
    assert of_critic.logits == 0
    assert of_critic.ends == 10 * (8 + 2 * 4 + 2 * 4 * 8 + 4) + 6 * (4 * 8 + 3 * 8)


def test_backward_bytes_beyond_saved_activations() -> None:
    batch = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)
    first = ModelShard(
        Model(SMALL, "token"),
        ParallelTable(pipeline=3),
        stages_of(SMALL, ParallelTable(pipeline=3))[0],
        Precision(4, "cpu"),
    )
    assert backward_bytes(first, batch) == 10 * 4 * (8 + 8 + 2 * 20)
    assert forward_bytes(first, batch) == 10 * (4 * 4 * 8 + 5 * 4 * 20 + 4 * 4)
    # Two float32 copies of the current logits, and the gradient of the hidden numbers that were read.
    assert backward_bytes(_part(4, "cpu"), batch) == 2 * 4 * 400 + 6 * 4 * 8


def test_state_bytes_of_ranks() -> None:
    layout = ParallelTable(data=2, distributed_optimizer=True)
    batch = MicrobatchShape(10, 6, 4, 5)
    training = Training(
        Model(SMALL, "token", reference="shared"), layout, Precision(2, "cpu"), batch, batch, microbatches=3
    )
    [rank] = ranks_of(training)
    parameters = 3 * (ATTENTION + MLP + NORMS) + 8 + 2 * TABLE
    assert (rank.weights, rank.gradients, rank.reference) == (2 * parameters, 4 * parameters, 2 * parameters)
    assert (rank.main_weights, rank.moments) == (2 * parameters, 4 * parameters)  # halves of 4 and 8
    assert rank.resident == 14 * parameters
    [whole] = ranks_of(replace(training, layout=ALONE, precision=Precision(4, "cpu")))
    assert (whole.main_weights, whole.moments) == (0, 8 * parameters)
    assert state_bytes(Model(SMALL, "token"), ALONE, 4) == 12 * parameters
    assert state_bytes(Model(SMALL, "token"), ALONE, 2) == 14 * parameters
    assert state_bytes(Model(SMALL, "token"), ParallelTable(distributed_optimizer=True), 4) == 16 * parameters


def test_full_kl_adds_logits_chunk_and_reference_hidden_states() -> None:
    """A chunk of 4 positions x 100 ids; 6 positions of 8 numbers in each microbatch, only on the last rank."""
    layout, batch = ParallelTable(pipeline=2), MicrobatchShape(10, 6, 4, 5)
    shape = replace(SMALL, num_layers=4)
    training = Training(Model(shape, "token", reference="shared"), layout, Precision(4, "cpu"), batch, batch, 3)
    both = replace(training, full_kl_in=frozenset({"forward", "update"}))
    (first, last), (first_of_both, last_of_both) = ranks_of(training), ranks_of(both)
    assert first_of_both == first
    assert last_of_both.backward - last.backward == 4 * (4 * 100 + 3 * 6 * 8)  # of the whole minibatch
    assert last_of_both.forward - last.forward == 4 * (4 * 100 + 2 * 6 * 8)  # of the microbatches in flight
    [once] = ranks_of(replace(both, layout=ALONE, full_kl_in=frozenset({"forward"})))
    [without] = ranks_of(replace(training, layout=ALONE))
    assert (once.backward, once.forward - without.forward) == (without.backward, 4 * (4 * 100 + 6 * 8))


@pytest.mark.parametrize(
    ("kl", "passes"),
    [
        ("{place='none'}", set()),
        ("{place='reward', estimator='k1', coef=0.1}", set()),
        ("{place='loss', estimator='k3', coef=0.1}", set()),
        ("{place='reward', estimator='full', coef=0.1}", {"forward"}),
        ("{place='loss', estimator='full', coef=0.1}", {"update"}),
        ("{place='loss', estimator='full', coef=0.1, adaptive={target_per_token=0.1}}", {"forward", "update"}),
        ("{place='reward', estimator='full', coef=0.1, adaptive={target_per_token=0.1}}", {"forward"}),
    ],
)
def test_full_kl_passes_follow_kl_settings(smallest: Path, kl: str, passes: set[str]) -> None:
    """An adaptive coefficient uses the KL before the update, also in the loss."""
    recipe = load([smallest], [f"ppo.kl={kl}"], {}).recipe
    actor, critic = (training_of(recipe, role, SMALL, Precision(4, "cpu")) for role in ("actor", "critic"))
    assert (actor.full_kl_in, critic.full_kl_in) == (passes, frozenset())


def test_top_p_filter_adds_third_copy_of_logits_block(smallest: Path) -> None:
    """4 positions of 100 ids in one block: a number of 4 bytes, and a bit in a byte each."""
    batch = MicrobatchShape(10, 6, 4, 5)
    training = Training(Model(SMALL, "token"), ALONE, Precision(4, "cpu"), batch, batch, 1)
    [plain], [filtered] = ranks_of(training), ranks_of(replace(training, filtered=True))
    assert filtered.forward - plain.forward == filtered.backward - plain.backward == 5 * 4 * 100
    for key, value, reads in (("top_p", 0.9, True), ("top_k", 20, False), ("top_p", 1.0, False)):
        recipe = load([smallest], [f"rollout.{key}={value}"], {}).recipe
        for role, filters in (("actor", reads), ("critic", False)):
            assert training_of(recipe, role, SMALL, Precision(4, "cpu")).filtered == filters


def test_microbatches_under_way_per_pipeline_rank() -> None:
    batch = MicrobatchShape(10, 6, 4, 5)
    training = Training(
        Model(replace(SMALL, num_layers=4), "token"), ParallelTable(pipeline=4), Precision(4, "cpu"), batch, batch, 3
    )
    assert [rank.microbatches_under_way for rank in ranks_of(training)] == [3, 3, 2, 1]  # 4, with enough microbatches


def test_runs_under_way_of_interleaved_stages() -> None:
    """Four ranks with two virtual stages: 6 microbatches for the pipeline depth, 4 for the first virtual stage, and
    the current one."""
    layout = ParallelTable(pipeline=4, stages_per_rank=2)
    assert runs_under_way(layout, 0, 8) == [0] * 4 + [1] * 4 + [0] * 3
    assert runs_under_way(layout, 3, 8) == [0] * 4 + [1]
    assert runs_under_way(layout, 0, 4) == [0] * 4 + [1] * 4
    batch, model = MicrobatchShape(10, 6, 4, 5), replace(SMALL, num_layers=8)
    training = Training(Model(model, "token"), layout, Precision(4, "cpu"), batch, batch, 8)
    first, last = ranks_of(training)[0], ranks_of(training)[-1]
    assert (first.microbatches_under_way, last.microbatches_under_way) == (5.5, 2.5)
    a_layer = 10 * (2 * (2 * 4 * 8 + 4) + 2 * 4 * 8 + 4 * (16 + 8 + 32 + 16 + 16 + 4) + 5 * 4 * 20)
    tables, ids = 10 * 4 * 4, 10 * 8
    assert first.kept_under_way == 11 * (a_layer + tables) + 7 * ids
    assert last.kept_under_way == 4 * (a_layer + tables) + saved(_part(4, "cpu", layout, layers=1), batch).total


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_are_not_saved(recompute: Recompute) -> None:
    """10 tokens of 8 numbers into each of 3 layers; the MLP of a layer has 5 x 20 numbers per token."""
    batch = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)
    none, recomputed = (replace(_part(4, "cpu"), recompute=how) for how in ("none", recompute))
    before, after = saved(none, batch), saved(recomputed, batch)
    assert (after.ends, after.logits) == (before.ends, before.logits)
    extra = 10 * 4 * 5 * 20
    if recompute == "selective":
        assert after == replace(before, mlp=0)
    else:
        assert (after.total - after.ends - after.logits, after.inputs) == (10 * 3 * 4 * 8, 10 * 3 * 4 * 8)
        extra = (before.total - before.ends - before.logits) // 3
    middle = ModelShard(
        Model(SMALL, "token"),
        ParallelTable(pipeline=3),
        stages_of(SMALL, ParallelTable(pipeline=3))[1],
        Precision(4, "cpu"),
    )
    assert backward_bytes(replace(middle, recompute=recompute), batch) == backward_bytes(middle, batch) + extra


def _table(**keys: int) -> GeneratorTable:
    return GeneratorTable.model_validate({"gpu_memory_frac": 0.5, **keys})


def test_generator_weights_and_kv_cache() -> None:
    """Keys and values of a token: 2 x 3 layers x 8 channels x 2 bytes."""
    parameters = 3 * (ATTENTION + MLP + NORMS) + 8 + 2 * TABLE
    engine = generator_memory.generator_bytes(SMALL, 2, _table(), 300, 2.0 * (2 * parameters + 96 * 1000 + 95))
    assert (engine.weights, engine.kv_tokens, engine.full_sequences) == (2 * parameters, 1000, 3)
    assert generator_memory.generator_bytes(SMALL, 2, _table(), 300, 10.0).full_sequences == 0
    tied = generator_memory.generator_bytes(replace(SMALL, tied_embeddings=True), 2, _table(kv_cache_mib=3), 300)
    assert tied.weights == engine.weights  # plus a packed copy of the table
    assert tied.kv_tokens == 3 * 2**20 // 96
    split = generator_memory.generator_bytes(SMALL, 2, _table(kv_cache_mib=3, engines=5, tensor=2), 300)
    assert split.weights == 2 * (3 * ((ATTENTION + MLP) // 2 + NORMS) + 8 + TABLE)
    assert split.kv_tokens == 3 * 2**20 // 48  # half of the heads in each process


def test_weights_are_packed_into_buckets() -> None:
    """A stage with one layer: table 800; 8, 128, 64, 64, 16, 8, 8, 128, 8; 160, 160, 160; at the end 8 and 800."""
    buckets = generator_memory.bucket_bytes(replace(SMALL, num_layers=1), ParallelTable(tensor=2), 4, 4 * 300)
    numbers = (800, 8 + 128 + 64 + 64 + 16 + 8 + 8, 128 + 8 + 160, 160, 160 + 8, 800)
    assert buckets == tuple(4 * number for number in numbers)


@pytest.mark.parametrize(
    ("weights", "one_node", "sender", "engine", "host"),
    [
        ("shared", True, 3, 1, 0),
        ("shared", False, 3, 1, 3),  # a permanent segment, which nodes without a rank read
        ("store", False, 1, 0, 3),
        ("broadcast", False, 3, 2, 0),
    ],
)
def test_bucket_copies_depend_on_weight_transfer(
    weights: str, one_node: bool, sender: int, engine: int, host: int
) -> None:
    cluster = ClusterTable.model_validate({"weights": weights, "placement": "apart"})
    assert generator_memory.copies_of(cluster, one_node=one_node) == {
        "actor": sender,
        "generator": engine,
        "node": host,
    }


@pytest.mark.parametrize(
    ("sets", "is_kept"),
    [
        (["generator.engines=8"], True),
        (["generator.engines=8", "cluster.weights='store'"], False),  # in Ray's object store, or where it spills
        (["generator.engines=9"], False),  # on two nodes: in the store of a running Ray
        (["generator.engines=8", "cluster={placement='apart', weights='broadcast'}"], False),  # 10 GPUs, the same
        (["generator.engines=2", "cluster={placement='apart', weights='broadcast'}"], True),
        ([], True),  # next to the engine
        (["cluster.weights='store'"], True),  # without Ray there is no store
    ],
)
def test_published_weights_are_kept_on_host_of_single_node(smallest: Path, sets: list[str], is_kept: bool) -> None:
    memory = _estimate(smallest, *sets, gpu_gib=80.0)
    assert memory.node is not None
    kept = _items(memory.node).get("published weights", 0)
    assert kept == memory.sending.published == sum(memory.sending.buckets) * is_kept


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_too_little_gpu_memory_for_vllm_fails_generating_stages(smallest: Path, placement: str) -> None:
    sets = [f"cluster.placement={placement}", "generator.gpu_memory_frac=0.1"]
    memory = _estimate(smallest, *sets, gpu_gib=80.0)
    assert memory.generator.full_sequences == 0
    unfit = {stage.stage for stage in memory.places[-1].stages if not stage.fits}  # the generator's, separate
    enough = _estimate(smallest, f"cluster.placement={placement}", gpu_gib=800.0)
    assert unfit >= {"rollout", "eval"}
    assert all(stage.fits for location in enough.places for stage in location.stages)
    if placement == "apart":
        assert unfit == {"rollout", "eval"}


def test_driver_record_and_sample_bytes() -> None:
    """5 sequences of 7 + 20 tokens."""
    batch = StepBatch(5, prompt_tokens=7, response_tokens=20, has_reference=True, reference_in_loss=True)
    records = records_of(trace(PPO), fake_recipe(), batch)
    sequences = 100 * 4 + 5 * (7 * 4 + 2 * 8)
    assert records["rollout"] == sequences + 100 * (1 + 4) + 5 * 2 * 8 + 100 * 4
    assert (records["reward"], records["values"]) == (5 * (4 + 8), 400)
    assert records["advantages"] == 100 * 13 + 5 * 4
    assert update_input_bytes(batch, "value") == sequences + 100 * 9
    assert update_input_bytes(batch, "token") == sequences + 100 * 13
    without = replace(batch, has_reference=False, reference_in_loss=False)
    assert update_input_bytes(without, "token") == sequences + 100 * 9
    held = driver_bytes(batch, records)
    assert held.samples == 100 * (72 + 4) + records["rollout"]
    assert held.records == 2 * sum(records.values())
    assert held.peak == max(held.samples, held.records)


KL_IN_REWARD = {"place": "reward", "coef": 0.1}


@pytest.mark.parametrize(
    ("source", "kl", "grids"),
    [
        ("trainer", {"place": "none"}, 2),  # log-probs and entropies
        ("trainer", {"place": "reward", "coef": 0.1}, 3),
        ("trainer", {"place": "reward", "coef": 0.1, "estimator": "full"}, 3),
        ("trainer", {"place": "loss", "coef": 0.1, "estimator": "full"}, 2),  # the update computes the KL
        ("sampler", {"place": "none"}, 1),
        ("sampler", {"place": "loss", "coef": 0.1}, 2),
        ("current", {"place": "none"}, 0),
        ("current", {"place": "loss", "coef": 0.1}, 1),
    ],
    ids=str,
)
def test_logprob_records_have_the_grids_that_the_settings_need(source: str, kl: dict[str, Any], grids: int) -> None:
    batch = StepBatch(5, prompt_tokens=7, response_tokens=20, has_reference=True, reference_in_loss=True)
    recipe = fake_recipe(ppo={"epochs": 1, "minibatch_seqs": 8, "old_logprobs": source, "kl": kl})
    assert records_of(trace(PPO), recipe, batch)["logprobs"] == grids * 400


def test_bootstrap_and_correction_have_their_own_record_bytes() -> None:
    batch = StepBatch(5, prompt_tokens=7, response_tokens=20, has_reference=True, reference_in_loss=True)
    recipe = fake_recipe(
        ppo={"epochs": 1, "minibatch_seqs": 8, "truncated": "bootstrap", "rollout_correction": {"kind": "tis"}}
    )
    records = records_of(trace(PPO_CORRECTED), recipe, batch)
    assert (records["values"], records["correction"]) == (400 + 5 * 4, 100 * (4 + 1))


OF_PPO = schedule_of(trace(PPO), fake_recipe(ppo={"epochs": 2, "minibatch_seqs": 4, "kl": KL_IN_REWARD}))


def test_resident_roles_follow_stage_inputs() -> None:
    assert OF_PPO.stages[0] == "rollout"
    assert OF_PPO.stages[-5:] == ("eval", "actor_save", "critic_save", "actor_load", "critic_load")
    assert OF_PPO.parts == {
        "draws": ("rollout", "eval"),
        "actor scores": ("rollout", "logprobs", "eval"),
        "critic scores": ("values",),
        "actor updates": ("actor_update",),
        "critic updates": ("critic_update",),
        "actor saves": ("actor_save",),
        "critic saves": ("critic_save",),
        "actor loads": ("actor_load",),
        "critic loads": ("critic_load",),
        "generator": ("rollout", "reward", "eval"),
        "actor weights": ("rollout", "logprobs", "advantages", "actor_update", "eval", "actor_save", "actor_load"),
        "actor training": ("actor_update", "actor_save", "actor_load"),
        "reference": ("logprobs", "advantages"),
        "critic weights": ("values", "critic_update", "critic_save", "critic_load"),
        "critic training": ("critic_update", "critic_save", "critic_load"),
    }
    without_critic = schedule_of(trace(NO_CRITIC), fake_recipe())
    assert "critic scores" not in without_critic.parts
    assert without_critic.of("actor weights") == (
        "rollout",
        "logprobs",
        "group_advantages",
        "actor_update",
        "eval",
        "actor_save",
        "actor_load",
    )


def test_stage_fits_or_lists_largest_items(smallest: Path) -> None:
    sizes = _estimate(smallest)
    items = [
        MemoryItem("a", 5, "device", "actor", "less a"),
        MemoryItem("b", 3, "device", "critic", "less b", ("values", "eval")),
        MemoryItem("c", 4, "device", "critic", "less c", ("values",)),
        MemoryItem("c", 5, "device", "actor", "less c", ("values",)),
        MemoryItem("nothing", 0, "device", "actor", "less"),
    ]
    pool = pools.pool_of("here", 8, items, sizes)
    stages = {stage.stage: stage for stage in pool.stages}
    assert (stages["rollout"].bytes, stages["rollout"].fits) == (5, True)
    assert (stages["eval"].bytes, stages["eval"].fits) == (8, True)
    assert (stages["values"].bytes, stages["values"].fits) == (17, False)
    assert [(item.name, item.bytes) for item in pool.largest("values")] == [("c", 9), ("a", 5), ("b", 3)]
    assert "nothing" not in {item.name for item in pool.items}
    assert pools.pool_of("there", None, items, sizes).stages[0].fits is None


def test_offloaded_role_keeps_its_host_memory() -> None:
    """In each role, some memory is offloaded, some is released, and some exists only for a while."""
    items = [
        MemoryItem(f"{role} {between}", 7, "device", role, "less", ("values",), between)
        for role in ("actor", "critic")
        for between in ("moved", "dropped", "gone")
    ]
    resident_items = list(resident(items, OF_PPO, ["critic"]))
    assert [(item.name, item.place, item.stages) for item in resident_items] == [
        ("actor moved", "device", None),
        ("actor dropped", "device", None),
        ("actor gone", "device", ("values",)),
        ("critic moved", "device", ("values",)),
        ("offloaded", "host", OF_PPO.stages[:-1]),  # zero while it is not loaded
        ("critic dropped", "device", ("values",)),
        ("critic gone", "device", ("values",)),
    ]
    assert sum(item.bytes for item in resident_items) == 7 * 7


GIB = 2**30
CONTEXT, NCCL = int(0.6 * GIB), 5 * GIB // 4


def with_fragments(size: int) -> int:
    """Add a tenth for fragmentation."""
    return size + int(0.1 * size)


def _estimate(smallest: Path, *sets: str, gpu_gib: float | None = None) -> Memory:
    sets = (f"model.path={DEEPSEEK_7B}", "generator.compile=false", *sets)
    recipe = load([smallest], sets, {}).recipe
    return estimate(recipe, dict.fromkeys(recipe.trained, read_shape(DEEPSEEK_7B)), gpu_gib)


def _items(pool: pools.Pool) -> dict[str, int]:
    """Return the bytes by name of the fullest stage."""
    largest: dict[str, int] = {}
    for stage in pool.stages:
        for item in pool.largest(stage.stage):
            largest[item.name] = max(item.bytes, largest.get(item.name, 0))
    return largest


def _all_items(memory: Memory) -> dict[str, int]:
    """Return the items of the only location."""
    [location] = memory.places
    return _items(location)


def test_gpu_has_one_rank_per_role_and_machine_has_all(smallest: Path) -> None:
    """No role is offloaded: resident memory is resident in every stage."""
    layout = "actor.parallel={tensor=2, data=2}"
    on_gpu, on_machine = (
        _all_items(_estimate(smallest, layout, gpu_gib=80.0)),
        _all_items(_estimate(smallest, layout)),
    )
    for name in ("actor weights", "critic gradients", "actor optimizer"):
        assert on_machine[name] == 4 * on_gpu[name]
    assert {"libraries", "object store", "samples and records", "states being written"} <= set(on_machine) - set(
        on_gpu
    )
    assert on_gpu["generator weights"] + on_gpu["KV cache"] == int(0.6 * 80 * 2**30)
    assert "reference" not in on_gpu
    assert "reference" in _all_items(_estimate(smallest, "ppo.kl={place='reward', coef=0.1}"))
    assert "states being written" not in _all_items(_estimate(smallest, "checkpoint.asynchronous=false"))


def test_update_that_reads_reference_has_reference_on_device(smallest: Path) -> None:
    leaving = "cluster.offload=['actor', 'critic', 'generator']"
    for estimator, reads in (("k3", False), ("full", True)):
        kl = f"ppo.kl={{place='loss', estimator='{estimator}', coef=0.1}}"
        schedule = _estimate(smallest, leaving, kl, gpu_gib=80.0).schedule
        assert ("actor_update" in schedule.of("reference")) == reads
        assert not {"critic_update", "actor_save"} & set(schedule.of("reference"))


def test_unread_logprobs_load_no_model(smallest: Path) -> None:
    leaving = "cluster.offload=['actor', 'critic', 'generator']"
    kl = "ppo.kl={{place='loss', coef=0.1, estimator='{}'}}"
    for sets, scored in (
        (["ppo.old_logprobs=trainer"], True),
        (["ppo.old_logprobs=sampler"], False),
        (["ppo.old_logprobs=sampler", kl.format("k3")], True),
        (["ppo.old_logprobs=sampler", kl.format("full")], False),
    ):
        schedule = _estimate(smallest, leaving, *sets, gpu_gib=80.0).schedule
        assert ("logprobs" in schedule.of("actor scores")) == scored
        # The roles that were resident before remain.
        assert ("logprobs" in schedule.of("critic weights")) != scored


def test_critic_only_steps_do_not_lower_estimate(smallest: Path) -> None:
    """The estimate uses a step in which all roles train, although the first steps do not train the actor."""
    learning, waiting = (
        _estimate(smallest, f"ppo.critic_only_steps={steps}", "cluster.offload=['actor', 'critic']", gpu_gib=80.0)
        for steps in (0, 3)
    )
    assert "actor_update" in waiting.schedule.stages
    assert waiting.places == learning.places
    assert waiting.node == learning.node


def test_estimate_of_engines_on_machine_and_gpus(smallest: Path) -> None:
    """Four processes: the fullest GPU has one of them next to actor and critic."""
    sets = ["generator.engines=2", "generator.tensor=2"]
    alone, several = _all_items(_estimate(smallest)), _all_items(_estimate(smallest, *sets))
    assert several["KV cache"] == 4 * alone["KV cache"]
    assert (
        2 * alone["generator weights"] < several["generator weights"] < 2.01 * alone["generator weights"]
    )  # norms are not split
    assert several["libraries"] == 2**20 * (3 * 400 + 4 * 550)
    assert alone["libraries"] == 2**20 * (400 + 550)
    assert "object store" not in alone
    [shared] = _estimate(smallest, *sets, gpu_gib=80.0).places
    assert shared.name == "the fullest of 4 GPUs (actor, critic, generator)"
    [alone] = _estimate(smallest, gpu_gib=80.0).places
    assert alone.name == "the GPU (actor, critic, generator)"


def test_separate_placement_gives_every_process_a_gpu(smallest: Path) -> None:
    apart = "cluster={placement='apart'}"
    memory = _estimate(smallest, apart, "actor.parallel={pipeline=2}", gpu_gib=80.0)
    assert [location.name for location in memory.places] == [
        "the actor's GPU",
        "the critic's GPU",
        "the generator's GPU",
    ]
    actor, _, engine = memory.places
    rank, stages = memory.roles["actor"].largest, {stage.stage: stage.bytes for stage in actor.stages}
    always = rank.resident + CONTEXT + NCCL
    assert stages["actor_update"] == always + with_fragments(rank.update)
    # Three copies of the largest bucket on the sender, one on the receiver.
    assert stages["rollout"] == always + with_fragments(rank.forward) + 3 * memory.sending.largest
    assert stages["eval"] == stages["rollout"]  # of an actor that was just updated
    ways = {item.name: item.bytes for item in engine.items}
    assert ways.keys() == {"generator weights", "KV cache", "weights in transfer", "CUDA contexts"}
    assert ways["weights in transfer"] == memory.sending.largest


def test_fullest_gpu_of_unequal_gpus(smallest: Path) -> None:
    """Pipeline ranks differ, and only some of the GPUs have a critic."""
    sets = ["actor.parallel={pipeline=2}", "critic.parallel={tensor=1}"]
    memory = _estimate(smallest, *sets, gpu_gib=80.0)
    [location] = memory.places
    first, _ = memory.roles["actor"].ranks
    critic = memory.roles["critic"].largest
    resident = first.resident + critic.resident + memory.generator.weights + memory.generator.kv_cache
    resident += 3 * CONTEXT + NCCL  # the critic and an engine are one process each
    stages = {stage.stage: stage.bytes for stage in location.stages}
    assert (stages["actor_update"], stages["critic_update"]) == (
        resident + with_fragments(first.update),
        resident + with_fragments(critic.update),
    )
    assert stages["rollout"] == resident + with_fragments(first.forward) + 4 * memory.sending.largest


def test_forward_passes_have_separate_microbatches(smallest: Path) -> None:
    """10 prompts of 20 + 13 tokens; a forward pass reads 32."""
    sets = ["rollout.prompts_per_step=10", "ppo.minibatch_seqs=5", "critic.batching={microbatch_seqs=2}"]
    sets += ["actor.batching={max_tokens_per_microbatch=100, forward_max_tokens_per_microbatch=1000}"]
    recipe = load([smallest], [*sets, "actor.recompute='full'"], {}).recipe
    actor, critic = (training_of(recipe, role, SMALL, Precision(4, "cpu")) for role in ("actor", "critic"))
    assert (actor.microbatch.tokens, actor.forward.tokens, actor.microbatches) == (100, 320, 2)
    assert (critic.microbatch.tokens, critic.forward.tokens, critic.microbatches) == (64, 64, 3)
    assert (actor.recompute, critic.recompute) == ("full", "none")
    recipe = load([smallest], [*sets, "actor.parallel={context=3}"], {}).recipe
    split = training_of(recipe, "actor", SMALL, Precision(4, "cpu"))
    assert split.microbatch == MicrobatchShape(34, 34, actor.microbatch.logits_chunk, 32)
    assert split.forward.tokens == 107


def test_oversized_role_names_key_to_change(smallest: Path) -> None:
    [gpu] = _estimate(smallest, gpu_gib=80.0).places
    assert not any(stage.fits for stage in gpu.stages)
    largest = gpu.largest("rollout")[0]
    assert largest.name == "actor optimizer"
    assert largest.lower == "raise `actor.parallel.data` with `distributed_optimizer = true`"
    # More ranks on the same machine save nothing; fewer copies do.
    places = [_estimate(smallest, f"actor.parallel={{data={copies}}}").places[0] for copies in (1, 2)]
    lower = [{item.name: item.lower for item in place.items}["actor optimizer"] for place in places]
    assert lower == ["use more nodes (`cluster.ray_address`) or a smaller model", "lower `actor.parallel.data`"]
    [of_nodes] = _estimate(smallest, "cluster={ray_address='a:1'}").places
    assert of_nodes.room is None
    assert of_nodes.stages[0].fits is None


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_device_count_equals_ray_placement(smallest: Path, placement: str) -> None:
    engines = "generator={engines=3, engines_per_gpu=4}"
    recipe = load(
        [smallest], [f"cluster={{placement='{placement}'}}", engines, "critic.parallel={data=2}"], {}
    ).recipe
    assert processes(recipe) == {"actor": 1, "critic": 2, "generator": 12}
    together = {role: per_device(recipe, role) for role in processes(recipe)}
    assert devices(recipe) == DevicePlacement(processes(recipe), placement == "colocated", together).devices
    assert devices(recipe) == (3 if placement == "colocated" else 6)
    assert not is_one_process(recipe)
    assert is_one_process(load([smallest], ["generator.engines_per_gpu=2"], {}).recipe)


def test_engines_of_one_gpu_divide_its_cache_and_copy_the_weights(smallest: Path) -> None:
    """Two of three GPUs have three engines each, which divide 0.75 of 80 GiB."""
    layout = "actor.parallel={data=3}"
    sets = [layout, "generator={engines=2, engines_per_gpu=3, gpu_memory_frac=0.75}"]
    memory = _estimate(smallest, *sets, gpu_gib=80.0)
    engine = memory.generator
    assert engine.weights + engine.kv_cache == 20 * 2**30
    [fullest] = memory.places
    assert fullest.name == "the fullest of 3 GPUs (actor, critic, generator)"
    has, alone = _items(fullest), _items(_estimate(smallest, layout, gpu_gib=80.0).places[0])
    assert has["generator weights"] == 3 * engine.weights
    assert has["KV cache"] == 3 * engine.kv_cache
    assert has["CUDA graphs"] == 3 * 2**30
    assert has["CUDA contexts"] - alone["CUDA contexts"] == 2 * int(0.6 * 2**30)
    on_cpu = _estimate(smallest, "generator={engines_per_gpu=4, kv_cache_mib=64}").generator
    assert on_cpu.kv_cache == 16 * 2**20


def test_advised_engines_fit_by_weights_and_sequences() -> None:
    """A quarter of 40 units of memory is for copies of the weights: 3 of 3 units, 2 of 5, none of 11."""
    table = GeneratorTable(max_concurrent_seqs=400)

    def advised(weights: int, sequences: int, **changed: object) -> int:
        engine = GeneratorBytes(weights, 40 - weights, 0, 0, 0)
        return generator_memory.advised_engines(engine, table.model_copy(update=changed), sequences)

    assert [advised(weights, 1000) for weights in (2, 3, 5, 11)] == [3, 3, 2, 1]
    assert [advised(2, sequences) for sequences in (63, 127, 128, 191, 192)] == [1, 1, 2, 2, 3]
    assert advised(2, 1000, max_concurrent_seqs=130) == 2
    assert advised(2, 256, engines=2) == 2
    assert advised(2, 1000, tensor=2) == 1


def _recipe(smallest: Path, *sets: str) -> Recipe:
    return load([smallest], [f"model.path={DEEPSEEK_7B}", *sets], {}).recipe


def test_host_memory_of_first_node(smallest: Path) -> None:
    """16 GPUs on two nodes: the first has the driver and the ranks that write; both have eight ranks of each role."""
    layout = "actor.parallel={tensor=2, context=2, pipeline=2, data=2}"
    sets = [layout, "generator.engines=16", "cluster.offload=['actor', 'critic', 'generator']"]
    memory = _estimate(smallest, *sets, gpu_gib=80.0)
    node = memory.node
    assert node is not None
    assert node.name == "a node with 8 GPUs (the fullest of 2)"
    has = _items(node)
    # The first node has all ranks of the first stage; the first two of them write half of both states.
    trainers = [memory.roles[role].ranks[0] for role in ("actor", "critic")]
    moved = [rank.weights + rank.main_weights + rank.moments + rank.reference for rank in trainers]
    assert has["offloaded"] == 8 * sum(moved)  # a sleeping engine keeps no weights
    assert has["states being written"] == 2 * sum(role.state // 4 for role in memory.roles.values())
    batch = batch_of(_recipe(smallest))
    assert has["rollouts in ranks"] == 8 * sum(update_input_bytes(batch, head) for head in ("token", "value"))
    assert has["samples and records"] == memory.driver.peak
    assert has["libraries"] == 2**20 * (17 * 400 + 8 * 550)
    assert has["object store"] == 2**28
    # Engines are on two nodes, so a rank also stores weights.
    assert has["weights in transfer"] == 3 * memory.sending.largest
    assert "published weights" not in has
    assert node.fullest.bytes < sum(has.values())  # not all at the same time


def test_host_memory_follows_recipe(smallest: Path) -> None:
    def node(*sets: str) -> tuple[str, dict[str, int]]:
        fullest = _estimate(smallest, *sets, gpu_gib=80.0).node
        assert fullest is not None
        return fullest.name, _items(fullest)

    name, alone = node()
    assert name == "a node with 1 GPU"
    assert set(alone) == {
        "states being written", "samples and records", "libraries", "staging", "published weights",
    }  # fmt: skip
    assert alone["libraries"] == 2**20 * (400 + 550)
    assert "states being written" not in node("checkpoint.asynchronous=false")[1]
    # Separate: two GPUs of the actor, two of the critic, one of the generator.
    name, apart = node("cluster={placement='apart'}", "actor.parallel={data=2}")
    assert name == "a node with 5 GPUs"
    assert apart["libraries"] == 2**20 * (5 * 400 + 550)
    split = "actor.parallel={data=2, distributed_optimizer=true}"
    gathered, not_gathered = (
        node(split, f"checkpoint.reshardable='{how}'")[1]["states being written"] for how in ("full", "dp")
    )
    assert abs(gathered - not_gathered) <= 2  # all of it, from one rank or from both
    many = "actor.parallel={data=16, distributed_optimizer=true}"
    gathered, not_gathered = (
        node(many, f"checkpoint.reshardable='{how}'")[1]["states being written"] for how in ("full", "dp")
    )
    assert not_gathered < 0.51 * gathered
    assert "object store" not in node("generator.engines=2", "cluster={ray_address='a:1'}")[1]
    assert _estimate(smallest).node is None


def test_offloaded_generator_frees_memory_for_resident_trainers(smallest: Path) -> None:
    """Weights and cache of the generator are released in every stage except the stages in which it generates, and the
    reward stage after one."""
    stay, leave = (
        _estimate(smallest, f"cluster.offload={offload}", gpu_gib=80.0) for offload in ("[]", "['generator']")
    )
    engine = stay.generator.weights + stay.generator.kv_cache
    [before], [after] = stay.places, leave.places
    less = {old.stage: old.bytes - new.bytes for old, new in zip(before.stages, after.stages, strict=True)}
    assert less == {
        stage.stage: 0 if stage.stage in ("rollout", "reward", "eval") else engine for stage in before.stages
    }
    assert leave.node is not None
    assert "offloaded" not in _items(leave.node)  # weights are sent again after a sleep
    assert leave.taking_turns is not None
    assert _estimate(smallest, "cluster.offload=['actor', 'critic', 'generator']", gpu_gib=80.0).taking_turns is None


def test_engines_and_updates_are_in_memory_together_if_generation_is_ahead(smallest: Path) -> None:
    ahead = ("rollout.ahead=1", "ppo.rollout_correction.kind=tis")
    memory = _estimate(smallest, *ahead, gpu_gib=80.0)
    engine, [pool] = memory.generator, memory.places
    for role, ranks in memory.roles.items():
        largest = {item.name: item.bytes for item in pool.largest(f"{role}_update")}
        assert (largest["generator weights"], largest["KV cache"]) == (engine.weights, engine.kv_cache)
        assert largest[f"{role} activations"] == ranks.largest.update
        for other, rank in memory.roles.items():
            assert largest[f"{other} gradients"] == rank.largest.gradients
            assert largest[f"{other} optimizer"] == rank.largest.device_optimizer
    # The rule of `ahead` rejects the advice to offload roles.
    assert memory.taking_turns is None
    assert _estimate(smallest, gpu_gib=80.0).taking_turns is not None


def test_reward_model_is_on_device_while_scoring(smallest: Path) -> None:
    judge = f"reward={{kind='model', path='{DEEPSEEK_7B}', max_tokens=2048}}"
    leaving = "cluster.offload=['actor', 'critic', 'generator', 'reward']"
    memory = _estimate(smallest, judge, leaving, gpu_gib=80.0)
    scored = ("reward", "eval_scores")
    assert memory.schedule.of("scoring") == scored
    assert "reward" not in memory.schedule.of("generator")
    [place] = memory.places
    weights = next(item for item in place.items if item.name == "reward model weights")
    assert (weights.role, weights.stages) == ("reward", scored)
    # The reward model is as large as the critic, the same model with a head of one output; it is not trained.
    critic = next(item for item in place.items if item.name == "critic weights")
    assert weights.bytes == critic.bytes
    assert not any(item.role == "reward" and "optimizer" in item.name for item in place.items)
    stays = _estimate(smallest, judge, gpu_gib=80.0).places[0]
    assert all(item.stages is None for item in stays.items if item.name == "reward model weights")
    halves = _estimate(smallest, judge.replace("}", ", parallel={tensor=2}}"), gpu_gib=80.0)
    assert halves.scoring["reward"].weights == pytest.approx(weights.bytes / 2, rel=0.01)


def test_vllm_reward_model_adds_kv_cache(smallest: Path) -> None:
    """2 x 4 heads of 128 channels of 28 layers in bfloat16: 8,192 tokens, and a block of 128 for each of 64 texts."""
    ours, theirs = (
        _estimate(
            smallest,
            f"reward={{kind='model', path='{DEEPSEEK_7B}', max_tokens=2048, engine='{engine}'}}",
            gpu_gib=80.0,
        ).scoring["reward"]
        for engine in ("megatron", "vllm")
    )
    assert theirs.forward - ours.forward == 2 * 512 * 28 * 2 * (8192 + 64 * 128)
    assert theirs.weights == ours.weights


def test_estimate_without_reward_model_is_unchanged(smallest: Path) -> None:
    memory = _estimate(smallest, gpu_gib=80.0)
    without_kl = fake_recipe(ppo={"epochs": 2, "minibatch_seqs": 4})
    assert memory.schedule == schedule_of(trace(PPO), without_kl)
    assert memory.scoring == {}


def test_interleaved_stages_are_spaced_by_pipeline_size() -> None:
    """8 layers: the first virtual stages of both ranks come before the second ones."""
    first, last = stages_of(replace(SMALL, num_layers=8), ParallelTable(pipeline=2, stages_per_rank=2))
    assert (first.layers, last.layers) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_tensor_that_exactly_fills_bucket_is_included() -> None:
    alone = generator_memory.bucket_bytes(SMALL, ALONE, 4, 1)
    assert len(alone) > 3
    filled = generator_memory.bucket_bytes(SMALL, ALONE, 4, alone[0] + alone[1])
    assert filled[0] == alone[0] + alone[1]
    assert generator_memory.bucket_bytes(SMALL, ALONE, 4, alone[0] + alone[1] - 1)[0] == alone[0]


def test_stage_that_exactly_fills_device_fits(smallest: Path) -> None:
    memory = _estimate(smallest, gpu_gib=80.0)
    (pool,) = memory.places
    assert misfit(replace(memory, places=(replace(pool, room=pool.fullest.bytes),))) is None
    error = misfit(replace(memory, places=(replace(pool, room=pool.fullest.bytes - 1),)))
    assert error is not None
    assert f"stage `{pool.fullest.stage}` needs" in error.message


def test_driver_memory_is_on_first_node(smallest: Path) -> None:
    """The second node, with engines, is the fullest."""
    sets = ["cluster.placement=apart", "actor.parallel={data=4}", "critic.parallel={data=4}", "generator.engines=8"]
    sets += ["checkpoint.asynchronous=false"]
    node = _estimate(smallest, *sets, gpu_gib=80.0).node
    assert node is not None
    assert {item.role for item in node.items} == {"generator", "node"}


@pytest.mark.parametrize(("device", "copies"), [("gpu", 2), ("cpu", 3)])
def test_experts_of_the_largest_layer_are_in_transfer(device: str, copies: int) -> None:
    """Qwen1.5-MoE: 60 experts of three matrices of 2048 x 1408, and shared experts that are loaded one by one."""
    shape = shape_if_known("Qwen/Qwen1.5-MoE-A2.7B-Chat")
    assert shape is not None
    assert generator_memory.expert_transfer_bytes(shape, 2, device) == copies * 60 * 3 * 2048 * 1408 * 2
    assert generator_memory.expert_transfer_bytes(SMALL, 2, device) == 0
