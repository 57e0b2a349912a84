"""Activations that a forward pass keeps for its backward pass, term by term in the order of the layers.

Letters: N packed tokens of a microbatch, n of which the output layer reads, h hidden size, F width of the MLP,
H query heads and G key/value heads of D channels each. T tensor ranks, S ranks that split norms and residuals (S = T
with sequence parallelism, else 1), b bytes of a number of the model.

    a layer, per token      on a CPU                            on a GPU
    two norms               2 (2 x 4 h + 4) / S                 2 (b h + 4) / S
    inputs of projections   2 b h / S                           2 b h / S
    attention               `attention`
    MLP or experts          `mlp`

- A frozen projection without an adapter keeps no input, and a frozen norm on a CPU keeps 4 h + 4. An adapter keeps
  the input of the projection and what `gradients` describes.
- A layer of Gemma has four norms. Norms over heads, norms over latents, and the projections after these norms are
  added. A router with sigmoids keeps a float32 copy of its input.
- With `recompute = "selective"`, the line of the MLP or the experts is dropped, and the norm before experts. With
  `"full"`, all lines are dropped and the input of the layer, b h / S, is kept. The backward pass recomputes dropped
  activations layer by layer.
"""

from dataclasses import replace

from ppoctl.plan.memory import attention_memory, mlp
from ppoctl.plan.memory.parameter_memory import FINAL_NORM, VALUE_HEAD_NORM, trunk_end
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, SavedActivations

_FIRST_PROJECTIONS = tuple(
    f"self_attention.linear_{name}" for name in ("qkv", "q_proj", "q_down_proj", "kv_down_proj")
)
"""Projections of attention whose input is the hidden state."""
"""Projections with the input of the MLP. Experts have copies of it."""

BLOCK_LOGITS = {"cpu": 2**19, "gpu": 2**26}
"""Device -> number of logits that are converted to float32 at a time (`engines.megatron.logit_blocks`)."""
BLOCK_COPIES = 2
"""Float32 copies of a block of logits that exist at one time."""
FILTER_BYTES = 5
"""Further bytes for each logit of a block while top-p searches for the last token id to keep: a third float32 copy,
and a bool (`engines.megatron.filters`)."""


def saved(shard: ModelShard, batch: MicrobatchShape) -> SavedActivations:
    """Return the bytes that one microbatch keeps in the layers of this shard until its backward pass."""
    shape, tokens, layers = shard.shape, batch.tokens, shard.stage.layers
    moe_layers = [layer for layer in layers if shape.has_experts(layer)]
    dense_layers = [layer for layer in layers if not shape.has_experts(layer)]
    ends = tokens * _rope_tables(shard)
    if shard.layout.context > 1:
        ends += 8 * shard.keys_seen(batch)  # positions of the keys
    if shard.stage.is_first:
        ends += 8 * tokens
    if shard.stage.is_last:
        ends += tokens * _final_norm(shard) + batch.read * _read(shard) + _converted_weights(shard)
    shared_input = tokens * shard.hidden_bytes * _copy_shares_input(shard)
    total = SavedActivations(
        norms=tokens * sum(attention_memory.norms_bytes(shard, layer) for layer in layers) - shared_input,
        projections=sum(_projections(shard, batch, layer) for layer in layers),
        attention=sum(attention_memory.attention_bytes(shard, batch, layer) for layer in layers),
        mlp=tokens * sum(mlp.mlp_bytes(shard, layer) for layer in dense_layers),
        experts=tokens * sum(mlp.experts_bytes(shard, layer) for layer in moe_layers),
        ends=ends,
        logits=_chunk(shard, batch) * shard.precision.weight,
        adapters=_adapters(shard, batch, in_mlp=False) + _adapters(shard, batch, in_mlp=True),
    )
    if shard.recompute == "none":
        return total
    if shard.recompute == "full":
        inputs = len(layers) * tokens * shard.hidden_bytes - shared_input
        return SavedActivations(
            norms=0, projections=0, attention=0, mlp=0, experts=0, ends=ends, logits=total.logits, inputs=inputs
        )
    norms = [(layer, attention_memory.MLP_POST_NORM) for layer in dense_layers if shape.post_norms]
    norms += [(layer, attention_memory.MLP_NORM) for layer in moe_layers]
    recomputed = sum(attention_memory.norm_in_layer(shard, *norm, shape.hidden_size) for norm in norms)
    routers = sum(_router_input(shard, batch, layer) for layer in moe_layers)
    return replace(
        total,
        norms=total.norms - tokens * recomputed // shard.shares,
        projections=total.projections - routers,
        mlp=0,
        experts=0,
        adapters=_adapters(shard, batch, in_mlp=False),
    )


