"""Activations that attention and norms keep for the backward pass, and peak memory of attention.

Letters, in addition to those of `activations`: L tokens of a sequence, Q and K latent channels of queries and keys,
R channels with rotary embedding, V channels of the values of a head.

    attention, per token         on a CPU                            on a GPU
    plain                        4 (HD + GD + (H + 2G) D) / T        b (HD + GD + (H + 2G) D) / T
      of a bfloat16 model        4 (HD + 2 GD) / T
      output                     (4 HD + b HD + 4 H) / T             (b HD + 4 H) / T
    latent                       4 x 3 HD / T                        b x 3 HD / T
      output                     (4 HD + b HV + 4 H) / T             (b HD + b HV + 4 H) / T
    scores kept (with a cap)     b (2 HD + GD + (H + 2G) D) / T + L ((4 + 2 b) H / T + 1), on CPU and GPU
    a window below L             + 4 L                               + 4 L for a float32 model

- Values are a view of the fused projection, so the complete projection is kept. For a bfloat16 model, a CPU computes
  attention on float32 copies, and keeps these copies instead of the projection. On a CPU, the outputs of single
  sequences are kept in addition to their packed copy. Flash attention keeps one number per token and head instead of
  the scores. A float32 model on a GPU has no flash attention; its kernels are assumed to keep the same tensors as for
  bfloat16, with b = 4.
- Latent attention pads values to the width of keys (D = all channels of a head) and truncates the output. If values
  are narrower than keys, the padded values are a further copy.
- Context ranks gather the keys and values (GD each; HD with latent attention) of the K tokens that the tokens of a
  rank attend to. They keep the gathered keys and values, b x 2 GD K / T, instead of the keys and values of the rank
  and the fused projection.
- Attention with materialized scores keeps the weights in float32, a reordered copy, the tanh of the cap, and a mask.
- Flash attention does not compute what is outside of a window. Other kernels keep a mask in float32.
- RMSNorm of torch on a CPU consists of primitives, which keep the input and the normalized input in float32. The GPU
  kernel keeps the input in the dtype of the model (float32 for Gemma's norms). Both keep the reciprocal root of the
  mean square. Norms over heads are counted with attention.
"""

from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard

MLP_NORM = "pre_mlp_layernorm"
_HIDDEN_NORMS = ("input_layernorm", MLP_NORM)
MLP_POST_NORM = "mlp.linear_fc2.post_layernorm"
_POST_NORMS = ("self_attention.linear_proj.post_layernorm", MLP_POST_NORM)
_QUERY_NORM = "self_attention.q_layernorm"
_KEY_NORM = {False: "self_attention.k_layernorm", True: "self_attention.kv_layernorm"}
"""Whether attention is latent -> name of the norm of keys."""


def norm_bytes(shard: ModelShard, width: int, *, trains: bool, has_input: bool = True) -> int:
    """Return the bytes per token that one norm of this width keeps. `has_input`: whether its input has a gradient."""
    if not shard.on_gpu:
        return (has_input + trains) * 4 * width + 4 * has_input
    return (4 if shard.shape.norm_offset else shard.precision.weight) * width + 4


def norm_in_layer(shard: ModelShard, layer: int, name: str, width: int) -> int:
    """Return the bytes per token that the norm of this name in a layer keeps."""
    return norm_bytes(shard, width, trains=shard.has_gradient(layer, name))


def norms_bytes(shard: ModelShard, layer: int) -> int:
    """Return the bytes per token that the norms of a layer keep: over the hidden state, and over latents."""
    shape, weight = shard.shape, shard.precision.weight
    names = _HIDDEN_NORMS + _POST_NORMS * shape.post_norms
    total = sum(norm_in_layer(shard, layer, name, shape.hidden_size) for name in names)
    if shape.latent is not None:
        keys = norm_in_layer(shard, layer, _KEY_NORM[True], shape.latent.kv_rank)
        if shard.on_gpu or weight == 4:
            keys += weight * shape.latent.rope_dim  # the input of the norm is a view of latent and rotary key
        queries = shape.latent.query_rank
        total += keys + (norm_in_layer(shard, layer, _QUERY_NORM, queries) if queries else 0)
    return total // shard.shares


def _head_norms_bytes(shard: ModelShard, layer: int) -> int:
    """Return the bytes per token that the norms over heads of a layer keep on all tensor ranks together.

    On a GPU, and in float32, the input of the norm of keys is a view of the fused projection, which is counted with
    attention, or here if context ranks would drop it. If a rank has one group of heads, the input of the norm of
    queries is such a view, too. On a CPU, and in Gemma's norms, the input of a bfloat16 model is a copy in float32.
    """
    shape, weight = shard.shape, shard.precision.weight
    total = shape.num_heads * norm_in_layer(shard, layer, _QUERY_NORM, shape.head_dim)
    total += shape.num_kv_heads * norm_in_layer(shard, layer, _KEY_NORM[False], shape.head_dim)
    if weight < 4 and (shape.norm_offset or not shard.on_gpu):
        return total
    is_one_group = shape.num_kv_heads == shard.layout.tensor
    views = shape.key_channels + (shape.query_channels if is_one_group else 0)
    projection = (shape.query_channels + 2 * shape.key_channels) * (shard.layout.context > 1)
    return total + weight * (projection - views)


