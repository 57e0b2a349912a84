"""What a forward pass keeps for its backward pass, term by term as the layers are written.

Letters: N packed tokens of a microbatch, n of them read by the output layer, h hidden size, F width of the MLP,
H and G query and key/value heads of D channels, T tensor ranks (with sequence parallelism they split norms and
residuals too: then S = T, else S = 1), b bytes of a number of the model.

    a layer, per token      on a CPU                            on a GPU
    two norms               2 (2 x 4 h + 4) / S                 2 (b h + 4) / S
    inputs of projections   2 b h / S                           2 b h / S
    queries, keys, values   4 (HD + GD + (H + 2G) D) / T        b (HD + GD + (H + 2G) D) / T
      of a bfloat16 model   4 (HD + 2 GD) / T
    attention's output      (4 HD + b HD + 4 H) / T             (b HD + 4 H) / T
    gated MLP               5 b F / T                           5 b F / T

- torch's RMSNorm on a CPU is made of primitives, which keep the input and the normed input in float32; its GPU kernel
  keeps the input in the model's dtype. Both keep the reciprocal root of the mean square.
- Values are a view of the fused projection, so the whole of it stays; of a bfloat16 model a CPU attends on float32
  copies, which stay instead. There the outputs of single sequences stay beside the packed copy of them. Flash
  attention keeps one number per token and head instead of the scores; a float32 model on a GPU has none, and what its
  kernels keep is not known here: taken as for bfloat16 with b = 4.
- The MLP keeps gate and up (2F), silu of the gate, up (a copy: Megatron-Core adds an offset of 0 to it), the product.
- Recomputed (`recompute`): selective drops the MLP's line; full drops all of them and keeps b h / S, a layer's input.
  The backward pass makes what was dropped once more, layer by layer.
"""

from dataclasses import dataclass, replace

from ppoctl.recipe.memory.decoder import Decoder, Stage
from ppoctl.recipe.parallel import ParallelTable
from ppoctl.recipe.schema import Recompute

BLOCK_LOGITS = {"cpu": 2**19, "gpu": 2**26}
"""Logits taken to float32 at a time (`engines.megatron.logprobs`), in so many copies:"""
BLOCK_COPIES = 2


