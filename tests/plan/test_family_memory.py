"""Bytes of models of other families, computed by hand. tests/engines/megatron compares them with real engines."""

from dataclasses import replace

from plan.small_model import SMALL
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.cost import count_parameters, token_cost
from ppoctl.models.model import Model
from ppoctl.models.rope import Rope
from ppoctl.models.shape import ExpertShape, LatentShape, ModelShape, SigmoidRouting
from ppoctl.plan.memory import generator_memory
from ppoctl.plan.memory.activations import backward_bytes, forward_bytes, saved
from ppoctl.plan.memory.attention_memory import attention_at_work, norm_at_work
from ppoctl.plan.memory.parameter_memory import Parameters, rank_parameters
from ppoctl.plan.memory.pipeline import stages_of, whole_model
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision
from ppoctl.plan.memory.trainer_memory import Training, ranks_of
from ppoctl.recipe.schema import GeneratorTable

PLAIN = 2 * 128 + 2 * 64  # query and output 8 x 16 each, key and value 8 x 8 each
TABLE = 128 * 8  # 100 rows, padded to 128
MIXED = replace(SMALL, family="qwen3_moe", experts=ExpertShape(6, 2, 5, renormalise=False, layers=(False, True)))
LATENT = replace(
    SMALL,
    family="deepseek_v3",
    num_kv_heads=4,
    head_dim=6,
    latent=LatentShape(query_rank=3, kv_rank=5, nope_dim=4, rope_dim=2, value_dim=4, norm_eps=1e-6),
    experts=ExpertShape(
        6, 2, 5, renormalise=True, layers=(False, True), shared_ffn_hidden_size=7, sigmoid=SigmoidRouting(1, 1, 1.0)
    ),
)
CAPPED = replace(
    SMALL, family="gemma2", post_norms=True, norm_offset=True, logit_softcap=30.0, attention_softcap=50.0
)
BATCH = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)
ALONE = ParallelTable()


