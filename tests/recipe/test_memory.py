"""Bytes before launch, worked by hand. What real engines have is compared in tests/engines/megatron."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ppoctl.recipe.load import load
from ppoctl.recipe.memory import generator, residency
from ppoctl.recipe.memory.activations import Microbatch, Part, Precision, backward_bytes, forward_bytes, kept
from ppoctl.recipe.memory.decoder import Decoder, Experts, count_parameters, decoder_of, rank_parameters, stages_of
from ppoctl.recipe.memory.driver import Batch, driver_bytes, records_of, update_input_bytes
from ppoctl.recipe.memory.estimate import Memory, estimate
from ppoctl.recipe.memory.trainer import Training, ranks_of, state_bytes
from ppoctl.recipe.parallel import ParallelTable

QWEN_0_5B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_0_6B = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_7B = Path(__file__).parents[2] / "docs" / "dsr1-7b"

SMALL = Decoder(
    layers=3, hidden=8, inner=20, heads=4, kv_heads=2, head_dim=4, vocab=100, tied=False, qkv_bias=True,
    head_norms=False, experts=None,
)  # fmt: skip
# Of a layer: query and output 8 x 16 each, key and value 8 x 8 each, biases 16 + 8 + 8; three matrices 8 x 20.
ATTENTION, MLP, NORMS = 2 * 128 + 2 * 64 + 32, 3 * 160, 2 * 8
TABLE = 128 * 8  # 100 rows, padded to 128
ALONE = ParallelTable()


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (QWEN_0_5B, 494_032_768),
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_0_6B, 596_049_920),
        (QWEN3_30B_A3B, 30_532_122_624),
        (json.loads((DEEPSEEK_7B / "config.json").read_text("utf-8")), 7_615_616_512),
    ],
)
def test_parameters_of_published_models(config: dict[str, object], published: int) -> None:
    assert count_parameters(config) == published


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x"},
        {**LLAMA_8B, "model_type": "x"},
        {**LLAMA_8B, "num_local_experts": 8},
        {**QWEN3_30B_A3B, "mlp_only_layers": [0]},
        {**QWEN3_30B_A3B, "decoder_sparse_step": 2},
        {key: value for key, value in LLAMA_8B.items() if key != "vocab_size"},
    ],
)
def test_a_model_of_another_kind_is_not_guessed(config: dict[str, object]) -> None:
    assert count_parameters(config) is None


def test_a_token_meets_the_experts_it_is_routed_to() -> None:
    decoder = decoder_of(QWEN3_30B_A3B)
    assert decoder is not None
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 8 * 3 * 2048 * 768
    assert decoder.multiplied_parameters == 48 * layer + 151936 * 2048


def test_parameters_of_each_rank() -> None:
    [alone] = stages_of(SMALL, ALONE)
    layer = ATTENTION + MLP + NORMS
    assert rank_parameters(SMALL, "actor", alone, 1) == 3 * layer + 8 + 2 * TABLE
    assert rank_parameters(SMALL, "critic", alone, 1) == 3 * layer + 8 + TABLE + 8  # a row of values, one table
    assert rank_parameters(SMALL, "actor", alone, 2) == 3 * ((ATTENTION + MLP) // 2 + NORMS) + 8 + TABLE
    first, last = stages_of(SMALL, ParallelTable(pipeline=2, first_stage_layers=1))
    assert (first.layers, last.layers) == (1, 2)
    assert rank_parameters(SMALL, "actor", first, 1) == layer + TABLE
    assert rank_parameters(SMALL, "actor", last, 1) == 2 * layer + 8 + TABLE
    assert rank_parameters(SMALL, "critic", last, 1) == 2 * layer + 8 + 8
    tied = replace(SMALL, tied=True)
    assert rank_parameters(tied, "actor", alone, 1) == 3 * layer + 8 + TABLE
    assert rank_parameters(tied, "actor", last, 1) == 2 * layer + 8 + TABLE  # a copy of its own


def test_experts_norms_of_heads_and_the_router() -> None:
    model = replace(SMALL, qkv_bias=False, head_norms=True, experts=Experts(number=6, per_token=2, inner=5))
    [alone] = stages_of(model, ALONE)
    split, whole = ATTENTION - 32 + 6 * 3 * 8 * 5, NORMS + 2 * 4 + 6 * 8
    assert rank_parameters(model, "actor", alone, 2) == 3 * (split // 2 + whole) + 8 + TABLE


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (ParallelTable(pipeline=4), [2, 2, 2, 2]),
        (ParallelTable(pipeline=4, first_stage_layers=1, last_stage_layers=3), [1, 2, 2, 3]),
        (ParallelTable(pipeline=3, last_stage_layers=2), [3, 3, 2]),
        (ParallelTable(pipeline=2, first_stage_layers=1, last_stage_layers=7), [1, 7]),
    ],
)
def test_layers_over_pipeline_ranks(layout: ParallelTable, layers: Sequence[int]) -> None:
    assert [stage.layers for stage in stages_of(replace(SMALL, layers=8), layout)] == layers


def _part(weight: int, device: str, layout: ParallelTable = ALONE, role: str = "actor") -> Part:
    return Part(SMALL, role, layout, stages_of(SMALL, layout)[-1], Precision(weight, device))


def test_what_a_forward_pass_keeps() -> None:
    """10 tokens, 6 of them read, 3 layers; logits of 4 positions at a time."""
    batch = Microbatch(tokens=10, read=6, logits_chunk=4)
    found = kept(_part(4, "cpu"), batch)
    assert found.norms == 10 * 3 * 2 * (2 * 4 * 8 + 4)
    assert found.projections == 10 * 3 * 2 * 4 * 8
    # Rotated queries 16 and keys 8, the fused projection 32; outputs twice, a statistic for each of 4 heads.
    assert found.attention == 10 * 3 * 4 * (16 + 8 + 32 + 16 + 16 + 4)
    assert found.mlp == 10 * 3 * 5 * 4 * 20
    # Ids, sine and cosine, the last norm; of positions read the hidden numbers, four ids or places, two figures.
    assert found.ends == 10 * (8 + 4 * 4 + 2 * 4 * 8 + 4) + 6 * (4 * 8 + 4 * 8 + 2 * 4)
    assert found.logits == 4 * 100 * 4

    in_bfloat16 = kept(_part(2, "cpu"), batch)
    assert in_bfloat16.norms == found.norms  # float32 either way
    assert in_bfloat16.attention == 10 * 3 * (4 * (16 + 8 + 8) + 4 * 16 + 2 * 16 + 4 * 4)
    on_gpu = kept(_part(2, "gpu"), batch)
    assert on_gpu.norms == 10 * 3 * 2 * (2 * 8 + 4)
    assert on_gpu.attention == 10 * 3 * (2 * (16 + 8 + 32 + 16) + 4 * 4)

    split = kept(_part(4, "cpu", ParallelTable(tensor=2)), batch)
    assert (split.norms, split.projections) == (found.norms, found.projections)
    assert (split.attention, split.mlp) == (found.attention // 2, found.mlp // 2)
    assert split.logits == 4 * 64 * 4  # the first rank has 64 of the 128 padded rows
    shared = kept(_part(4, "cpu", ParallelTable(tensor=2, sequence=True)), batch)
    assert (shared.norms, shared.projections) == (found.norms // 2, found.projections // 2)
    of_critic = kept(_part(2, "cpu", role="critic"), batch)
    assert of_critic.logits == 0
    assert of_critic.ends == 10 * (8 + 2 * 4 + 2 * 4 * 8 + 4) + 6 * (4 * 8 + 3 * 8)


def test_work_beyond_what_is_kept() -> None:
    batch = Microbatch(tokens=10, read=6, logits_chunk=4)
    first = Part(
        SMALL, "actor", ParallelTable(pipeline=3), stages_of(SMALL, ParallelTable(pipeline=3))[0], Precision(4, "cpu")
    )
    assert backward_bytes(first, batch) == 10 * 4 * (8 + 8 + 2 * 20)
    assert forward_bytes(first, batch) == 10 * (4 * 4 * 8 + 5 * 4 * 20 + 4 * 4)
    # Two float32 copies of the logits at hand, and the gradient of what was read.
    assert backward_bytes(_part(4, "cpu"), batch) == 2 * 4 * 400 + 6 * 4 * 8


def test_states_of_ranks() -> None:
    layout = ParallelTable(data=2, distributed_optimizer=True)
    batch = Microbatch(10, 6, 4)
    training = Training("actor", SMALL, layout, Precision(2, "cpu"), batch, microbatches=3, has_reference=True)
    [rank] = ranks_of(training)
    parameters = 3 * (ATTENTION + MLP + NORMS) + 8 + 2 * TABLE
    assert (rank.weights, rank.gradients, rank.reference) == (2 * parameters, 4 * parameters, 2 * parameters)
    assert (rank.main_weights, rank.moments) == (2 * parameters, 4 * parameters)  # halves of 4 and 8
    assert rank.resident == 14 * parameters
    [whole] = ranks_of(replace(training, layout=ALONE, precision=Precision(4, "cpu")))
    assert (whole.main_weights, whole.moments) == (0, 8 * parameters)
    assert state_bytes(SMALL, "actor", ALONE, 4) == 12 * parameters
    assert state_bytes(SMALL, "actor", ALONE, 2) == 14 * parameters
    assert state_bytes(SMALL, "actor", ParallelTable(distributed_optimizer=True), 4) == 16 * parameters


def test_microbatches_under_way_in_a_pipeline() -> None:
    training = Training(
        "actor", replace(SMALL, layers=4), ParallelTable(pipeline=4), Precision(4, "cpu"), Microbatch(10, 6, 4), 3
    )
    assert [rank.microbatches_under_way for rank in ranks_of(training)] == [3, 3, 2, 1]  # 4, were there so many


def test_the_generator() -> None:
    """Keys and values of a token: 2 x 3 layers x 8 channels x 2 bytes."""
    parameters = 3 * (ATTENTION + MLP + NORMS) + 8 + 2 * TABLE
    engine = generator.on_gpu(SMALL, 2, 2 * parameters + 96 * 1000 + 95, window=300)
    assert (engine.weights, engine.kv_tokens, engine.full_sequences) == (2 * parameters, 1000, 3)
    assert generator.on_gpu(SMALL, 2, 10, window=300).full_sequences == 0
    tied = generator.on_cpu(replace(SMALL, tied=True), 2, 96 * 1000, window=300)
    assert tied.weights == engine.weights  # a packed copy of the table beside it


def test_weights_go_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage with one layer: table 800; 8, 128, 64, 64, 16, 8, 8, 128, 8; 160, 160, 160; at the end 8 and 800."""
    monkeypatch.setattr(generator, "BUCKET_BYTES", 4 * 300)
    model = replace(SMALL, layers=1)
    assert generator.buckets(model, ALONE, 4) == []
    sizes = generator.buckets(model, ParallelTable(tensor=2), 4)
    assert sizes == [4 * 800, 4 * (8 + 128 + 64 + 64 + 16 + 8 + 8 + 128), 4 * (8 + 160 + 160), 4 * (160 + 8 + 800)]


