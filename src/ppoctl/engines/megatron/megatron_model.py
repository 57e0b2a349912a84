"""Megatron-Core's GPTModel for packed sequences. It returns one output per position to read, instead of logits.

Letters: N packed tokens, n positions to read. Only these n positions reach the output layer.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from ppoctl.algorithms.role_table import Kernels, Recompute
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.layer_input import captured_input
from ppoctl.engines.megatron.layer_spec import layer_spec
from ppoctl.engines.megatron.logit_blocks import LogprobSettings, VocabularyShard
from ppoctl.engines.megatron.megatron_config import UNBALANCED, RouterBalance, transformer_config
from ppoctl.engines.megatron.modules import ScoreHead, ValueHead
from ppoctl.engines.megatron.output_logprobs import PositionOutputs, token_logprobs
from ppoctl.engines.megatron.packed_input import PackedInput, RopeTables
from ppoctl.engines.megatron.value_head import PolicyValueHead
from ppoctl.models.convert.inv_freq import inv_freq
from ppoctl.models.head import Head
from ppoctl.models.model import Model
from ppoctl.models.rope import Rope
from ppoctl.models.shape import ModelShape


class ModelSettings(NamedTuple):
    """Settings from which a model is built."""

    model: Model
    dtype: torch.dtype
    device: torch.device
    logits_chunk_tokens: int
    parallel: ParallelTable
    recompute: Recompute = "none"
    kernels: Kernels = "plain"
    label: int | None = None
    """Index of the label whose probability is a reward model's score. None: the head has one output."""
    on_host: bool = False
    """Whether the weights are allocated on the host first, and moved to the device after `adopt`."""
    balance: RouterBalance = UNBALANCED

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return self.model.shape


class PackedModel(GPTModel):
    """One pipeline stage of a GPTModel (the complete model without pipeline parallelism). Its forward takes one
    microbatch and returns `PositionOutputs` on the last stage."""

    head: ClassVar[Head]
    """Head of the model. Only a token head is tied to the embedding, if it is tied in the model source."""

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection, virtual_stage: int | None) -> None:
        shape = settings.shape
        config = transformer_config(
            shape, settings.dtype, settings.parallel, settings.recompute, settings.kernels, settings.balance
        )
        config.use_cpu_initialization |= settings.on_host
        pipeline_rank = groups.pp.rank()
        first_layer: int = get_transformer_layer_offset(config, virtual_stage, pipeline_rank)
        layers = range(first_layer, first_layer + get_num_layers_to_build(config, virtual_stage, pipeline_rank))
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(shape, layers),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=shape.max_positions,
            pre_process=pipeline_rank == 0 and not virtual_stage,
            post_process=_is_last(groups, settings.parallel, virtual_stage),
            share_embeddings_and_output_weights=shape.tied_embeddings and self.head == "token",
            position_embedding_type="none",  # the attention module applies RoPE, from one table
            pg_collection=groups,
            vp_stage=virtual_stage,
        )
        self.inv_freqs = {rope: inv_freq(rope, shape.rope_dim).to(settings.device) for rope in shape.ropes}
        self.settings = settings
        self.first_layer = first_layer

    def forward(self, packed: PackedInput) -> PositionOutputs | Tensor:
        """Return the outputs of the positions to read, or only their hidden states. Before the last pipeline stage,
        return the hidden states for the next stage."""
        self._fill_in_rope(packed)
        ids = {"input_ids": packed.tokens[None], "position_ids": packed.positions[None]}
        scale, embedded = self.settings.shape.embedding_scale, None
        if scale is not None and self.pre_process:
            embedded = self.embedding(**ids)
            # As in transformers, the factor is rounded to the dtype of the model.
            embedded = embedded * torch.tensor(scale, dtype=embedded.dtype)
        return super().forward(**ids, decoder_input=embedded, attention_mask=None, packed_seq_params=packed)

    def outputs_from(self, layer: int, hidden: Tensor, packed: PackedInput) -> PositionOutputs | Tensor:
        """Return the outputs of `forward`, given the hidden states that enter this layer (counted within the stage).
        Computes no gradient: activations are not recomputed."""
        self._fill_in_rope(packed)
        for module in self.decoder.layers[layer:]:
            hidden, _ = module(hidden_states=hidden, attention_mask=None, packed_seq_params=packed)
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        outputs: PositionOutputs | Tensor = self._postprocess(hidden, packed_seq_params=packed)
        return outputs

    def _postprocess(self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedInput, **__: Any) -> Any:
        """Compute the outputs. GPTModel calls this method, which replaces its projection to logits."""
        if not self.post_process:
            return hidden_states
        hidden = self.at_read_positions(hidden_states, packed_seq_params)
        if packed_seq_params.hidden_alone:
            return hidden
        outputs, context = self.read(hidden, packed_seq_params), packed_seq_params.context
        if context is None:
            return outputs
        others = (None if values is None else context.of_all(values) for values in outputs[1:])
        return PositionOutputs(context.of_all(outputs.outputs), *others)

    def at_read_positions(
        self, hidden_states: Float[Tensor, "S 1 hidden"], packed: PackedInput
    ) -> Float[Tensor, "n hidden"]:
        """Return the hidden states of the positions to read, given those of this rank's slice of the positions."""
        if self.config.sequence_parallel:
            # Every tensor rank reads all positions, so each rank has the complete gradient of its own slice.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states[:, 0].index_select(0, packed.read_at)

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> PositionOutputs:
        """Apply the output layer."""
        raise NotImplementedError

    def _fill_in_rope(self, packed: PackedInput) -> None:
        shape = self.settings.shape
        tables = {rope: self._rope_tables(packed, rope) for rope in shape.ropes}
        packed.rope, packed.window_rope = tables[shape.rope], tables[shape.window_rope or shape.rope]

    def _rope_tables(self, packed: PackedInput, rope: Rope) -> RopeTables:
        # In float32: bfloat16 does not represent all positions above 256.
        places = torch.arange(packed.max_seqlen_kv, device=packed.positions.device, dtype=torch.float32)
        angles = torch.outer(places, self.inv_freqs[rope])[:, None]
        tables = (angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor)
        return RopeTables(*(table.to(self.settings.dtype)[packed.positions] for table in tables))


