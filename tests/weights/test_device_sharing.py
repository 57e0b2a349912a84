"""Which roles are on the devices that they share."""

from collections.abc import Callable

import pytest

from fakes.clock import Clock
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.engines.megatron.ranks import DeviceSharingRanks
from ppoctl.engines.weights.device_sharing import DeviceSharing

EVERYONE = ("actor", "critic", "generator")


@pytest.fixture
def left() -> list[str]:
    return []


@pytest.fixture
def leaves(left: list[str]) -> Callable[[str], Callable[[], None]]:
    return lambda role: lambda: left.append(role)


def test_other_roles_offload_once_before_role_runs(left, leaves):
    sharing = DeviceSharing(EVERYONE)
    for role in ("actor", "actor", "critic", "critic", "actor"):
        sharing.acquire(role, leaves(role))
    assert left == ["actor", "critic"]


def test_keep_all_delays_offload_until_other_role_runs(left, leaves):
    sharing = DeviceSharing(EVERYONE)
    sharing.acquire("generator", leaves("generator"))
    with sharing.keep_all():
        sharing.acquire("actor", leaves("actor"))
        sharing.acquire("generator", leaves("generator"))
    assert left == []
    sharing.acquire("critic", leaves("critic"))
    assert sorted(left) == ["actor", "generator"]


def test_offload_others_applies_inside_keep_all(left, leaves):
    sharing = DeviceSharing(EVERYONE)
    with sharing.keep_all():
        sharing.acquire("generator", leaves("generator"))
        sharing.acquire("actor", leaves("actor"))
        sharing.offload_others("generator")
    assert left == ["actor"]
    sharing.acquire("critic", leaves("critic"))
    assert left == ["actor", "generator"]


def test_error_inside_keep_all_restores_sharing(left, leaves):
    sharing = DeviceSharing(EVERYONE)

    def fails_together() -> None:
        with sharing.keep_all():
            sharing.acquire("actor", leaves("actor"))
            raise KeyError

    with pytest.raises(KeyError):
        fails_together()
    sharing.acquire("critic", leaves("critic"))
    assert left == ["actor"]


def test_failed_offload_is_not_repeated(left, leaves):
    def fails() -> None:
        raise OSError

    sharing = DeviceSharing(EVERYONE)
    sharing.acquire("actor", fails)
    with pytest.raises(OSError):
        sharing.acquire("critic", leaves("critic"))
    sharing.acquire("critic", leaves("critic"))
    assert left == []


def test_no_shared_roles_means_no_offload(left, leaves):
    sharing = DeviceSharing()
    for role in ("actor", "critic", "generator"):
        sharing.acquire(role, leaves(role))
    assert left == []


def test_only_listed_roles_offload(left, leaves):
    sharing = DeviceSharing(["generator"])
    assert [role for role in EVERYONE if sharing.leaves(role)] == ["generator"]
    for role in ("actor", "generator", "critic", "actor", "generator"):
        sharing.acquire(role, leaves(role))
    sharing.offload_others("actor")
    assert left == ["generator", "generator"]


class CalledRanks:
    """Ranks that record their calls."""

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
    ranks, sharing = CalledRanks(), DeviceSharing(EVERYONE)
    actor = DeviceSharingRanks(ranks, "actor", sharing)
    actor.call("update")
    sharing.acquire("generator", lambda: None)
    actor.call("forward")
    assert ranks.calls == ["update", "offload", "forward"]


def test_time_of_every_offload_is_measured_once(monkeypatch: pytest.MonkeyPatch):
    """Others offload for 3 and 4 s, the actor its own optimizer for 5 s; nothing waits in a call without the
    device."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)

    def takes(seconds: float) -> Callable[[], None]:
        def leave() -> None:
            clock.now += seconds

        return leave

    class SlowRanks(CalledRanks):
        def call(self, method: str) -> list[None]:
            clock.now += {"offload": 5.0, "update": 100.0, "forward": 10.0}.get(method, 0.0)
            return super().call(method)

    sharing, ranks = DeviceSharing(EVERYONE), SlowRanks()
    actor = DeviceSharingRanks(ranks, "actor", sharing)
    MEASUREMENTS.take()
    with sharing.keep_all():
        sharing.acquire("critic", takes(3.0))
        sharing.acquire("generator", takes(4.0))
    actor.call("update")
    assert MEASUREMENTS.take().moved_s == 7.0
    actor.call("take_usage")
    actor.call("forward")
    assert MEASUREMENTS.take().moved_s == 5.0
    sharing.acquire("critic", takes(3.0))
    assert MEASUREMENTS.take().moved_s == 5.0
    actor.call("take_usage")
    assert MEASUREMENTS.take().moved_s == 0.0
    assert ranks.calls == ["update", "take_usage", "offload", "forward", "offload", "take_usage"]


def test_unlisted_role_keeps_gradients_and_optimizer_loaded():
    ranks = CalledRanks()
    actor = DeviceSharingRanks(ranks, "actor", DeviceSharing(["generator"]))
    for method in ("update", "forward"):
        actor.call(method)
    assert ranks.calls == ["update", "forward"]
