"""The driver and the sending ranks, without processes: which ranks are called, and what is made of their replies."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ppoctl.core.errors import WeightSyncError
from ppoctl.engines.weights.bucket import FlatTensors, TensorSpec
from ppoctl.engines.weights.sending import PARTS, Part, RankSource, SendingRank
from ppoctl.engines.weights.sharing import Shared

NODES = ["a", "b"]


class HoldingRank(SendingRank):
    """A data rank that holds one tensor, on no device."""

    device = torch.device("cpu")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.constant: list[tuple[str, Tensor]] = []

    def weights(self, parts: Sequence[Part]) -> list[Iterator[tuple[str, Tensor]]]:
        named = {"changing": [("a", torch.full((3,), self.value))], "constant": self.constant}
        return [iter(named[part]) for part in parts]

    def weight_specs(self, parts: Sequence[Part] = PARTS) -> list[TensorSpec]:
        return [TensorSpec("a", torch.float32, (3,))]


class Calls:
    """An `Executor` whose ranks are all in this process."""

    def __init__(self, ranks: Sequence[SendingRank], monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = ranks
        self.monkeypatch = monkeypatch

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        return [self._answer(rank, method, *arguments) for rank in ranks]

    def nodes(self) -> Sequence[str]:
        return NODES

    def _answer(self, rank: int, method: str, *arguments: Any) -> Any:
        with self.monkeypatch.context() as placed:
            placed.setattr(torch.distributed, "get_rank", lambda: rank)
            return getattr(self.ranks[rank], method)(*arguments)


def source(monkeypatch: pytest.MonkeyPatch, engine_nodes: Sequence[str], *values: float) -> RankSource:
    calls: Any = Calls([HoldingRank(value) for value in values], monkeypatch)
    groups = [[[rank] for rank in range(len(values))]]
    return RankSource(calls, groups, bucket_bytes=1024, engine_nodes=lambda: engine_nodes)


def test_engines_prefer_shared_memory_over_object_store(monkeypatch) -> None:
    """On nodes a and b engines read memory of a rank on the same node; for c a rank stores the weights."""
    ranks = source(monkeypatch, ["a", "b", "c"], 1.0, 1.0)  # the ranks that keep the memory
    [bucket] = ranks.buckets_for_engines()
    assert [type(content) for content in bucket.contents] == [Shared, Shared, FlatTensors]
    for content in bucket.contents:
        [(name, tensor)] = content.tensors()
        assert (name, tensor.tolist()) == ("a", [1.0, 1.0, 1.0])


def test_lasting_weights_outlive_rank_work_and_driver_buckets(monkeypatch) -> None:
    ranks = source(monkeypatch, ["a"], 1.0, 1.0)
    calls: Any = ranks.executor
    [bucket] = ranks.buckets_for_engines()
    assert bucket.lasting() == bucket  # on a CPU engines read the kept memory; no second copy
    calls.ranks[0].value = 2.0
    calls.ranks[0].stop_sharing()
    list(ranks.buckets())
    [(name, tensor)] = bucket.tensors()
    assert (name, tensor.tolist()) == ("a", [1.0, 1.0, 1.0])
    [again] = ranks.buckets_to_keep()
    assert again.contents == bucket.contents
    assert bucket.tensors()[0][1].tolist() == [2.0, 2.0, 2.0]


def test_constant_part_outlives_transfers_of_the_changing_part(monkeypatch) -> None:
    """The parts are in different buckets, and in different memory of the rank."""
    ranks = source(monkeypatch, ["a"], 1.0)
    calls: Any = ranks.executor
    [rank] = calls.ranks
    rank.constant = [("f", torch.full((2,), 7.0)), ("g", torch.full((5,), 8.0))]
    constant, changing = ranks.buckets_for_engines()
    assert [list(bucket.checksums) for bucket in (constant, changing)] == [["f", "g"], ["a"]]
    rank.value, rank.constant = 2.0, []
    [again] = ranks.buckets_for_engines(("changing",))
    assert (again.tensors()[0][1].tolist(), again.contents) == ([2.0] * 3, changing.contents)
    assert [tensor.tolist() for _, tensor in constant.lasting().tensors()] == [[7.0] * 2, [8.0] * 5]


def test_exactly_one_weight_copy_lasts_for_any_engine_nodes(monkeypatch) -> None:
    for nodes in (["a"], ["b"], ["a", "b"], ["a", "c"], ["c"]):
        [bucket] = source(monkeypatch, nodes, 1.0, 1.0).buckets_for_engines()
        assert len(bucket.lasting().contents) == 1
        [kept] = source(monkeypatch, nodes, 1.0, 1.0).buckets_to_keep()
        assert kept.lasting() == kept
        assert len(kept.contents) == 1


def test_differing_data_ranks_are_named_before_loading(monkeypatch) -> None:
    with pytest.raises(WeightSyncError, match="hold different weights: `a` is float32"):
        list(source(monkeypatch, ["a", "b"], 1.0, 2.0).buckets_for_engines())
