"""How weights leave the process of a job without Ray, according to `cluster.weights`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppoctl.engines.megatron.ranks import DeviceSharingRanks, ThisProcess
from ppoctl.engines.weights.bucket import TensorSpec
from ppoctl.engines.weights.sending import PARTS, Part, SendingRank
from ppoctl.engines.weights.sharing import OpenFile, Shared
from ppoctl.models.shape_reader import read_shape
from ppoctl.plan.memory.estimate import estimate
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import is_one_process
from ppoctl.run.wire.engines import place_roles

RECIPES = Path(__file__).parents[2] / "recipes"


class RankOnGpu(SendingRank):
    """A rank whose memory no other process may open; CUDA is not available here."""

    device = torch.device("cuda")

    def weights(self, parts: Sequence[Part]) -> list[Iterator[tuple[str, Tensor]]]:
        tensors = [("a", torch.arange(3.0)), ("b", torch.arange(4.0))]
        return [iter(tensors if part == "changing" else []) for part in parts]

    def weight_specs(self, parts: Sequence[Part] = PARTS) -> list[TensorSpec]:
        return [TensorSpec("a", torch.float32, (3,)), TensorSpec("b", torch.float32, (4,))]


def test_weights_go_through_host_memory_if_configured() -> None:
    sets = ["cluster.weights=store", "cluster.weights_bucket_mib=1"]
    recipe = load([RECIPES / "quickstart.toml"], sets).recipe
    assert is_one_process(recipe)
    placed = place_roles(recipe)
    assert isinstance(placed.trained["actor"], DeviceSharingRanks)
    assert isinstance(placed.trained["actor"].ranks, ThisProcess)
    placed.trained["actor"].ranks.rank = RankOnGpu()  # type: ignore[assignment]
    placed.trained["actor"].ranks.bucket_bytes = 12
    buckets = list(placed.trained["actor"].weights().buckets_for_engines())
    assert {name: tensor.tolist() for bucket in buckets for name, tensor in bucket.tensors()} == {
        "a": [0.0, 1.0, 2.0],
        "b": [0.0, 1.0, 2.0, 3.0],
    }
    # Host memory that lasts until the next transfer, once: a restarted engine is restored from it.
    assert all(bucket.lasting() == bucket for bucket in buckets)
    for content in [content for bucket in buckets for content in bucket.contents]:
        assert isinstance(content, Shared)
        assert isinstance(content.handle, OpenFile)
    assert len(buckets) == sum(len(bucket.contents) for bucket in buckets) == 2


@pytest.mark.parametrize(("way", "on_gpu", "on_host"), [("shared", 4, 0), ("store", 1, 1)])
def test_plan_counts_all_weight_copies(way: str, on_gpu: int, on_host: int) -> None:
    model = RECIPES / "quickstart" / "model"
    recipe = load([RECIPES / "quickstart.toml"], [f"cluster.weights={way}"]).recipe
    memory = estimate(recipe, dict.fromkeys(recipe.trained, read_shape(model)), 80.0)
    largest, all_of_them = max(memory.sending.buckets), sum(memory.sending.buckets)
    [gpu], node = memory.places, memory.node
    assert node is not None

    def bytes_of(name: str, items: object) -> int:
        return sum(item.bytes for item in items if item.name == name)  # type: ignore[attr-defined]

    assert bytes_of("weights in transfer", gpu.items) == on_gpu * largest
    assert bytes_of("weights in transfer", node.items) == on_host * largest
    assert bytes_of("published weights", node.items) == all_of_them
