"""Inputs of the activation formulas: one rank's part of a model, and how much goes through it at a time."""

from dataclasses import dataclass

from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.pipeline import PipelineStage
from ppoctl.recipe.schema import ParallelTable, Recompute


@dataclass(frozen=True)
class Precision:
    """Device and dtype in which a model computes."""

    weight: int
    """Bytes of a weight: 4 for float32, 2 for bfloat16."""
    device: str
    """Device that computes, cpu or gpu."""


@dataclass(frozen=True)
class ModelShard:
    """One rank's part of a model."""

    shape: ModelShape
    role: str
    """Role of the rank, actor or critic."""
    layout: ParallelTable
    stage: PipelineStage
    """Layers of this part: all of the rank's, or one run of them where stages are interleaved."""
    precision: Precision
    recompute: Recompute = "none"
    filtered: bool = False
    """Whether its log-probs are of the distribution that top-p leaves."""

    @property
    def shares(self) -> int:
        """Ranks that split norms and residuals."""
        return self.layout.tensor if self.layout.sequence else 1

    @property
    def logit_rows(self) -> int:
        """Vocabulary ids whose logits the first tensor rank computes; padding is not computed."""
        return min(self.shape.vocab_size, self.shape.padded_vocab_size // self.layout.tensor)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state on this rank."""
        return self.precision.weight * self.shape.hidden_size // self.shares

    def keys_seen(self, batch: "MicrobatchShape") -> int:
        """Tokens whose keys and values this rank's attention reads, at most: where context ranks split the tokens, in
        two chunks each (`engines.megatron.context_parallel`), also those before the chunks in their sequences."""
        ranks = self.layout.context
        if ranks == 1:
            return batch.tokens
        return min(batch.tokens * (2 * ranks + 1) // 2, batch.tokens + 2 * (batch.longest - 1))

    @property
    def on_gpu(self) -> bool:
        return self.precision.device == "gpu"


@dataclass(frozen=True)
class MicrobatchShape:
    """One forward and backward pass of a rank."""

    tokens: int
    """Tokens on this rank: its share, where context ranks split them."""
    read: int
    """Positions whose output is read: those that predict a response token."""
    logits_chunk: int
    """Positions whose logits exist at one time."""
    longest: int
    """Tokens of the longest sequence; all are taken to be as long."""


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that one microbatch keeps on a rank until its backward pass."""

    norms: int
    projections: int
    """Inputs of the products that make queries, keys, values and gates, and of the router."""
    attention: int
    mlp: int
    """Activations of MLPs, in layers without experts."""
    experts: int
    """Activations of experts, with the MLP beside them."""
    ends: int
    """Activations outside the layers: token ids, rotary tables, final norm, positions read."""
    logits: int
    """One chunk of logits."""
    inputs: int = 0
    """Inputs of layers that are computed again from them."""

    @property
    def total(self) -> int:
        in_layers = self.norms + self.projections + self.attention + self.mlp + self.experts + self.inputs
        return in_layers + self.ends + self.logits