def test_parameters_of_ranks_with_experts() -> None:
    """Two layers with norms over heads of 4, the second with 6 experts of 3 x 8 x 5 and a router of 6 x 8."""
    both = whole_model(MIXED)
    rest = 2 * (PLAIN + 2 * 8 + 2 * 4) + 3 * 8 * 20 + 6 * 8 + 8 + 2 * TABLE
    assert rank_parameters(Model(MIXED, "token"), both, ALONE) == Parameters(rest, 6 * 120)
    split = ParallelTable(tensor=2, sequence=True)
    halves = 2 * (PLAIN // 2 + 2 * 8 + 2 * 4) + 3 * 8 * 20 // 2 + 6 * 8 + 8 + TABLE
    assert rank_parameters(Model(MIXED, "token"), both, split) == Parameters(halves, 6 * 120)  # whole experts
    for more in ({"expert": 2}, {"expert_tensor": 2}):
        layout = ParallelTable(tensor=2, sequence=True, **more)
        assert rank_parameters(Model(MIXED, "token"), both, layout) == Parameters(halves, 3 * 120)
    first, last = stages_of(MIXED, ParallelTable(pipeline=2))
    assert rank_parameters(Model(MIXED, "token"), first, ALONE).experts == 0
    assert rank_parameters(Model(MIXED, "value"), last, ALONE).experts == 6 * 120
    shared = replace(MIXED.experts, shared_ffn_hidden_size=7, shared_gate=True)
    beside = replace(MIXED, family="qwen2_moe", qkv_bias=True, experts=shared)
    # Three matrices and the gate; the biases of queries, keys and values in place of norms.
    more = 3 * 8 * 7 // 2 + 8 + 2 * (16 + 2 * 8) // 2 - 2 * 2 * 4
    assert rank_parameters(Model(beside, "token"), both, split).shared == halves + more
    assert token_cost(beside).flops_per_token == token_cost(MIXED).flops_per_token + 2 * 3 * 8 * 7


def test_expert_main_weights_are_split_over_ranks_with_same_experts() -> None:
    layout = ParallelTable(data=4, context=2, expert=4, distributed_optimizer=True)
    [rank] = ranks_of(Training(Model(MIXED, "token"), layout, Precision(2, "cpu"), BATCH, BATCH, 1))
    parameters = rank_parameters(Model(MIXED, "token"), whole_model(MIXED), layout)
    assert rank.weights == 2 * parameters.total
    assert rank.main_weights == 4 * (-(-parameters.shared // 8) + parameters.experts // 2)


def test_parameters_of_latent_attention() -> None:
    to_heads = 3 * 24 + 5 * (4 * 4 + 16) + 8 * 16  # queries; keys without position, values; output
    whole = 8 * 3 + 8 * (5 + 2) + 3 + 5 + 2 * 8  # to latents, and four norms
    mlp, experts = 3 * 8 * 20 + 3 * 8 * 7, 6 * 8
    rest = 2 * (to_heads + whole) + mlp + experts + 8 + 2 * TABLE
    assert rank_parameters(Model(LATENT, "token"), whole_model(LATENT), ALONE) == Parameters(rest, 6 * 120)
    split = rank_parameters(Model(LATENT, "token"), whole_model(LATENT), ParallelTable(tensor=2)).shared
    assert split == rest - to_heads - (mlp + 2 * TABLE) // 2
    direct = replace(LATENT, latent=replace(LATENT.latent, query_rank=None))
    assert count_parameters(direct) - count_parameters(LATENT) == 2 * (8 * 24 - 3 * 24 - 8 * 3 - 3)


def _part(shape: ModelShape, weight: int, device: str, layout: ParallelTable = ALONE) -> ModelShard:
    return ModelShard(Model(shape, "token"), layout, whole_model(shape), Precision(weight, device))


def test_saved_activations_of_latent_attention() -> None:
    activations = saved(_part(LATENT, 4, "cpu"), BATCH)
    # Norms over the hidden size, twice; over latents of 3 and 5, where the second is a view of 5 + 2.
    assert activations.norms == 10 * 2 * (2 * (8 * 8 + 4) + 8 * 3 + 4 + 8 * 5 + 4 + 4 * 2)
    assert activations.projections == 10 * 2 * 4 * (2 * 8 + 3 + 5)
    # Queries, keys, values with the same width, outputs; outputs that are read; one statistic per head.
    assert activations.attention == 10 * 2 * (4 * 4 * 24 + 4 * 16 + 4 * 4)
    assert activations.ends == 10 * (4 * 2 + 8 + 8 * 8 + 4) + 6 * (4 * 8 + 4 * 8 + 2 * 4)
    on_gpu = saved(_part(LATENT, 2, "gpu"), BATCH)
    assert on_gpu.attention == 10 * 2 * (2 * 4 * 24 + 2 * 16 + 4 * 4)
    assert on_gpu.norms == 10 * 2 * (2 * (2 * 8 + 4) + 2 * 3 + 4 + 2 * 5 + 4 + 2 * 2)
    split = saved(_part(LATENT, 4, "cpu", ParallelTable(tensor=2)), BATCH)
    assert (split.norms, split.attention) == (activations.norms, activations.attention // 2)


def test_saved_activations_of_experts() -> None:
    """One of two layers, in float32: products and copies of 4 bytes, scores of 6 experts, two indices and weights."""
    activations = saved(_part(LATENT, 4, "cpu"), BATCH)
    assert activations.mlp == 10 * 5 * 4 * 20
    routing = 6 * (4 + 4 + 4 + 1 + 1) + 2 * 8 + 4 * (2 + 1)
    copy = 4 * 8 + 6 * 4 * 5 + 4 + 8
    assert activations.experts == 10 * (5 * 4 * 7 + routing + 2 * copy)
    layout = ParallelTable(tensor=2, sequence=True, expert_tensor=2)
    split = saved(_part(LATENT, 4, "cpu", layout), BATCH)
    twice = 2 * (4 * 8 + 4) + 6 * 4 * 5 + 8  # the tokens of the other rank, with half of the columns
    assert split.experts == 10 * (5 * 4 * 7 // 2 + (routing + 2 * twice) // 2)
    in_bfloat16 = saved(_part(LATENT, 2, "cpu"), BATCH)
    # Sigmoids are computed in float32, on copies of the input and of the router's weight.
    assert in_bfloat16.projections == activations.projections // 2 + 4 * 8 * (10 + 6)
    # Recomputed with the experts.
    selective = saved(replace(_part(LATENT, 2, "cpu"), recompute="selective"), BATCH)
    assert (selective.experts, selective.projections) == (0, activations.projections // 2)
    by_softmax = replace(LATENT, experts=replace(LATENT.experts, sigmoid=None, renormalise=False))
    chosen = 6 * (4 + 2 + 2 + 1 + 1) + 2 * 8
    assert saved(_part(by_softmax, 2, "cpu"), BATCH).experts == 10 * (5 * 2 * 7 + chosen + 2 * (16 + 60 + 2 + 8))
    gated = replace(by_softmax, experts=replace(by_softmax.experts, shared_gate=True))
    more = saved(_part(gated, 2, "cpu"), BATCH).experts - saved(_part(by_softmax, 2, "cpu"), BATCH).experts
    assert more == 10 * 2 * (8 + 2)


def test_backward_bytes_of_experts() -> None:
    """Two copies of 10 tokens of 32 bytes: as sent, sorted, returned, in token order."""
    alone = replace(MIXED, experts=replace(MIXED.experts, layers=(True, True)))
    copies, hidden = 2 * 10 * 32, 10 * 32
    last_tokens = 2 * 10 * (6 * (1 + 4) + 2 * 8)  # of the last tokens of both layers
    tables = 10 * 4 * 4
    first = replace(_part(alone, 4, "gpu"), stage=replace(whole_model(alone), is_last=False))
    assert forward_bytes(first, BATCH) == 4 * hidden + 4 * copies + hidden + last_tokens + tables
    assert backward_bytes(first, BATCH) == 3 * copies + 2 * hidden + hidden
    exchanged = replace(first, layout=ParallelTable(data=2, expert=2))
    assert backward_bytes(exchanged, BATCH) == 4 * copies + 2 * hidden + hidden
    split = replace(first, layout=ParallelTable(data=2, expert_tensor=2))
    assert backward_bytes(split, BATCH) == (2 + 2 * 2) * copies + 2 * hidden + hidden


def test_unfused_attention_keeps_scores() -> None:
    """10 tokens, each with the 5 tokens of its sequence: the tanh of the cap, a softmax, a reordered copy, a mask."""
    activations = saved(_part(CAPPED, 4, "cpu"), BATCH)
    pairs = 10 * 2 * 5 * (4 * (4 + 4 + 4) + 1)
    # Queries in the order of heads, keys, the fused projection, the output.
    assert activations.attention == 10 * 2 * 4 * (16 + 8 + 32 + 16) + pairs
    assert activations.norms == 10 * 2 * 4 * (8 * 8 + 4)
    halves = saved(_part(CAPPED, 2, "gpu"), BATCH)
    assert halves.attention == 10 * 2 * 2 * (16 + 8 + 32 + 16) + 10 * 2 * 5 * (4 * (2 + 4 + 2) + 1)
    assert halves.norms == 10 * 2 * 4 * (4 * 8 + 4)  # their input is float32
    # The norm after an MLP is recomputed with it.
    selective = replace(_part(CAPPED, 4, "cpu"), recompute="selective")
    assert saved(selective, BATCH).norms == 10 * 2 * 3 * (8 * 8 + 4)
    assert backward_bytes(_part(CAPPED, 4, "cpu"), BATCH) == 3 * 4 * 400 + 6 * 4 * 8  # a third copy of logits


def test_window_keeps_a_mask_where_there_is_no_flash_attention() -> None:
    """10 tokens, each with the 5 tokens of its sequence. Only the first layer has a window that is shorter."""
    windows = replace(SMALL, windows=(3, 5), window_rope=Rope(10.0))
    for weight, device, mask in ((4, "cpu", 4), (2, "cpu", 4), (4, "gpu", 4), (2, "gpu", 0)):
        layers = [_part(shape, weight, device) for shape in (windows, SMALL)]
        found, plain = (saved(layer, BATCH) for layer in layers)
        assert found.attention - plain.attention == 10 * 5 * mask
        assert found.ends - plain.ends == 10 * weight * 4  # cosines and sines of the second RoPE
        peaks = [[attention_at_work(layer, BATCH, number) for layer in layers] for number in (0, 1)]
        assert [one - other for one, other in peaks] == [25 * (1 + 4) * (mask > 0), 0]


def test_norms_over_heads_keep_the_projection_that_context_ranks_drop() -> None:
    """4 query heads and 2 key heads of 4 channels. In float32, the input of the norm of keys is a view of the fused
    projection of 32 channels; with one group of heads, that of queries is a view, too."""
    normed = replace(SMALL, qk_norm=True)
    for layout, group, kept in ((ALONE, 2, -8), (ALONE, 1, -4 - 16), (ParallelTable(context=2), 2, 32 - 8)):
        shapes = [replace(shape, num_kv_heads=group) for shape in (normed, SMALL)]
        found, plain = (saved(_part(shape, 4, "gpu", layout), BATCH).attention for shape in shapes)
        assert found - plain == 10 * 2 * ((4 + group) * (4 * 4 + 4) + 4 * kept)
    # Gemma's norms copy their input to float32.
    shapes = [replace(shape, norm_offset=True) for shape in (normed, SMALL)]
    found, plain = (saved(_part(shape, 2, "gpu"), BATCH).attention for shape in shapes)
    assert found - plain == 10 * 2 * 6 * (4 * 4 + 4)


def test_attention_and_norm_work_bytes() -> None:
    """Without gradient: the fused projection, queries and keys, scores of one sequence of 5, the output."""
    size = attention_at_work(_part(CAPPED, 2, "gpu"), BATCH, 0)
    assert size == 10 * 2 * (3 * 16 + 3 * 8) + 25 * (3 * 2 * 4 + 2) + 10 * 2 * 16
    # In addition to the buffers of flash attention: the selected keys and values, while all keys and values exist.
    size = attention_at_work(_part(SMALL, 4, "gpu", ParallelTable(context=2)), BATCH, 0)
    assert size == 10 * 4 * (3 * 16 + 3 * 8) + 18 * 4 * 16 + (10 + 2 * 10) * 4 * 16
    # Queries twice, keys, and values padded to the width of keys; the output.
    size = attention_at_work(_part(LATENT, 2, "gpu"), BATCH, 0)
    assert size == 10 * (2 * (3 * 24 + 4 * 4 + 16) + 4 * 4 + 2 * 24)
    assert norm_at_work(_part(SMALL, 4, "cpu")) == 2 * 4 * 8
    assert norm_at_work(_part(SMALL, 2, "gpu")) == 0
    assert norm_at_work(_part(CAPPED, 2, "cpu")) == 3 * 4 * 8 + 2 * 2 * (16 + 8)
    assert norm_at_work(_part(CAPPED, 2, "gpu")) == 2 * 4 * 8 + 2 * 2 * (16 + 8)


def test_saved_activations_of_query_and_key_norms() -> None:
    """4 query and 2 key heads of 4 channels; in float32 the keys' input is in the fused projection."""
    normed = replace(SMALL, qk_norm=True)
    for weight, device, norms in (
        (4, "cpu", 6 * (8 * 4 + 4) - 4 * 8),
        (2, "cpu", 6 * (8 * 4 + 4)),
        (2, "gpu", 6 * (2 * 4 + 4) - 2 * 8),
    ):
        plain, with_norms = (saved(_part(model, weight, device), BATCH).attention for model in (SMALL, normed))
        assert with_norms == plain + 10 * 2 * norms
    split = ParallelTable(tensor=2)  # one group of heads each: queries are in the fused projection too
    plain, with_norms = (saved(_part(model, 4, "cpu", split), BATCH).attention for model in (SMALL, normed))
    assert with_norms == plain + 10 * 2 * (6 * (8 * 4 + 4) - 4 * 8 - 4 * 16) // 2


def test_context_ranks_gather_keys_and_values_in_estimate() -> None:
    """2 x 10 tokens in sequences of 5: each of the two chunks of a rank sees at most 4 tokens before it."""
    layout = ParallelTable(context=2)
    alone, split = (saved(_part(SMALL, 4, "cpu", of), BATCH) for of in (ALONE, layout))
    assert (split.norms, split.projections, split.mlp) == (alone.norms, alone.projections, alone.mlp)
    assert split.attention == 2 * (10 * 4 * (16 + 16 + 16 + 4) + 18 * 4 * 2 * 8)
    assert split.ends == alone.ends + 8 * 18 + 6 * 16  # positions; the grid of the other rank's positions
    long = replace(BATCH, longest=20)  # one sequence: chunks of 5 see 5 and 20, or 10 and 15
    assert saved(_part(SMALL, 2, "gpu", layout), long).attention == 2 * (10 * (2 * 2 * 16 + 16) + 25 * 2 * 2 * 8)
    of_latent = saved(_part(LATENT, 4, "cpu", layout), BATCH).attention
    assert of_latent == 2 * (10 * (4 * 24 + 4 * 24 + 4 * 16 + 16) + 18 * 4 * 2 * 24)


def test_engine_caches_latents_on_gpu() -> None:
    """Two layers of 5 + 2 channels, complete in each process; on a CPU, keys of all heads, and values of equal
    width."""
    table = GeneratorTable.model_validate({"gpu_memory_frac": 0.5, "kv_cache_mib": 3, "tensor": 2})
    on_gpu = generator_memory.generator_bytes(LATENT, 2, table, 10, 1e6)
    assert on_gpu.kv_tokens == on_gpu.kv_cache // (2 * 7 * 2)
    assert generator_memory.generator_bytes(LATENT, 2, table, 10).kv_tokens == 3 * 2**20 // (2 * 2 * 24 // 2 * 2)
    whole = rank_parameters(Model(LATENT, "token"), whole_model(LATENT), ALONE)
    halves = rank_parameters(Model(LATENT, "token"), whole_model(LATENT), ParallelTable(tensor=2)).shared
    assert on_gpu.weights == 2 * (halves + whole.experts // 2)


def test_buckets_contain_every_weight() -> None:
    experts = replace(MIXED.experts, shared_ffn_hidden_size=7, shared_gate=True)
    beside = replace(MIXED, family="qwen2_moe", qkv_bias=True, experts=experts)
    for shape in (LATENT, CAPPED, beside):
        bias = 6 if shape is LATENT else 0  # the router's bias, which is not a parameter
        buckets = generator_memory.bucket_bytes(shape, ParallelTable(pipeline=2), 4, 2**26)
        assert sum(buckets) == 4 * (count_parameters(shape) + bias)