def norm_at_work(shard: ModelShard) -> int:
    """Return the peak bytes per token of a norm, without gradients.

    They are copies in float32 and, for a norm after attention, the inputs of attention.
    """
    shape, weight = shard.shape, shard.precision.weight
    copies = 2 * shape.norm_offset if shard.on_gpu else 2 + (weight < 4)
    total = copies * 4 * shape.hidden_size // shard.shares
    if shape.post_norms:
        total += weight * 2 * (shape.query_channels + shape.key_channels) // shard.layout.tensor
    return total


def attention_bytes(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the bytes that the attention of a layer keeps."""
    shape, weight = shard.shape, shard.precision.weight
    queries, values = shape.query_channels, shape.output_channels
    number = weight if shard.on_gpu else 4
    keeps_output = shard.has_gradient(layer, "self_attention.linear_proj")
    if shape.keeps_scores:
        total = batch.tokens * (1 + keeps_output) * weight * queries + _read_bytes(shard, batch)
        return total // shard.layout.tensor + batch.tokens * batch.longest * pair_bytes(shard)
    outputs = number * queries + 4 * shape.num_heads
    if shape.latent is not None:
        outputs += keeps_output * weight * values if values < queries or not shard.on_gpu else 0
    elif not shard.on_gpu:
        outputs += keeps_output * weight * values
    total = batch.tokens * (number * queries + outputs) + _read_bytes(shard, batch)
    if shape.qk_norm:
        total += batch.tokens * _head_norms_bytes(shard, layer)
    return total // shard.layout.tensor + 4 * batch.tokens * batch.longest * _has_mask(shard, batch, layer)


def pair_bytes(shard: ModelShard) -> int:
    """Return the bytes for each pair of tokens in a layer that keeps its attention scores.

    They are weights, a copy of the weights, the tanh of the cap, and a mask.
    """
    return shard.shape.num_heads * (4 + 2 * shard.precision.weight) // shard.layout.tensor + 1


def _has_mask(shard: ModelShard, batch: MicrobatchShape, layer: int) -> bool:
    """Return whether the attention of a layer keeps a mask of its window. It has none if no sequence is longer."""
    window = shard.shape.window(layer)
    return window is not None and window < batch.longest and (not shard.on_gpu or shard.precision.weight == 4)


def _read_bytes(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the bytes of keys and values that a layer keeps on all tensor ranks together.

    With context ranks, the layer keeps the gathered keys and values of all tokens. With latent attention, and for a
    bfloat16 model on a CPU, it keeps the copies that attention reads. Otherwise it keeps the keys, and the values
    inside the fused projection.
    """
    shape, weight = shard.shape, shard.precision.weight
    is_copied = not shard.on_gpu and weight < 4 and not shape.keeps_scores
    number = 4 if is_copied else weight
    if shape.latent is not None:
        return shard.keys_seen(batch) * number * 2 * shape.query_channels
    if shard.layout.context > 1 or is_copied:
        return shard.keys_seen(batch) * number * 2 * shape.key_channels
    return batch.tokens * weight * (shape.query_channels + 3 * shape.key_channels)


def attention_at_work(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the peak bytes of the attention of a layer, without gradients.

    Counted are the projections, the concatenated queries, queries and keys after rotary embedding, and the output.
    On a CPU, the outputs of single sequences and all outputs in float32 are added; for a bfloat16 model, the inputs
    in float32, too. Materialized scores add the scores of one sequence in a few copies, and a window adds the mask of
    one sequence, as bool and in float32. Context ranks add the gathered keys and values or, during the gathering, the
    keys and values of all ranks.
    """
    shape, weight, tokens = shard.shape, shard.precision.weight, batch.tokens
    queries, keys, values = shape.query_channels, shape.key_channels, shape.output_channels
    if shape.latent is None:
        numbers = weight * (3 * queries + (4 if shape.qk_norm else 3) * keys)
    else:
        plain = queries - shape.num_heads * shape.latent.rope_dim
        numbers = weight * (3 * queries + plain + values)
        keys = queries
    if shape.keeps_scores:
        copies = max(3 * weight, weight + 4 + (4 if weight < 4 and not shard.on_gpu else 0))
        outputs = batch.longest**2 * (copies * shape.num_heads + 2 * shard.layout.tensor) + tokens * weight * queries
    else:
        outputs = tokens * (4 * shape.num_heads + (weight if shard.on_gpu else 2 * 4) * queries)
        if not shard.on_gpu and weight < 4:
            outputs += 4 * (tokens * queries + shard.keys_seen(batch) * 2 * keys) + tokens * weight * queries
    if shard.layout.context > 1:
        all_tokens = tokens * (1 + shard.layout.context)
        outputs = 2 * weight * keys * shard.keys_seen(batch) + max(outputs, 2 * weight * keys * all_tokens)
    adapted = 3 * shard.adapted_output_bytes(layer, tokens, in_mlp=False)
    mask = 5 * batch.longest**2 * _has_mask(shard, batch, layer)
    return max(adapted, (tokens * numbers + outputs) // shard.layout.tensor + mask)