class LogprobModel(PackedModel):
    """The actor's model: log-probs and entropies, and values if it has a value head."""

    head = "token"

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection, virtual_stage: int | None) -> None:
        super().__init__(settings, groups, virtual_stage)
        self.value_head: PolicyValueHead | None = None
        self._entering: list[Tensor] = []
        head = settings.model.value_head
        if head is not None and self.post_process:
            assert head.layers_copied <= len(self.decoder.layers), "a rule requires these layers on the last stage"
            self.value_head = PolicyValueHead(head, settings.shape, self.config, groups, virtual_stage)

    def start_value_head(self) -> None:
        """Set the initial weights of the value head, if there is one. The model's weights must be loaded."""
        if self.value_head is not None:
            self.value_head.start(self.decoder)

    def forward(self, packed: PackedInput) -> PositionOutputs | Tensor:
        if self.value_head is None or len(self.value_head.layers) == 0 or not packed.request.values:
            return super().forward(packed)
        first_copied = len(self.decoder.layers) - len(self.value_head.layers)
        with captured_input(self, first_copied) as self._entering:
            return super().forward(packed)

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output layer, on the last pipeline stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> PositionOutputs:
        weight, group = self.output_weight, self.pg_collection.tp
        vocabulary = VocabularyShard(
            start=group.rank() * len(weight), total=self.settings.shape.vocab_size, group=group
        )
        values = self._values(hidden, packed) if packed.request.values else None
        # The logits of each tensor rank give a part of the gradient. Backward sums the parts.
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        settings = LogprobSettings(
            packed.request,
            self.settings.logits_chunk_tokens,
            self.settings.shape.logit_softcap,
            packed.excluded,
            fused=self.settings.kernels == "fused" and hidden.is_cuda,  # a CPU would need a C++ compiler
        )
        outputs = token_logprobs(hidden, weight, packed.targets, settings, vocabulary, packed.reference)
        return outputs._replace(values=values)

    def _values(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> Float[Tensor, " n"]:
        head = self.value_head
        assert head is not None, "values were requested from a model without a value head"
        if len(head.layers):
            branch = head.after_copied_layers(self._entering.pop(), packed.without_experts())
            hidden = self.at_read_positions(branch, packed)
        return head.values(hidden)


class ValueModel(PackedModel):
    """The critic's model: one value per position."""

    head = "value"

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection, virtual_stage: int | None) -> None:
        super().__init__(settings, groups, virtual_stage)
        if self.post_process:
            self.output_layer = ValueHead(self.config, settings.device)

    def read(self, hidden: Float[Tensor, "n hidden"], packed: PackedInput) -> PositionOutputs:  # noqa: ARG002
        return PositionOutputs(self.output_layer(hidden))