@dataclass(frozen=True)
class Precision:
    """Where and in what a model computes."""

    weight: int
    """Bytes of a weight: 4 for float32, 2 for bfloat16."""
    device: str
    """cpu or gpu."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a model."""

    decoder: Decoder
    role: str
    """actor or critic."""
    layout: ParallelTable
    stage: Stage
    """The layers it has: all of the rank's, or one run of them where stages are interleaved."""
    precision: Precision
    recompute: Recompute = "none"

    @property
    def shares(self) -> int:
        """Ranks that split norms and residuals."""
        return self.layout.tensor if self.layout.sequence else 1

    @property
    def logit_rows(self) -> int:
        """Ids whose logits the first tensor rank computes; padding is not."""
        return min(self.decoder.vocab, self.decoder.padded_vocab // self.layout.tensor)


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward pass of a rank."""

    tokens: int
    read: int
    """Positions whose output is read: those that predict a response token."""
    logits_chunk: int
    """Positions whose logits exist at one time."""


@dataclass(frozen=True)
class Kept:
    """Bytes that one microbatch keeps on a rank until its backward pass."""

    norms: int
    projections: int
    """Inputs of the query-key-value and of the gate-up projection."""
    attention: int
    mlp: int
    ends: int
    """Token ids, rotary tables, final norm, positions read."""
    logits: int
    """One chunk of them."""
    inputs: int = 0
    """Of layers that are computed again from them."""

    @property
    def total(self) -> int:
        in_layers = self.norms + self.projections + self.attention + self.mlp + self.inputs
        return in_layers + self.ends + self.logits


def kept(part: Part, batch: Microbatch) -> Kept:
    """Of one microbatch in these layers."""
    decoder, weight = part.decoder, part.precision.weight
    layers = part.stage.layers * batch.tokens
    inputs = weight * decoder.hidden // part.shares
    ends = batch.tokens * weight * decoder.head_dim  # cosine and sine
    if part.stage.is_first:
        ends += 8 * batch.tokens
    if part.stage.is_last:
        ends += batch.tokens * _norm(part) // part.shares + batch.read * _read(part)
    found = Kept(
        norms=2 * layers * _norm(part) // part.shares,
        projections=2 * layers * inputs,
        attention=layers * _attention(part) // part.layout.tensor,
        mlp=layers * _mlp(part) // part.layout.tensor,
        ends=ends,
        logits=_chunk(part, batch) * weight,
    )
    if part.recompute == "selective":
        return replace(found, mlp=0)
    if part.recompute == "full":
        return replace(found, norms=0, projections=0, attention=0, mlp=0, inputs=layers * inputs)
    return found


def backward_bytes(part: Part, batch: Microbatch) -> int:
    """Beyond what is kept, early in the backward pass: of the output layer, of the final norm (on a CPU three float32
    numbers beside a gradient), or of the last MLP (gradients of gate and up; those of the end are gone by then)."""
    decoder, weight = part.decoder, part.precision.weight
    hidden = weight * decoder.hidden // part.shares
    mlp = batch.tokens * (hidden + 2 * weight * _mlp_width(decoder) // part.layout.tensor) + _made_again(part, batch)
    if not part.stage.is_last:
        return mlp + batch.tokens * hidden  # what was sent on is still there too
    copies = 3 * 4 if part.precision.device == "cpu" else weight
    norm = batch.tokens * (weight + copies) * decoder.hidden // part.shares
    gone = batch.tokens * _norm(part) // part.shares + batch.read * _read(part) + _chunk(part, batch) * weight
    return max(mlp - gone, norm, _head_at_work(part, batch))


def _made_again(part: Part, batch: Microbatch) -> int:
    """What the backward pass of a layer computes once more, all of it before it goes back through it."""
    layer = replace(part.stage, layers=1, is_first=False, is_last=False)
    whole = kept(replace(part, stage=layer, recompute="none"), batch)
    if part.recompute == "selective":
        return whole.mlp
    return whole.total - whole.ends if part.recompute == "full" else 0


def gather_bytes(part: Part, batch: Microbatch) -> int:
    """Megatron-Core's buffer in which sequence parallelism gathers the inputs of projections; it stays."""
    return batch.tokens * part.precision.weight * part.decoder.hidden if part.shares > 1 else 0


def forward_bytes(part: Part, batch: Microbatch) -> int:
    """A pass without gradient at its widest: in attention (beside the stage's input, the layer's and its norm), in an
    MLP (the same, with what attention made of them), or in the output layer."""
    decoder, weight = part.decoder, part.precision.weight
    hidden = weight * decoder.hidden // part.shares
    attention = 3 * hidden + _attention_at_work(part) // part.layout.tensor
    mlp = 4 * hidden + _mlp(part) // part.layout.tensor
    tables = weight * decoder.head_dim
    layer = batch.tokens * (max(attention, mlp) + tables)
    if not part.stage.is_last:
        return layer
    head = batch.tokens * (weight * decoder.hidden + tables) + _chunk(part, batch) * weight
    return max(layer, head + _head_at_work(part, batch))


def _attention_at_work(part: Part) -> int:
    """Per token, over all tensor ranks: the fused projection, queries laid together, both rotated; the output. On a
    CPU outputs of single sequences and all of them in float32, of a bfloat16 model beside float32 inputs."""
    decoder, at = part.decoder, part.precision
    queries, keys = decoder.queries, decoder.keys
    numbers = at.weight * (3 * queries + 3 * keys) + 4 * decoder.heads
    if at.device == "gpu":
        return numbers + at.weight * queries
    copies = 4 * (queries + 2 * keys) + at.weight * queries if at.weight < 4 else 0
    return numbers + 2 * 4 * queries + copies


def _norm(part: Part) -> int:
    """Per token."""
    hidden = part.decoder.hidden
    return (part.precision.weight * hidden if part.precision.device == "gpu" else 2 * 4 * hidden) + 4


def _attention(part: Part) -> int:
    """Per token of a layer, over all tensor ranks."""
    decoder, at = part.decoder, part.precision
    queries, keys = decoder.queries, decoder.keys
    if at.device == "gpu":
        return at.weight * (3 * queries + 3 * keys) + 4 * decoder.heads
    # One sequence at a time, in float32.
    inputs = 4 * (queries + 2 * keys) + (4 * (queries + keys) if at.weight == 4 else 0)
    return inputs + (4 + at.weight) * queries + 4 * decoder.heads


def _mlp(part: Part) -> int:
    """Per token of a layer, over all tensor ranks. Of experts those a token is routed to, and its copy for each; that
    is not held against an engine."""
    copies = part.decoder.experts.per_token * part.decoder.hidden if part.decoder.experts else 0
    return part.precision.weight * (5 * _mlp_width(part.decoder) + copies)


def _mlp_width(decoder: Decoder) -> int:
    """Numbers per token between the two matrices of the MLP, over all tensor ranks."""
    return decoder.experts.active if decoder.experts else decoder.inner


def _read(part: Part) -> int:
    """Per position read: what the output layer keeps besides logits."""
    places = 8 + 2 * 8  # where the position is, and its row and column of the response grid
    if part.role == "critic":
        return 4 * part.decoder.hidden + places
    ids_and_statistics = 8 + 2 * 4
    return part.precision.weight * part.decoder.hidden + places + ids_and_statistics


def _chunk(part: Part, batch: Microbatch) -> int:
    """Logits that exist at one time."""
    if part.role == "critic" or not part.stage.is_last:
        return 0
    return min(batch.logits_chunk, batch.read) * part.logit_rows


def _head_at_work(part: Part, batch: Microbatch) -> int:
    """Float32 copies of some logits, and one number for each hidden number read: those, or their gradient."""
    number = 4 if part.role == "critic" else part.precision.weight
    block = min(BLOCK_LOGITS[part.precision.device], _chunk(part, batch))
    return BLOCK_COPIES * 4 * block + batch.read * number * part.decoder.hidden
