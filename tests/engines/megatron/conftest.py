"""Model folders, written once per session; makes `megatron_lab` importable."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import megatron_lab as lab
from layout_lab import settings, three_steps
from rank_pool import RankPool

from ppoctl.recipe.schema import ParallelTable


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread: tiny tensors gain nothing from a second, and bit-equality requires a fixed number."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model by kind; see `megatron_lab.MODELS`."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else lab.model_folder(kind, root / kind)

    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Callable[[str], Path]) -> Callable[[str, str], dict[str, dict[str, Tensor]]]:
    """Results of a single process."""
    known: dict[tuple[str, str], dict[str, dict[str, Tensor]]] = {}

    def found(kind: str, role: str) -> dict[str, dict[str, Tensor]]:
        if (kind, role) not in known:
            known[kind, role] = three_steps(pool, settings(model(kind), role, ParallelTable()))
        return known[kind, role]

    return found
