"""Who is in the memory of devices that roles share."""

from collections.abc import Callable

import pytest

from ppoctl.engines.device_sharing import DeviceSharing
from ppoctl.engines.megatron.ranks import DeviceSharingRanks

EVERYONE = ("actor", "critic", "generator")


@pytest.fixture
def left() -> list[str]:
    return []


@pytest.fixture
def leaves(left: list[str]) -> Callable[[str], Callable[[], None]]:
    return lambda role: lambda: left.append(role)


def test_other_roles_offload_once_before_role_runs(left, leaves):
    turns = DeviceSharing(EVERYONE)
    for role in ("actor", "actor", "critic", "critic", "actor"):
        turns.acquire(role, leaves(role))
    assert left == ["actor", "critic"]


def test_keep_all_delays_offload_until_other_role_runs(left, leaves):
    turns = DeviceSharing(EVERYONE)
    turns.acquire("generator", leaves("generator"))
    with turns.keep_all():
        turns.acquire("actor", leaves("actor"))
        turns.acquire("generator", leaves("generator"))
    assert left == []
    turns.acquire("critic", leaves("critic"))
    assert sorted(left) == ["actor", "generator"]


def test_offload_others_applies_inside_keep_all(left, leaves):
    turns = DeviceSharing(EVERYONE)
    with turns.keep_all():
        turns.acquire("generator", leaves("generator"))
        turns.acquire("actor", leaves("actor"))
        turns.offload_others("generator")
    assert left == ["actor"]
    turns.acquire("critic", leaves("critic"))
    assert left == ["actor", "generator"]


def test_error_inside_keep_all_restores_sharing(left, leaves):
    turns = DeviceSharing(EVERYONE)

    def fails_together() -> None:
        with turns.keep_all():
            turns.acquire("actor", leaves("actor"))
            raise KeyError

    with pytest.raises(KeyError):
        fails_together()
    turns.acquire("critic", leaves("critic"))
    assert left == ["actor"]


def test_failed_offload_is_not_repeated(left, leaves):
    def fails() -> None:
        raise OSError

    turns = DeviceSharing(EVERYONE)
    turns.acquire("actor", fails)
    with pytest.raises(OSError):
        turns.acquire("critic", leaves("critic"))
    turns.acquire("critic", leaves("critic"))
    assert left == []


def test_no_shared_roles_means_no_offload(left, leaves):
    turns = DeviceSharing()
    for role in ("actor", "critic", "generator"):
        turns.acquire(role, leaves(role))
    assert left == []


def test_only_listed_roles_offload(left, leaves):
    turns = DeviceSharing(["generator"])
    assert [role for role in EVERYONE if turns.leaves(role)] == ["generator"]
    for role in ("actor", "generator", "critic", "actor", "generator"):
        turns.acquire(role, leaves(role))
    turns.offload_others("actor")
    assert left == ["generator", "generator"]


class CalledRanks:
    """Ranks that list their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, method: str) -> list[None]:
        self.calls.append(method)
        return [None]

    def weights(self) -> None:
        self.calls.append("weights")


@pytest.mark.parametrize("whole", ["start", "load", "update", "begin_save"])
def test_training_state_offloads_before_weights_only_calls(whole: str):
    ranks = CalledRanks()
    actor = DeviceSharingRanks(ranks, "actor", DeviceSharing(["actor"]))
    for method in (whole, "update", "is_saved", "forward", "reference_forward", "forward", whole):
        actor.call(method)
    actor.weights()
    reads = ["forward", "reference_forward", "forward"]
    assert ranks.calls == [whole, "update", "is_saved", "offload", *reads, whole, "offload", "weights"]


def test_ranks_offloaded_by_other_role_do_not_offload_again():
    ranks, turns = CalledRanks(), DeviceSharing(EVERYONE)
    actor = DeviceSharingRanks(ranks, "actor", turns)
    actor.call("update")
    turns.acquire("generator", lambda: None)
    actor.call("forward")
    assert ranks.calls == ["update", "offload", "forward"]


def test_unlisted_role_keeps_gradients_and_optimizer_loaded():
    ranks = CalledRanks()
    actor = DeviceSharingRanks(ranks, "actor", DeviceSharing(["generator"]))
    for method in ("update", "forward"):
        actor.call(method)
    assert ranks.calls == ["update", "forward"]
