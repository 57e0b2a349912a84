"""Outputs of a checkpoint for some sequences, in float32 and without an optimizer. They serve to compare
checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.machine.device import this_device
from ppoctl.core.ports import OutputRequest, TokenOutputs
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.megatron_model import MODELS, ModelSettings, build_stages
from ppoctl.engines.megatron.microbatches import MicrobatchPlan, cut_rows
from ppoctl.engines.megatron.packed_input import ReadSettings
from ppoctl.engines.megatron.process_group import ensure_process_group
from ppoctl.engines.megatron.schedule import run_forward, share_of
from ppoctl.engines.megatron.state_reader import load_torch_dist
from ppoctl.models.convert.transformers_model import round_parameters
from ppoctl.models.cost import token_cost
from ppoctl.models.head import Head
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape

_CHUNK_TOKENS = 256


class CheckpointScorer:
    """A model in one process, with the weights of a torch_dist checkpoint that was saved with any layout.
    `rounded_to`: dtype to which the weights are rounded before they are used. None: weights are not rounded.
    `like`: see `load_torch_dist`."""

    def __init__(
        self, folder: Path, shape: ModelShape, head: Head, rounded_to: torch.dtype | None, like: Path | None = None
    ) -> None:
        device = this_device()
        parallel = ParallelTable()
        settings = ModelSettings(Model(shape, head), torch.float32, device, _CHUNK_TOKENS, parallel)
        groups = ensure_process_group(parallel)
        with megatron_device():
            self._stages = build_stages(MODELS[head], settings, groups)
            load_torch_dist(self._stages, folder, like=like)
        if rounded_to is not None:
            round_parameters(self._stages[0], rounded_to)
        self._cost = token_cost(shape)
        self._device = device

    def score(self, sequences: Sequences) -> TokenOutputs:
        """Return log-probs and entropies of the response tokens, or the values of a value head."""
        plan = MicrobatchPlan(
            batching=BySequences(microbatch_seqs=sequences.num_seqs, logits_chunk_tokens=_CHUNK_TOKENS),
            reading=ReadSettings(self._device, OutputRequest(entropy=True)),
            cost=self._cost,
            with_gradient=False,
        )
        microbatches = cut_rows(sequences, torch.arange(sequences.num_seqs), plan)
        with megatron_device():
            return share_of(microbatches, run_forward(self._stages, microbatches)).outputs

    def use_head(self, weight: Tensor) -> None:
        """Replace the value head. Shape of `weight`: [1 hidden]."""
        with torch.no_grad():
            self._stages[0].output_layer.weight.copy_(weight)
