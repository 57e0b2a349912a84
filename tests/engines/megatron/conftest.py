"""Model folders, written once per session; makes `megatron_lab` importable."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import megatron_lab as lab


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from a second one, and bit-equality wants the number fixed."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by kind; see `megatron_lab.MODELS`."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else lab.model_folder(kind, root / kind)

    return folder
