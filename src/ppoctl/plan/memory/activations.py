"""Activations that a forward pass keeps for its backward pass, term by term as the layers are written.

Letters: N packed tokens of a microbatch, n of them read by the output layer, h hidden size, F width of the MLP,
H and G query and key/value heads of D channels, T tensor ranks (with sequence parallelism they split norms and
residuals too: then S = T, else S = 1), b bytes of a number of the model.

    a layer, per token      on a CPU                            on a GPU
    two norms               2 (2 x 4 h + 4) / S                 2 (b h + 4) / S
    inputs of projections   2 b h / S                           2 b h / S
    attention               `attention`
    MLP or experts          `mlp`

- There are four norms in a layer of Gemma's. Norms over heads come on top, as do norms over latents and the products
  behind those; a router that chooses by sigmoids keeps a float32 copy of its input.
- Recomputed (`recompute`): selective drops the MLP's line, or the experts'; full drops all of them and keeps b h / S,
  a layer's input. The backward pass makes what was dropped once more, layer by layer.
"""

from dataclasses import replace

from ppoctl.plan.memory import attention, mlp
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, SavedActivations

BLOCK_LOGITS = {"cpu": 2**19, "gpu": 2**26}
"""Logits taken to float32 at a time (`engines.megatron.logprobs`), by device."""
BLOCK_COPIES = 2
"""Float32 copies of a block of logits that exist at one time."""
FILTER_BYTES = 5
"""Bytes for each logit of a block beside those while the last id that is kept is looked for: a third copy, and a bit
in a byte (`engines.megatron.filters`)."""


def saved(part: ModelShard, batch: MicrobatchShape) -> SavedActivations:
    """Bytes that one microbatch keeps in the layers of this part until its backward pass."""
    shape, tokens = part.shape, batch.tokens
    layers = part.stage.layers
    mixed = [layer for layer in layers if shape.has_experts(layer)]
    dense = len(layers) - len(mixed)
    ends = tokens * part.precision.weight * shape.rope_dim  # cosine and sine
    if part.layout.context > 1:
        ends += 8 * part.keys_seen(batch)  # where they are
    if part.stage.is_first:
        ends += 8 * tokens
    if part.stage.is_last:
        ends += tokens * _final_norm(part) + batch.read * _read(part)
    found = SavedActivations(
        norms=len(layers) * tokens * attention.norms_bytes(part),
        projections=sum(_projections(part, batch, layer) for layer in layers),
        attention=sum(attention.attention_bytes(part, batch, layer) for layer in layers),
        mlp=dense * tokens * mlp.mlp_bytes(part, shape.ffn_hidden_size),
        experts=tokens * sum(mlp.experts_bytes(part) for _ in mixed),
        ends=ends,
        logits=_chunk(part, batch) * part.precision.weight,
    )
    if part.recompute == "none":
        return found
    if part.recompute == "full":
        inputs = len(layers) * tokens * part.hidden_bytes
        return SavedActivations(
            norms=0, projections=0, attention=0, mlp=0, experts=0, ends=ends, logits=found.logits, inputs=inputs
        )
    behind = dense * tokens * attention.norm_bytes(part, shape.hidden_size) // part.shares if shape.post_norms else 0
    routers = sum(_router_input(part, batch) for _ in mixed)
    return replace(found, norms=found.norms - behind, projections=found.projections - routers, mlp=0, experts=0)


def backward_bytes(part: ModelShard, batch: MicrobatchShape) -> int:
    """Peak bytes beyond what is kept, late in the forward or early in the backward pass: in the output layer, in the
    final norm (on a CPU three float32 numbers beside a gradient), or in a layer (those of the end are not there
    then)."""
    weight = part.precision.weight
    layer = _layer_at_work(part, batch)
    if not part.stage.is_last:
        return layer + batch.tokens * part.hidden_bytes  # what was sent on is still there too
    copies = 3 * 4 if not part.on_gpu else weight
    norm = batch.tokens * (weight + copies) * part.shape.hidden_size // part.shares
    gone = batch.tokens * _final_norm(part) + batch.read * _read(part) + _chunk(part, batch) * weight
    return max(layer - gone, norm, _head_at_work(part, batch))


def gather_bytes(part: ModelShard, batch: MicrobatchShape) -> int:
    """Bytes of Megatron-Core's buffer in which sequence parallelism gathers the inputs of projections; it stays."""
    return batch.tokens * part.precision.weight * part.shape.hidden_size if part.shares > 1 else 0


