"""Which process runs on which device: by hand."""

import pytest

from ppoctl.engines.ray.placement import DevicePlacement

SIZES = {"actor": 4, "critic": 2, "generator": 1}


def test_colocated_roles_share_devices_from_the_first_on():
    room = DevicePlacement(SIZES, colocated=True)
    assert (room.devices, room.processes) == (4, 7)
    assert [room.place("actor", rank) for rank in range(4)] == [(0, 1 / 3), (1, 1 / 2), (2, 1.0), (3, 1.0)]
    assert [room.place("critic", rank) for rank in range(2)] == [(0, 1 / 3), (1, 1 / 2)]
    assert room.place("generator", 0) == (0, 1 / 3)
    assert room.bundles(has_gpus=True) == [{"CPU": n, "GPU": 1.0} for n in (3.0, 2.0, 1.0, 1.0)]
    assert room.describe() == "actor 4, critic 2, generator 1, colocated"


def test_roles_apart_have_devices_of_their_own_one_role_after_the_other():
    room = DevicePlacement(SIZES, colocated=False)
    assert (room.devices, room.processes) == (7, 7)
    places = [room.place(role, rank) for role, size in SIZES.items() for rank in range(size)]
    assert places == [(bundle, 1.0) for bundle in range(7)]
    assert room.bundles(has_gpus=False) == [{"CPU": 1.0}] * 7
    with pytest.raises(KeyError):
        room.place("reward", 0)
