"""vLLM's own loader of Hugging Face folders, with a checksum of every tensor that it reads.

For engines that cannot change weights in place: the checksums verify which weights the engine was started from.
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
    """Register the format with vLLM in this process; may be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(FORMAT)(WitnessedLoader)


def last_read() -> list[LoadedWeight]:
    """Return every tensor that this process's engine read at its last start."""
    return list(_read)