class ScoreModel(ValueModel):
    """A reward model: one score per position. The score of the last position is the score of the text."""

    def __init__(self, settings: ModelSettings, groups: ProcessGroupCollection, virtual_stage: int | None) -> None:
        super().__init__(settings, groups, virtual_stage)
        if self.post_process:
            self.output_layer = ScoreHead(self.config, settings.device, settings.shape.labels)
            self.output_layer.label = settings.label


MODELS: Final[dict[Head, type[PackedModel]]] = {"token": LogprobModel, "value": ValueModel}
"""Head -> class of a trained model with this head."""


def build_stages(
    cls: type[PackedModel],
    settings: ModelSettings,
    groups: ProcessGroupCollection,
    adopt: Callable[[list[PackedModel]], None] | None = None,
) -> list[PackedModel]:
    """Return this rank's pipeline stages (several if they are interleaved) with uninitialized weights. All weights,
    including norms, have the model's dtype, as in the Hugging Face models. Tensors that are not trained (a router's
    bias) keep their dtype. `adopt` may replace weights by those of another model, before they are moved to the
    device."""
    count = settings.parallel.stages_per_rank
    # Weights that are not written take no memory of the host, so weights that are replaced never exist twice.
    settings = settings._replace(on_host=adopt is not None)
    with warnings.catch_warnings():
        # The warning is about unsplit experts with tensor parallelism. Their tokens are exchanged between ranks
        # instead.
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel")
        # The warning is about Megatron-Core's own shared expert, which sets its width in another way.
        warnings.filterwarnings("ignore", message="MLP requires ffn_hidden_size", category=DeprecationWarning)
        stages = [cls(settings, groups, stage if count > 1 else None) for stage in range(count)]
    for stage in stages:
        _mark_parameters(stage)
    if adopt is not None:
        adopt(stages)
    for stage in stages:
        stage.to(device=settings.device)
        for parameter in stage.parameters():
            parameter.data = parameter.data.to(settings.dtype)
    return stages


def _mark_parameters(stage: PackedModel) -> None:
    """Mark the weights that are split over tensor ranks, and the weights of experts.

    Megatron-Core marks slices when it initializes weights, but weights are not initialized here. Without the mark the
    gradient norm would include only the first tensor rank's slices. Megatron-Core marks the weights of experts only
    if expert ranks split them. Otherwise it sums their gradients over the data ranks only, although tensor ranks with
    unsplit experts have also processed different tokens.
    """
    dimensions = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    for module in stage.modules():
        dimension = next((dim for cls, dim in dimensions.items() if isinstance(module, cls)), None)
        if dimension is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dimension, stride=1)
            if getattr(module, "is_expert", False):
                module.weight.allreduce = False


def _is_last(groups: ProcessGroupCollection, parallel: ParallelTable, virtual_stage: int | None) -> bool:
    is_last_stage = virtual_stage is None or virtual_stage == parallel.stages_per_rank - 1
    return groups.pp.rank() == groups.pp.size() - 1 and is_last_stage
