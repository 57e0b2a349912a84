"""Megatron-Core's GPTModel reading packed sequences, with an output per read position instead of logits.

Letters: N packed tokens, n positions read. Only those n positions reach the output layer.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ppoctl.engines.megatron.families import ModelShape
from ppoctl.engines.megatron.layer_spec import layer_spec
from ppoctl.engines.megatron.logprobs import LogprobSettings, token_logprobs
from ppoctl.engines.megatron.packed_input import PackedInput, RopeTables
from ppoctl.engines.megatron.value_head import ValueHead


class TokenOutputs(NamedTuple):
    """What the last pipeline stage says about the positions read; float32."""

    outputs: Float[Tensor, " n"]
    """Log-probs of the targets, or values."""
    entropy: Float[Tensor, " n"] | None


class ModelSettings(NamedTuple):
    """How a model is built."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    logits_chunk_tokens: int


class PackedModel(GPTModel):
    """A GPTModel whose forward takes one microbatch and gives `TokenOutputs` (on the last pipeline stage)."""

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection) -> None:
        shape = settings.shape
        config = shape.transformer_config(settings.dtype)
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # RoPE is applied in the attention module, from one table
            pg_collection=groups,
        )
        self.rope = RotaryEmbedding(
            kv_channels=shape.head_dim,
            rotary_percent=1.0,
            rotary_base=shape.rope_theta,
            rope_scaling=shape.llama3_rope_factor is not None,
            rope_scaling_factor=shape.llama3_rope_factor or 1.0,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=groups.cp,
        )
        self.settings = settings

    def forward(self, packed: PackedInput) -> TokenOutputs | Tensor:
        """Outputs of the positions read; before the last pipeline stage, the hidden states to send on."""
        packed.rope = self._rope_tables(packed)
        return super().forward(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            attention_mask=None,
            packed_seq_params=packed,
        )

    def _postprocess(self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedInput, **__: Any) -> Any:
        """Called by GPTModel in place of its own projection to logits."""
        if not self.post_process:
            return hidden_states
        return self.read(hidden_states[:, 0].index_select(0, packed_seq_params.read_at), packed_seq_params)

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> TokenOutputs:
        """The output layer."""
        raise NotImplementedError

    def _rope_tables(self, packed: PackedInput) -> RopeTables:
        half = self.settings.shape.head_dim // 2
        angles = self.rope.get_emb(packed.max_seqlen_q)[:, 0, :, :half]
        cos, sin = (table.to(self.settings.dtype)[packed.positions] for table in (angles.cos(), angles.sin()))
        return RopeTables(cos, sin)


class LogprobModel(PackedModel):
    """The actor's model: log-probs and entropies."""

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> TokenOutputs:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        chunk_tokens = self.settings.logits_chunk_tokens
        settings = LogprobSettings(packed.temperature, chunk_tokens, packed.with_entropy)
        logprobs, entropy = token_logprobs(hidden, weight, packed.targets, settings)
        return TokenOutputs(logprobs, entropy if packed.with_entropy else None)


class ValueModel(PackedModel):
    """The critic's model: one value per position; its embedding is never tied to the output layer."""

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection) -> None:
        super().__init__(settings, groups)
        if self.post_process:
            self.output_layer = ValueHead(self.config, settings.device)
            self.share_embeddings_and_output_weights = False

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> TokenOutputs:  # noqa: ARG002
        return TokenOutputs(self.output_layer(hidden), None)


def build_model(cls: type[PackedModel], settings: ModelSettings, groups: ProcessGroupCollection) -> PackedModel:
    """A model with uninitialised weights, all in the model's dtype: norms too, as in the Hugging Face models."""
    return cls(settings, groups).to(device=settings.device, dtype=settings.dtype)
