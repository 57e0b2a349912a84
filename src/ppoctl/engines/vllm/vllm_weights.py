"""Weights inside vLLM: loading while the engine runs, and reading back from the memory with which the engine
computes.

    start_weight_update  ->  update_weights(tensors) ...  ->  finish_weight_update  ->  ppoctl_loaded_weights

Weights are loaded in place by vLLM's layerwise reload, through vLLM's weight-transfer interface. Tensors may arrive
in any number and order. A fused layer is loaded when its last part has arrived. A layer of which no tensor arrives
keeps its weights. (`loader` reads a folder when an engine starts.)

The verification (`models.convert.checksum`) does not rely on the loading code: weights are read *back from the memory
with which the engine computes*.

- Linear layers and the output head on a CPU: the engine computes with a packed copy in oneDNN's own layout and keeps
  no plain weight. The worker multiplies the identity matrix by the packed copy through the layer's own kernel. Each
  output element is one weight times 1 plus zeros, so this returns the packed weights exactly, in float32 and in
  bfloat16. A tied head has a packed copy in addition to the embedding. This copy is read and compared separately.
- Experts on a CPU: packed in another order, which `experts` undoes.
- All other weights (embeddings, norms, biases; on a GPU all weights): the resident tensor is read.

The verification does not cover the KV cache: a request must not read keys and values of older weights.
`Engine._queue` excludes that by construction.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ppoctl.engines.vllm.experts import FUSED, ReloadedExperts, expert_weights, take_weights
from ppoctl.engines.vllm.routed_experts import ChosenExperts
from ppoctl.models.convert.checksum import LoadedWeight, checksum_of

BACKEND = "ppoctl_host"
"""Name of `HostTransfer` in vLLM."""
_PROBE_ROWS = 512
"""Number of rows of the identity matrix in one product. It limits the memory for reading back a large matrix."""


def register() -> None:
    """Register `HostTransfer` with vLLM in this process. May be called again."""
    # vLLM raises an error if a name is registered twice.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostTransfer)


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """Parameters of the connection that vLLM would set up. There are no parameters."""


@dataclass
class Arrived(WeightTransferUpdateInfo):
    """Some of the weights, under Hugging Face names, in memory that this process can read."""

    tensors: list[tuple[str, Tensor]]


class HostTransfer(WeightTransferEngine[NothingToAgreeOn, Arrived]):
    """Weight transfer that loads the tensors with which it is called, in checkpoint format."""

    init_info_cls = NothingToAgreeOn
    update_info_cls = Arrived

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._experts = ReloadedExperts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Arrived) -> None:
        model: Any = self.model
        model.load_weights(iter(update_info.tensors))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise

        # The checksums find every weight that was not loaded. vLLM would warn of each layer that keeps its weights.
        with _without(layerwise.logger, "%s: Failed to load weights"):
            finalize_layerwise_reload(self.model, self.model_config)
        self._experts.end()

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


@contextmanager
def _without(logger: logging.Logger, message: str) -> Iterator[None]:
    """Context in which a logger drops records with this message (before its arguments are inserted)."""

    def is_kept(record: logging.LogRecord) -> bool:
        return record.msg != message

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


class WeightReader:
    """Extension of vLLM's worker (`worker_extension_cls`), which runs in the process with the engine's weights."""

    model_runner: Any
    _chosen: ChosenExperts

    def ppoctl_choose_experts(self) -> None:
        """Start to note which experts the routers choose. Only for runner V1 (see `routed_experts`)."""
        self._chosen = ChosenExperts(self.model_runner)

    def ppoctl_take_experts(self, tokens: Mapping[str, int]) -> dict[str, bytes]:
        """See `ChosenExperts.take`."""
        return self._chosen.take(tokens)

    def ppoctl_drop_experts(self) -> None:
        """Forget the experts of all requests."""
        self._chosen.clear()

    def ppoctl_takes_weights(self) -> bool:
        """Return whether weights can be loaded in place and read back."""
        return take_weights(self.model_runner.get_model())

    def ppoctl_loaded_weights(self) -> list[LoadedWeight]:
        """Return all weights of the engine, read back from the memory with which the engine computes."""
        model = self.model_runner.get_model()
        with torch.no_grad():
            repack_heads(model)
            return list(_read_back(model))


def repack_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of every layer that has one in addition to a resident weight.

    Loading rebuilds the copies of layers that received weights. A head that is tied to the embedding receives no
    weight, so without this function its logits would silently come from the old embedding (vLLM 0.32 and 0.33, CPU).
    Does nothing on a GPU.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            layer: Any = module
            layer.quant_method.process_weights_after_loading(layer)


def _read_back(model: torch.nn.Module) -> Iterator[LoadedWeight]:
    """Yield every parameter of the engine's model under its Hugging Face name. Fused layers are split into their
    parts."""
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    owners: dict[int, str] = {}
    dtype = next(model.parameters()).dtype
    for path, module in model.named_modules():
        experts = isinstance(module, RoutedExperts)
        if experts:
            for name, part, axis in expert_weights(path, module):
                yield LoadedWeight(name, checksum_of(_gathered(part, axis)), None)
        for kind, parameter in module.named_parameters(recurse=False):
            if experts and kind in FUSED:
                continue
            parts = fused.get(path.rpartition(".")[2], ())
            # If a model's checkpoint has fused layers too, the only part of a fused layer is the layer.
            parts = parts if len(parts) > 1 else ()
            sizes = module.output_partition_sizes if parts else ()
            value = _in_use(module, kind, parameter, dtype)
            for name, part in _parts(f"{path}.{kind}", value, parts, sizes):
                yield LoadedWeight(name, checksum_of(_whole(module, kind, part)), owners.get(id(parameter)))
            owners.setdefault(id(parameter), f"{path}.{kind}")


def _parts(name: str, value: Tensor, parts: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    if not parts:
        yield name, value
        return
    path, _, kind = name.rpartition(".")
    parent, _, _ = path.rpartition(".")
    for part, rows in zip(parts, value.split(list(sizes)), strict=True):
        yield f"{parent}.{part}.{kind}", rows


def _in_use(module: Any, kind: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight with which this tensor rank computes."""
    value = parameter.data
    if kind == "weight" and hasattr(module, "cpu_linear"):
        value = _unpacked(module, dtype)
    elif kind == "bias" and value.dtype != dtype and hasattr(module, "cpu_linear"):
        # Some CPU kernels keep the bias in float32; the conversion is exact in both directions.
        value = value.to(dtype)
    return value