def test_the_driver() -> None:
    """5 sequences of 7 + 20 tokens."""
    batch = Batch(5, prompt_tokens=7, response_tokens=20, has_reference=True, reference_in_loss=True)
    records = records_of(batch)
    assert records.rollout == 100 * (8 + 1 + 4) + 5 * (7 * 8 + 4 * 8) + 100 * 4
    assert (records.reward, records.values, records.logprobs) == (5 * 16, 400, 1200)
    assert records.advantages == 100 * 13
    assert update_input_bytes(batch, "critic") == records.rollout + 100 * 9
    assert update_input_bytes(batch, "actor") == records.rollout + 100 * 13
    without = replace(batch, has_reference=False, reference_in_loss=False)
    assert records_of(without).logprobs == 800
    assert update_input_bytes(without, "actor") == records.rollout + 100 * 9
    driver = driver_bytes(batch, largest_bucket=3)
    assert driver.samples == 100 * (72 + 4) + records.rollout
    assert driver.records == 2 * records.total
    assert driver.peak == max(driver.samples, driver.records) + 6


def test_a_stage_fits_or_names_what_is_largest() -> None:
    items = [
        residency.Item("a", 5, "less a"),
        residency.Item("b", 3, "less b", ("values", "eval")),
        *residency.at_work("c", "less c", {"values": 9, "rollout": 0}),
    ]
    stages = {stage.stage: stage for stage in residency.stages_in(residency.Place("here", 8), items)}
    assert (stages["rollout"].resident, stages["rollout"].bytes, stages["rollout"].fits) == (("a",), 5, True)
    assert (stages["eval"].bytes, stages["eval"].fits) == (8, True)
    values = stages["values"]
    assert (values.bytes, values.fits) == (17, False)
    assert [(item.name, item.lower) for item in values.largest] == [("c", "less c"), ("a", "less a"), ("b", "less b")]
    [first, *_] = residency.stages_in(residency.Place("there", None), items)
    assert first.fits is None


