"""Routed experts inside vLLM, which keeps all experts of a layer in two fused tensors:

    w13_weight  [experts, 2 x intermediate, hidden]   gate projections, then up projections
    w2_weight   [experts, hidden, intermediate]       down projections

With Triton's kernels (the default on Hopper GPUs), the engine computes with these tensors, and the matrix of an
expert is a view. On a CPU, vLLM pads the intermediate size, and packs the matrix of each expert into the order in
which its kernel reads it. Other kernels change the weights in ways that are not undone here: their engines restart.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

PLAIN = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that compute with the tensors as they were loaded."""
FUSED = ("w13_weight", "w2_weight")
"""Names of the fused tensors."""
_BASE = 256
"""Base of the digits from which `_packed_order` reads the order. bfloat16 represents each digit exactly."""
_DIGITS = 4


def take_weights(model: torch.nn.Module) -> bool:
    """Whether the weights of all experts can be loaded into a running engine and read back."""
    return all(_is_packed(layer) or _is_plain(layer) for layer in _layers(model))


class ReloadedExperts:
    """The experts of a model during a reload. On a CPU, vLLM packs the weights of a layer only if the layer has no
    kernel yet (vLLM 0.32 and 0.33): a later load would leave plain weights where packed ones are read, without an
    error. So the kernels are removed before a reload, and vLLM builds them again for the layers that it loads."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kernels = {layer: layer.quant_method.moe_kernel for layer in _layers(model) if _is_packed(layer)}
        for layer in self._kernels:
            layer.quant_method.moe_kernel = None

    def end(self) -> None:
        """Give the layers that were not loaded their kernels back."""
        for layer, kernel in self._kernels.items():
            if layer.quant_method.moe_kernel is None:
                layer.quant_method.moe_kernel = kernel


def expert_weights(path: str, layer: Any) -> Iterator[tuple[str, Tensor, int]]:
    """Yield name, tensor and sharded axis of each matrix of this layer's experts, read back from the memory with
    which the engine computes. `path` is the name of the layer in the model."""
    inner = layer.moe_config.intermediate_size_per_partition_unpadded
    first, second = (_unpacked(layer, getattr(layer, name).data) for name in FUSED)
    gate, up = first.chunk(2, dim=1)
    columns = (
        (layer.ckpt_gate_proj_name, gate[:, :inner], 0),
        (layer.ckpt_up_proj_name, up[:, :inner], 0),
        (layer.ckpt_down_proj_name, second[:, :, :inner], 1),
    )
    parent = path.partition(".experts")[0]
    for name, matrices, axis in columns:
        for expert, matrix in enumerate(matrices):
            yield f"{parent}.experts.{expert}.{name}.weight", matrix, axis


def _layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def _is_packed(layer: Any) -> bool:
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    experts = None if kernel is None else kernel.fused_experts
    return isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch


def _is_plain(layer: Any) -> bool:
    method = layer.quant_method
    return isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend in PLAIN


def _unpacked(layer: Any, fused: Tensor) -> Tensor:
    """Return a fused tensor [experts, rows, columns] in the order in which it was loaded."""
    if not _is_packed(layer):
        return fused
    order = _packed_order(*fused.shape[1:], fused.dtype, layer.quant_method.moe_kernel.fused_experts.isa)
    plain = torch.empty_like(fused).flatten(1)
    plain[:, order] = fused.flatten(1)
    return plain.view_as(fused)


@cache
def _packed_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Return the index of each element of a packed matrix in the plain matrix. It is found by packing the indices,
    digit by digit: all numbers that are packed are exact."""
    index = torch.arange(rows * columns)
    order = torch.zeros_like(index)
    for digit in range(_DIGITS):
        digits = (index // _BASE**digit % _BASE).to(dtype).view(1, rows, columns)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() * _BASE**digit
    return order
