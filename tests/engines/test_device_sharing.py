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


def test_the_others_leave_once_before_a_role_works(left, leaves):
    turns = DeviceSharing(EVERYONE)
    for role in ("actor", "actor", "critic", "critic", "actor"):
        turns.acquire(role, leaves(role))
    assert left == ["actor", "critic"]


def test_nobody_leaves_while_two_work_together_and_both_do_afterwards(left, leaves):
    turns = DeviceSharing(EVERYONE)
    turns.acquire("generator", leaves("generator"))
    with turns.keep_all():
        turns.acquire("actor", leaves("actor"))
        turns.acquire("generator", leaves("generator"))
    assert left == []
    turns.acquire("critic", leaves("critic"))
    assert sorted(left) == ["actor", "generator"]


def test_the_others_leave_also_while_two_work_together_when_all_the_memory_is_asked_for(left, leaves):
    turns = DeviceSharing(EVERYONE)
    with turns.keep_all():
        turns.acquire("generator", leaves("generator"))
        turns.acquire("actor", leaves("actor"))
        turns.offload_others("generator")
    assert left == ["actor"]
    turns.acquire("critic", leaves("critic"))
    assert left == ["actor", "generator"]


def test_an_error_while_two_work_together_ends_that(left, leaves):
    turns = DeviceSharing(EVERYONE)

    def fails_together() -> None:
        with turns.keep_all():
            turns.acquire("actor", leaves("actor"))
            raise KeyError

    with pytest.raises(KeyError):
        fails_together()
    turns.acquire("critic", leaves("critic"))
    assert left == ["actor"]


def test_whoever_fails_to_leave_is_not_asked_again(left, leaves):
    def fails() -> None:
        raise OSError

    turns = DeviceSharing(EVERYONE)
    turns.acquire("actor", fails)
    with pytest.raises(OSError):
        turns.acquire("critic", leaves("critic"))
    turns.acquire("critic", leaves("critic"))
    assert left == []


def test_without_turns_everyone_stays(left, leaves):
    turns = DeviceSharing()
    for role in ("actor", "critic", "generator"):
        turns.acquire(role, leaves(role))
    assert left == []


def test_only_listed_roles_leave_whoever_works(left, leaves):
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
def test_gradients_and_optimizer_leave_before_weights_alone_are_read(whole: str):
    ranks = CalledRanks()
    actor = DeviceSharingRanks(ranks, "actor", DeviceSharing(["actor"]))
    for method in (whole, "update", "is_saved", "forward", "reference_forward", "forward", whole):
        actor.call(method)
    actor.weights()
    reads = ["forward", "reference_forward", "forward"]
    assert ranks.calls == [whole, "update", "is_saved", "offload", *reads, whole, "offload", "weights"]


def test_ranks_that_another_role_has_had_leave_do_not_leave_again():
    ranks, turns = CalledRanks(), DeviceSharing(EVERYONE)
    actor = DeviceSharingRanks(ranks, "actor", turns)
    actor.call("update")
    turns.acquire("generator", lambda: None)
    actor.call("forward")
    assert ranks.calls == ["update", "offload", "forward"]


def test_ranks_that_stay_keep_gradients_and_optimizer():
    ranks = CalledRanks()
    actor = DeviceSharingRanks(ranks, "actor", DeviceSharing(["generator"]))
    for method in ("update", "forward"):
        actor.call(method)
    assert ranks.calls == ["update", "forward"]