def _estimate(smallest: Path, *sets: str, gpu_gib: float | None = None) -> Memory:
    recipe = load([smallest], [f"model.path={DEEPSEEK_7B}", *sets], {}).recipe
    decoder = decoder_of(json.loads((DEEPSEEK_7B / "config.json").read_text("utf-8")))
    assert decoder is not None
    return estimate(recipe, decoder, gpu_gib)


def test_a_gpu_holds_one_rank_of_each_role_and_a_machine_holds_all(smallest: Path) -> None:
    """Nothing is moved out: what is resident is so in every stage."""
    layout = "actor.parallel={tensor=2, data=2}"
    on_gpu = {item.name: item for item in _estimate(smallest, layout, gpu_gib=80.0).items}
    here = {item.name: item for item in _estimate(smallest, layout).items}
    for name in ("actor weights", "critic gradients", "actor optimizer"):
        assert here[name].bytes == 4 * on_gpu[name].bytes
        assert on_gpu[name].stages == residency.STAGES
    assert {"libraries", "object store", "samples and records"} <= set(here) - set(on_gpu)
    assert on_gpu["generator weights"].bytes + on_gpu["KV cache"].bytes == int(0.6 * 80 * 2**30)
    assert "reference" not in on_gpu
    assert "reference" in {item.name for item in _estimate(smallest, "ppo.kl={place='reward', coef=0.1}").items}


def test_stages_of_a_role_that_is_too_large_name_the_key(smallest: Path) -> None:
    memory = _estimate(smallest, gpu_gib=80.0)
    assert not any(stage.fits for stage in memory.stages)
    largest = memory.stages[0].largest[0]
    assert largest.name == "actor optimizer"
    assert largest.lower == "raise `actor.parallel.data` with `distributed_optimizer = true`"
    # More ranks on the same machine make nothing smaller; fewer copies do.
    here = [_estimate(smallest, f"actor.parallel={{data={copies}}}").stages[0].largest[0] for copies in (1, 2)]
    assert here[0].lower == "take more nodes (`cluster.ray_address`) or a smaller model"
    assert here[1].lower == "lower `actor.parallel.data`"
    of_nodes = _estimate(smallest, "cluster={kind='local', ray_address='a:1'}")
    assert of_nodes.place.bytes is None
    assert of_nodes.stages[0].fits is None
