"""Model folders, written once per session; makes `megatron_lab` importable."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import megatron_lab as lab
from layout_lab import Model, Steps, settings_of, started, steps_of
from rank_pool import RankPool

from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.models.trainable import Trainable


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


@pytest.fixture(scope="session")
def fresh(model: Callable[[str], Path]) -> Callable[[str], MegatronActor]:
    """Return a started actor by kind, in this process. Tests leave its weights as they are."""
    return cache(lambda kind: lab.actor(model(kind)))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def alone(pool: RankPool, model: Model) -> Callable[..., Steps]:
    """Steps of a single process, in which all parameters train, or adapters."""

    @cache
    def found(kind: str, role: str, trainable: Trainable = Trainable()) -> Steps:
        return steps_of(pool, started(pool, settings_of(model, kind, "alone", role, trainable=trainable)))

    return found