def forward_bytes(part: ModelShard, batch: MicrobatchShape) -> int:
    """Peak bytes of a pass without gradient: in attention (beside the stage's input, the layer's and its norm), in an
    MLP or a norm (these, with what attention made of them), or in the output layer."""
    shape, weight, tokens = part.shape, part.precision.weight, batch.tokens
    hidden = tokens * part.hidden_bytes
    tables = tokens * weight * shape.rope_dim
    widest = [3 * hidden + attention.attention_at_work(part, batch, layer) for layer in _kinds(part)]
    widest += [4 * hidden + mlp.forward_bytes(part, batch, layer) for layer in _kinds(part)]
    layer = max(*widest, 4 * hidden + tokens * attention.norm_at_work(part)) + tables
    if not part.stage.is_last:
        return layer
    head = tokens * weight * shape.hidden_size + tables + _chunk(part, batch) * weight
    return max(layer, head + _head_at_work(part, batch))


def _kinds(part: ModelShard) -> list[int]:
    """The last layer of each kind that the part has."""
    shape = part.shape
    alike = {(shape.has_experts(layer), shape.keeps_scores(layer)): layer for layer in part.stage.layers}
    return list(alike.values())


def _layer_at_work(part: ModelShard, batch: MicrobatchShape) -> int:
    """Peak bytes of a layer beyond what is kept: the last layer's, or, where layers are computed again in the
    backward pass, those of the layer that takes most."""
    if part.recompute == "none":
        return mlp.update_bytes(part, batch, part.stage.layers[-1])
    return max(mlp.update_bytes(part, batch, layer) + _made_again(part, batch, layer) for layer in _kinds(part))


def _made_again(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Bytes that the backward pass of a layer computes again, all of them before it goes back through the layer."""
    stage = replace(part.stage, layers=(layer,), is_first=False, is_last=False)
    whole = saved(replace(part, stage=stage, recompute="none"), batch)
    if part.recompute == "full":
        return whole.total - whole.ends
    return whole.total - saved(replace(part, stage=stage), batch).total


def beside_bytes(part: ModelShard, batch: MicrobatchShape, microbatches: int) -> int:
    """Bytes of the reference where the whole KL from it is taken: a second chunk of logits, and the hidden states of
    the positions read in all these microbatches."""
    if not part.stage.is_last:
        return 0
    weight = part.precision.weight
    return _chunk(part, batch) * weight + microbatches * batch.read * part.shape.hidden_size * weight


def _projections(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Bytes of the inputs of a layer's projections."""
    latent = part.shape.latent
    numbers = 2 * part.shape.hidden_size + (0 if latent is None else latent.kv_rank + (latent.query_rank or 0))
    total = batch.tokens * part.precision.weight * numbers // part.shares
    return total + (_router_input(part, batch) if part.shape.has_experts(layer) else 0)


def _router_input(part: ModelShard, batch: MicrobatchShape) -> int:
    """Bytes of the float32 copies that a sigmoid router takes of its input and its weight; 0 in a float32 model."""
    experts = part.shape.experts
    if experts is None or experts.sigmoid is None or part.precision.weight == 4:
        return 0
    return 4 * part.shape.hidden_size * (batch.tokens // part.shares + experts.count)


def _final_norm(part: ModelShard) -> int:
    """Bytes per token that the final norm keeps."""
    return attention.norm_bytes(part, part.shape.hidden_size) // part.shares


def _read(part: ModelShard) -> int:
    """Bytes per position read that the output layer keeps besides logits."""
    # Where the position is; of all context ranks' its row and column of the response grid.
    places = 8 + 2 * 8 * part.layout.context
    if part.role == "critic":
        return 4 * part.shape.hidden_size + places
    ids_and_statistics = 8 + 2 * 4
    return part.precision.weight * part.shape.hidden_size + places + ids_and_statistics


def _chunk(part: ModelShard, batch: MicrobatchShape) -> int:
    """Logits of one chunk, which exist at one time."""
    if part.role == "critic" or not part.stage.is_last:
        return 0
    return min(batch.logits_chunk, batch.read) * part.logit_rows


def _head_at_work(part: ModelShard, batch: MicrobatchShape) -> int:
    """Bytes of the output layer at work: float32 copies of some logits, and one number for each hidden number read,
    which is that number or its gradient."""
    number = 4 if part.role == "critic" else part.precision.weight
    block = min(BLOCK_LOGITS[part.precision.device], _chunk(part, batch))
    copies = BLOCK_COPIES + (part.shape.logit_softcap is not None)
    return (copies * 4 + part.filtered * FILTER_BYTES) * block + batch.read * number * part.shape.hidden_size
