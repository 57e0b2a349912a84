"""vLLM's own loader of Hugging Face folders, for the files that a trainer would read.

Reward models use it. Engines that cannot change weights in place use it with a checksum of every tensor. The
checksums verify which weights an engine has read.
"""

import copy
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ppoctl.models.convert.checksum import LoadedWeight, checksum_of
from ppoctl.models.convert.headers import SAFETENSORS, weight_files

FOLDER = "ppoctl_folder"
"""Name of `FolderLoader` in vLLM."""
WITNESSED = "ppoctl_witnessed"
"""Name of `WitnessedLoader` in vLLM."""

_read: list[LoadedWeight] = []


class FolderLoader(DefaultModelLoader):
    """vLLM's default loader, which reads only the files that hold the weights of the folder. vLLM's reads every
    safetensors file if there is no index, and prefers `consolidated.safetensors`."""

    def __init__(self, load_config: LoadConfig) -> None:
        # vLLM's default loader rejects a load format that it does not know, such as the name of ours.
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)

    def _prepare_weights(self, model_name_or_path: str, *_: object) -> tuple[str, list[str], bool, str]:
        files = weight_files(Path(model_name_or_path), SAFETENSORS)
        return model_name_or_path, [str(file) for file in files], True, f"{SAFETENSORS}.index.json"


class WitnessedLoader(FolderLoader):
    """Loader that also records a checksum of each tensor."""

    def get_all_weights(self, model_config: ModelConfig, model: Any) -> Generator[tuple[str, Tensor], None, None]:
        _read.clear()
        for name, tensor in super().get_all_weights(model_config, model):
            _read.append(LoadedWeight(name, checksum_of(tensor), tied_to=None))
            yield name, tensor


def register() -> None:
    """Register the loaders with vLLM in this process. May be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    for name, loader in ((FOLDER, FolderLoader), (WITNESSED, WitnessedLoader)):
        # vLLM warns if a load format is registered twice.
        if name not in _LOAD_FORMAT_TO_MODEL_LOADER:
            register_model_loader(name)(loader)


def last_read() -> list[LoadedWeight]:
    """Return all tensors that the engine in this process read at its last startup."""
    return list(_read)
