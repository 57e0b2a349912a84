"""Activations that attention and norms keep for the backward pass, and bytes that attention needs while it runs.

Letters, besides those of `activations`: L tokens of a sequence, Q and K latent channels behind queries and keys, R of
them turned, V channels of a head's values.

    attention, per token         on a CPU                            on a GPU
    plain                        4 (HD + GD + (H + 2G) D) / T        b (HD + GD + (H + 2G) D) / T
      of a bfloat16 model        4 (HD + 2 GD) / T
      output                     (4 HD + b HD + 4 H) / T             (b HD + 4 H) / T
    latent                       4 x 3 HD / T                        b x 3 HD / T
      output                     (4 HD + b HV + 4 H) / T             (b HD + b HV + 4 H) / T
    scores kept                  b (2 HD + GD + (H + 2G) D) / T + L (c H / T + 1), the same on both
      c                          4 + b, with a cap 4 + 2 b

- Values are a view of the fused projection, so the whole of it stays; of a bfloat16 model a CPU attends on float32
  copies, which stay instead. There the outputs of single sequences stay beside the packed copy of them. Flash
  attention keeps one number per token and head instead of the scores; a float32 model on a GPU has none, and what its
  kernels keep is not known here: taken as for bfloat16 with b = 4.
- Latent attention widens values to the width of keys (D = all of a head's channels), and cuts what comes out: where
  they are narrower that is another copy.
- Context ranks gather keys and values (GD each, of latent attention HD) of the K tokens that a rank's own see, and
  keep those, b x 2 GD K / T, in place of their own and of the fused projection.
- Written-out attention keeps weights in float32, beside them a copy in another order, the tanh of a cap, and a mask.
- torch's RMSNorm on a CPU is made of primitives, which keep the input and the normed input in float32; its GPU kernel
  keeps the input in the model's dtype (Gemma's norms hand it float32). All keep the reciprocal root of the mean
  square. Norms over heads are counted with attention.
"""

from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard


def norm_bytes(part: ModelShard, width: int) -> int:
    """Bytes per token that one norm of this width keeps."""
    if not part.on_gpu:
        return 2 * 4 * width + 4
    return (4 if part.shape.norm_offset else part.precision.weight) * width + 4


def norms_bytes(part: ModelShard) -> int:
    """Bytes per token that the norms of a layer keep: over the hidden state, and over latents."""
    shape, weight = part.shape, part.precision.weight
    total = shape.hidden_norms * norm_bytes(part, shape.hidden_size)
    if shape.latent is not None:
        keys = norm_bytes(part, shape.latent.kv_rank)
        if part.on_gpu or weight == 4:
            keys += weight * shape.latent.rope_dim  # the input is a view of both
        queries = shape.latent.query_rank
        total += keys + (norm_bytes(part, queries) if queries else 0)
    return total // part.shares


def _head_norms_bytes(part: ModelShard) -> int:
    """Bytes per token that a layer's norms over heads keep on all tensor ranks together. On a GPU, and in float32,
    the keys' input is a view of the fused projection, which is counted; so is the queries' where a rank has one group
    of heads."""
    shape, weight = part.shape, part.precision.weight
    total = (shape.num_heads + shape.num_kv_heads) * norm_bytes(part, shape.head_dim)
    if not part.on_gpu and weight < 4:
        return total
    is_one_group = shape.num_kv_heads == part.layout.tensor
    return total - weight * (shape.key_channels + (shape.query_channels if is_one_group else 0))


def norm_at_work(part: ModelShard) -> int:
    """Bytes per token of a norm at work, without gradient: copies in float32; behind attention also what its output
    was made of."""
    shape, weight = part.shape, part.precision.weight
    copies = 2 * shape.norm_offset if part.on_gpu else 2 + (weight < 4)
    total = copies * 4 * shape.hidden_size // part.shares
    if shape.post_norms:
        total += weight * 2 * (shape.query_channels + shape.key_channels) // part.layout.tensor
    return total


def attention_bytes(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Bytes that the attention of a layer keeps."""
    shape, weight = part.shape, part.precision.weight
    queries, values = shape.query_channels, shape.output_channels
    number = weight if part.on_gpu else 4
    if shape.keeps_scores(layer):
        total = batch.tokens * 2 * weight * queries + _read_bytes(part, batch, layer)
        return total // part.layout.tensor + batch.tokens * batch.longest * pair_bytes(part)
    outputs = number * queries + 4 * shape.num_heads
    if shape.latent is not None:
        outputs += weight * values if values < queries or not part.on_gpu else 0
    elif not part.on_gpu:
        outputs += weight * values
    total = batch.tokens * (number * queries + outputs) + _read_bytes(part, batch, layer)
    if shape.qk_norm:
        total += batch.tokens * _head_norms_bytes(part)
    return total // part.layout.tensor


def pair_bytes(part: ModelShard) -> int:
    """Bytes that a layer which keeps its scores keeps of each two tokens of a sequence: weights, their copy, the tanh
    of a cap, and a mask."""
    copies = 1 + (part.shape.attention_softcap is not None)
    return part.shape.num_heads * (4 + part.precision.weight * copies) // part.layout.tensor + 1


def _read_bytes(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Bytes of the keys and values that a layer keeps on all tensor ranks together: all tokens that are read, where
    context ranks gather them; in latent attention, and in a bfloat16 model on a CPU, the copies that are attended to;
    else keys, and values inside the fused projection."""
    shape, weight = part.shape, part.precision.weight
    is_copied = not part.on_gpu and weight < 4 and not shape.keeps_scores(layer)
    number = 4 if is_copied else weight
    if shape.latent is not None:
        return part.keys_seen(batch) * number * 2 * shape.query_channels
    if part.layout.context > 1 or is_copied:
        return part.keys_seen(batch) * number * 2 * shape.key_channels
    return batch.tokens * weight * (shape.query_channels + 3 * shape.key_channels)


def attention_at_work(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Peak bytes of a layer's attention, without gradient: the projections, queries laid together, both rotated; the
    output. On a CPU outputs of single sequences and all of them in float32, in a bfloat16 model beside float32
    inputs. Where attention is written out, the scores of one sequence in a few copies. Keys and values that context
    ranks gather, or while they do those of all."""
    shape, weight, tokens = part.shape, part.precision.weight, batch.tokens
    queries, keys, values = shape.query_channels, shape.key_channels, shape.output_channels
    if shape.latent is None:
        numbers = weight * (3 * queries + (4 if shape.qk_norm else 3) * keys)
    else:
        plain = queries - shape.num_heads * shape.latent.rope_dim
        numbers = weight * (3 * queries + plain + values)
        keys = queries
    if shape.keeps_scores(layer):
        copies = max(3 * weight, weight + 4 + (4 if weight < 4 and not part.on_gpu else 0))
        outputs = batch.longest**2 * (copies * shape.num_heads + 2 * part.layout.tensor) + tokens * weight * queries
    else:
        outputs = tokens * (4 * shape.num_heads + (weight if part.on_gpu else 2 * 4) * queries)
        if not part.on_gpu and weight < 4:
            outputs += 4 * (tokens * queries + part.keys_seen(batch) * 2 * keys) + tokens * weight * queries
    if part.layout.context > 1:
        of_all = tokens * (1 + part.layout.context)
        outputs = 2 * weight * keys * part.keys_seen(batch) + max(outputs, 2 * weight * keys * of_all)
    return (tokens * numbers + outputs) // part.layout.tensor
