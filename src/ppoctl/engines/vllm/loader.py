"""vLLM's own loader of Hugging Face folders, with a checksum of every tensor that it reads.

It is used for engines that cannot change weights in place. The checksums verify which weights an engine has read.
"""

import copy
from collections.abc import Generator
from typing import Any

from torch import Tensor
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ppoctl.weights.checksum import LoadedWeight, checksum_of

FORMAT = "ppoctl_witnessed"
"""Name of `WitnessedLoader` in vLLM."""

_read: list[LoadedWeight] = []


class WitnessedLoader(DefaultModelLoader):
    """vLLM's default safetensors loader, which also records a checksum of each tensor."""

    def __init__(self, load_config: LoadConfig) -> None:
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)

    def get_all_weights(self, model_config: ModelConfig, model: Any) -> Generator[tuple[str, Tensor], None, None]:
        _read.clear()
        for name, tensor in super().get_all_weights(model_config, model):
            _read.append(LoadedWeight(name, checksum_of(tensor), tied_to=None))
            yield name, tensor


def register() -> None:
    """Register `WitnessedLoader` with vLLM in this process. May be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(FORMAT)(WitnessedLoader)


def last_read() -> list[LoadedWeight]:
    """Return all tensors that the engine in this process read at its last startup."""
    return list(_read)