def backward_bytes(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the peak bytes in addition to the kept activations, late in the forward or early in the backward pass.

    The peak is in the output layer, in the final norm (on a CPU three float32 numbers and a gradient), or in a layer.
    In a layer, the activations of output layer and final norm have already been released.
    """
    weight, layers = shard.precision.weight, shard.stage.layers
    layer = _layer_at_work(shard, batch) if layers else 0
    if not shard.stage.is_last:
        # The output of the rank, which was sent to the next rank, is still in memory.
        return layer + batch.tokens * shard.hidden_bytes if layers else 0
    copies = 3 * 4 if not shard.on_gpu else weight
    norm = batch.tokens * (weight + copies) * shard.shape.hidden_size // shard.shares
    released = batch.tokens * _final_norm(shard) + batch.read * _read(shard) + _chunk(shard, batch) * weight
    return max(layer - released, norm, _head_at_work(shard, batch))


def gather_bytes(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the bytes of the buffer in which sequence parallelism gathers projection inputs. It is never freed if
    the projections train. Inputs of frozen projections are freed after the product."""
    return batch.tokens * shard.precision.weight * shard.shape.hidden_size if shard.shares > 1 else 0


def forward_bytes(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the peak bytes of a pass without gradients.

    The peak is in attention, in an MLP or a norm, or in the output layer. During attention, the inputs of the
    pipeline stage and the layer and the output of the norm are in memory. During an MLP or a norm, the output of
    attention is in memory, too.
    """
    shape, weight, tokens = shard.shape, shard.precision.weight, batch.tokens
    hidden = tokens * shard.hidden_bytes
    tables = tokens * _rope_tables(shard)
    widest = [3 * hidden + attention_memory.attention_at_work(shard, batch, layer) for layer in _kinds(shard)]
    widest += [4 * hidden + mlp.forward_bytes(shard, batch, layer) for layer in _kinds(shard)]
    layer = max(*widest, 4 * hidden + tokens * attention_memory.norm_at_work(shard)) + tables
    if not shard.stage.is_last:
        return layer
    head = tokens * weight * shape.hidden_size + tables + _chunk(shard, batch) * weight
    return max(layer, head + _head_at_work(shard, batch))


def _rope_tables(shard: ModelShard) -> int:
    """Return the bytes per token of cosines and sines."""
    return len(shard.shape.ropes) * shard.precision.weight * shard.shape.rope_dim


def _kinds(shard: ModelShard) -> list[int]:
    """Return the last layer of each kind in the shard. Kinds differ in experts and in their windows."""
    shape = shard.shape
    last_of_kind = {(shape.has_experts(layer), shape.window(layer)): layer for layer in shard.stage.layers}
    return list(last_of_kind.values())


def _layer_at_work(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the peak bytes of a layer in addition to the kept activations.

    Without recomputation, the peak is in the last layer. Otherwise it is in the layer that needs most memory.
    """
    if shard.recompute == "none":
        return mlp.update_bytes(shard, batch, shard.stage.layers[-1])
    return max(mlp.update_bytes(shard, batch, layer) + _recomputed(shard, batch, layer) for layer in _kinds(shard))


def _recomputed(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the bytes that the backward pass of a layer recomputes before it computes the gradients of the layer."""
    stage = replace(shard.stage, layers=(layer,), is_first=False, is_last=False)
    all_kept = saved(replace(shard, stage=stage, recompute="none"), batch)
    if shard.recompute == "full":
        return all_kept.total - all_kept.ends
    return all_kept.total - saved(replace(shard, stage=stage), batch).total


def beside_bytes(shard: ModelShard, batch: MicrobatchShape, microbatches: int) -> int:
    """Return the bytes of the reference outputs for the full KL.

    They are a second chunk of logits, and the hidden states at the read positions of all these microbatches.
    """
    if not shard.stage.is_last:
        return 0
    weight = shard.precision.weight
    return _chunk(shard, batch) * weight + microbatches * batch.read * shard.shape.hidden_size * weight


def _projections(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the bytes of the inputs of a layer's projections."""
    latent, has_experts = shard.shape.latent, shard.shape.has_experts(layer)
    # The backward pass recomputes an MLP from its input.
    keeps_second = shard.recompute == "selective" or shard.has_gradient(layer, *_projections_of_mlp(shard, layer))
    numbers = (shard.has_gradient(layer, *_FIRST_PROJECTIONS) + keeps_second) * shard.shape.hidden_size
    if latent is not None:
        numbers += shard.has_gradient(layer, "self_attention.linear_kv_up_proj") * latent.kv_rank
        numbers += shard.has_gradient(layer, "self_attention.linear_q_up_proj") * (latent.query_rank or 0)
    total = batch.tokens * shard.precision.weight * numbers // shard.shares
    return total + (_router_input(shard, batch, layer) if has_experts else 0)


def _projections_of_mlp(shard: ModelShard, layer: int) -> tuple[str, ...]:
    """Return the names of the parameters that are multiplied with the input of an MLP. Experts have copies of it."""
    experts = shard.shape.experts
    if experts is None or not shard.shape.has_experts(layer):
        return ("mlp.linear_fc1",)
    return ("mlp.router", *(["mlp.shared_experts.linear_fc1"] if experts.shared_width else []))


def _adapters(shard: ModelShard, batch: MicrobatchShape, *, in_mlp: bool) -> int:
    """Return the bytes that adapters keep in addition to their inputs, in attention or in the MLPs."""
    return sum(shard.adapter_bytes(layer, batch.tokens, in_mlp=in_mlp) for layer in shard.stage.layers)


def _router_input(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the bytes of the float32 copies that a sigmoid router makes of its input and weight; 0 in float32. A
    frozen router keeps the copy of its weight."""
    experts = shard.shape.experts
    if experts is None or experts.sigmoid is None or shard.precision.weight == 4:
        return 0
    tokens = batch.tokens // shard.shares * shard.has_gradient(layer, "mlp.router")
    return 4 * shard.shape.hidden_size * (tokens + experts.count)


def _final_norm(shard: ModelShard) -> int:
    """Return the bytes per token that the final norm keeps, and its copy in a value head with copied layers. The
    input of the norm has no gradient if all layers are frozen; that of the copy always has one."""
    has_input = {FINAL_NORM: trunk_end(shard.model) < shard.shape.num_layers}
    if shard.model.value_head is not None and shard.model.value_head.layers_copied > 0:
        has_input[VALUE_HEAD_NORM] = True
    trains = {name: shard.model.trains(name) for name in has_input}
    width = shard.shape.hidden_size
    norms = (
        attention_memory.norm_bytes(shard, width, trains=trains[name], has_input=has_input[name]) for name in trains
    )
    return sum(norms) // shard.shares


def _read(shard: ModelShard) -> int:
    """Return the bytes per read position that the output layer keeps in addition to the logits."""
    # The index of the position, and for the positions of all context ranks, row and column in the response grid.
    places = 8 + 2 * 8 * shard.layout.context
    if shard.model.head == "value":
        return 4 * shard.shape.hidden_size + places
    ids_and_statistics = 8 + 2 * 4
    numbers = shard.precision.weight * shard.shape.hidden_size + places + ids_and_statistics
    return numbers + _read_by_value_head(shard)


def _read_by_value_head(shard: ModelShard) -> int:
    """Return the bytes per read position that a value head on the policy's model keeps: its input in float32, which
    is a copy unless it is what a float32 output layer reads, and the hidden layer of an mlp."""
    head, hidden = shard.model.value_head, 4 * shard.shape.hidden_size
    if head is None:
        return 0
    is_copy = head.layers_copied > 0 or shard.precision.weight < 4
    return is_copy * hidden + (2 * hidden if head.kind == "mlp" else 0)


def _converted_weights(shard: ModelShard) -> int:
    """Return the bytes of the float32 copy of the weights of an mlp on the policy's model; 0 in float32."""
    head = shard.model.value_head
    has_copy = head is not None and head.kind == "mlp" and shard.precision.weight < 4
    return has_copy * 4 * 2 * shard.shape.hidden_size**2


def _copy_shares_input(shard: ModelShard) -> bool:
    """Return whether the first copied layer of a value head keeps the same tensor as the layer that it is a copy of:
    the hidden states that enter both, unless the norms of both convert them to float32."""
    if shard.model.value_head is None or shard.model.value_head.layers_copied == 0:
        return False
    is_kept_twice = shard.stage.layers.count(shard.shape.num_layers - shard.model.value_head.layers_copied) > 1
    return is_kept_twice and (shard.on_gpu or shard.precision.weight == 4 or shard.recompute == "full")


def _chunk(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the number of logits that exist at one time."""
    if shard.model.head == "value" or not shard.stage.is_last:
        return 0
    return min(batch.logits_chunk, batch.read) * shard.logit_rows


def _head_at_work(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the peak bytes of the output layer.

    They are float32 copies of a block of logits and, for each number of the hidden states that are read, one number:
    the number itself or its gradient.
    """
    number = 4 if shard.model.head == "value" else shard.precision.weight
    block = min(BLOCK_LOGITS[shard.precision.device], _chunk(shard, batch))
    copies = BLOCK_COPIES + (shard.shape.logit_softcap is not None)
    return (copies * 4 + shard.filtered * FILTER_BYTES) * block + batch.read * number * shard.shape.hidden_size
