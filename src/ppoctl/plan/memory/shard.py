"""Inputs of the activation formulas: the model shard of a rank, and the size of a microbatch."""

from dataclasses import dataclass
from functools import cached_property

from ppoctl.algorithms.role_table import Kernels, Recompute
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.plan.memory.gradients import LayerGradients, gradients_of
from ppoctl.plan.memory.pipeline import PipelineStage


@dataclass(frozen=True)
class Precision:
    """Device and dtype in which a model computes."""

    weight: int
    """Bytes of a weight: 4 for float32, 2 for bfloat16."""
    device: str
    """Device: `cpu` or `gpu`."""


@dataclass(frozen=True)
class ModelShard:
    """The part of a model that one rank holds."""

    model: Model
    """A value head's copies of layers are among the layers of the stage."""
    layout: ParallelTable
    stage: PipelineStage
    """Layers of this shard: all layers of the rank or, with interleaved stages, one run of layers of the rank."""
    precision: Precision
    recompute: Recompute = "none"
    filtered: bool = False
    """Whether log-probs are computed for the distribution after top-p."""
    kernels: Kernels = "plain"

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.model.shape

    @property
    def shares(self) -> int:
        """Number of ranks that split norms and residuals."""
        return self.layout.tensor if self.layout.sequence else 1

    @property
    def logit_rows(self) -> int:
        """Number of vocabulary ids whose logits the first tensor rank computes, without padding."""
        return min(self.shape.vocab_size, self.shape.padded_vocab_size // self.layout.tensor)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state on this rank."""
        return self.precision.weight * self.shape.hidden_size // self.shares

    def has_gradient(self, layer: int, *names: str) -> bool:
        """Return whether one of these parameters of a layer, named as in the family tables, trains or has an
        adapter."""
        return self.model.trainable.is_all or any(self._gradients.has(layer, f"{name}.weight") for name in names)

    def adapter_bytes(self, layer: int, tokens: int, *, in_mlp: bool) -> int:
        """Return the bytes that adapters of the MLP or of attention keep in addition to their inputs."""
        sizes = self._gradients.adapters(layer, self.layout.tensor, in_mlp=in_mlp)
        rows = tokens * sizes.per_token + tokens * sizes.per_own_token // self.shares
        return self.precision.weight * (rows + sizes.copied)

    def adapted_output_bytes(self, layer: int, tokens: int, *, in_mlp: bool) -> int:
        """Return the bytes of the widest output of a linear layer with adapters, in the MLP or in attention."""
        sizes = self._gradients.adapters(layer, self.layout.tensor, in_mlp=in_mlp)
        return self.precision.weight * tokens * sizes.widest

    @cached_property
    def _gradients(self) -> LayerGradients:
        return gradients_of(self.model)

    def keys_seen(self, batch: "MicrobatchShape") -> int:
        """Return the maximum number of tokens whose keys and values the attention of this rank reads.

        Each context rank has two chunks of tokens (`engines.megatron.context_parallel`). It also reads the tokens
        that precede the chunks in their sequences.
        """
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
    """Number of tokens on this rank. Context ranks split the tokens of a microbatch."""
    read: int
    """Number of positions whose output is read. These are the positions that predict a response token."""
    logits_chunk: int
    """Number of positions whose logits exist at one time."""
    longest: int
    """Number of tokens of the longest sequence. All sequences are assumed to have this length."""


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that one microbatch keeps on a rank until its backward pass."""

    norms: int
    projections: int
    """Inputs of the projections to queries, keys, values and gates, and of the router."""
    attention: int
    mlp: int
    """Activations of MLPs, in layers without experts."""
    experts: int
    """Activations of experts and the shared MLP."""
    ends: int
    """Activations outside the layers: token ids, rotary tables, final norm, positions read."""
    logits: int
    """One chunk of logits."""
    inputs: int = 0
    """Inputs of layers whose activations are recomputed from the input."""
    adapters: int = 0
    """Rows A x of adapters, and copies of their matrices A."""

    @property
    def total(self) -> int:
        in_layers = self.norms + self.projections + self.attention + self.mlp + self.experts + self.inputs
        return in_layers + self.adapters + self.ends + self.logits
