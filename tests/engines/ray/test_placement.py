"""Which process runs on which device: by hand."""

import pytest

from ppoctl.engines.ray.placement import DevicePlacement

SIZES = {"actor": 4, "critic": 2, "generator": 1}


def test_colocated_roles_share_devices_from_the_first_on():
    placement = DevicePlacement(SIZES, colocated=True)
    assert (placement.devices, placement.processes) == (4, 7)
    assert [placement.bundle_of("actor", rank) for rank in range(4)] == [(0, 1 / 3), (1, 1 / 2), (2, 1.0), (3, 1.0)]
    assert [placement.bundle_of("critic", rank) for rank in range(2)] == [(0, 1 / 3), (1, 1 / 2)]
    assert placement.bundle_of("generator", 0) == (0, 1 / 3)
    assert placement.bundles(has_gpus=True) == [{"CPU": n, "GPU": 1.0} for n in (3.0, 2.0, 1.0, 1.0)]
    assert placement.describe() == "actor 4, critic 2, generator 1, colocated"


def test_roles_apart_have_devices_of_their_own_one_role_after_the_other():
    placement = DevicePlacement(SIZES, colocated=False)
    assert (placement.devices, placement.processes) == (7, 7)
    places = [placement.bundle_of(role, rank) for role, size in SIZES.items() for rank in range(size)]
    assert places == [(bundle, 1.0) for bundle in range(7)]
    assert placement.bundles(has_gpus=False) == [{"CPU": 1.0}] * 7
    with pytest.raises(KeyError):
        placement.bundle_of("reward", 0)