def _whole(module: Any, kind: str, part: Tensor) -> Tensor:
    """Return the full tensor, gathered from all tensor ranks, without padding."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        part = _gathered(part, 0)
    elif isinstance(module, RowParallelLinear) and kind == "weight":
        part = _gathered(part, 1)
    # The vocabulary is padded to a multiple of 64; the padding is never sampled.
    return part[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else part


def _gathered(part: Tensor, axis: int) -> Tensor:
    """Return the parts of all tensor ranks, joined along an axis."""
    from vllm.distributed import get_tp_group

    ranks = get_tp_group()
    # Collectives require contiguous tensors; a part may be a slice or a transposed matrix.
    return part if ranks.world_size == 1 else ranks.all_gather(part.contiguous(), axis)


def _unpacked(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the packed weight [out, in] of a CPU linear layer, read through the layer's own kernel."""
    # A head has the first, a layer that is split over ranks the second, one that every rank holds the third.
    names = ("embedding_dim", "input_size_per_partition", "input_size")
    width = next(getattr(module, name) for name in names if hasattr(module, name))
    columns = []
    for start in range(0, width, _PROBE_ROWS):
        rows = min(_PROBE_ROWS, width - start)
        probe = torch.zeros(rows, width, dtype=dtype)
        probe[torch.arange(rows), torch.arange(start, start + rows)] = 1
        columns.append(module.cpu_linear(probe, module.weight, None))
    return torch.cat(columns).t()
