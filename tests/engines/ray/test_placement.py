"""Placement of processes on devices, by hand."""

import pytest

from ppoctl.engines.ray.placement import DevicePlacement

SIZES = {"actor": 4, "critic": 2, "generator": 1}


def test_colocated_roles_share_devices_from_first():
    placement = DevicePlacement(SIZES, colocated=True)
    assert (placement.devices, placement.processes) == (4, 7)
    assert [placement.bundle_of("actor", rank) for rank in range(4)] == [(0, 1 / 3), (1, 1 / 2), (2, 1.0), (3, 1.0)]
    assert [placement.bundle_of("critic", rank) for rank in range(2)] == [(0, 1 / 3), (1, 1 / 2)]
    assert placement.bundle_of("generator", 0) == (0, 1 / 3)
    assert placement.bundles(has_gpus=True) == [{"CPU": n, "GPU": 1.0} for n in (3.0, 2.0, 1.0, 1.0)]
    assert placement.describe() == "actor 4, critic 2, generator 1, colocated"


def test_separate_roles_get_consecutive_devices():
    placement = DevicePlacement(SIZES, colocated=False)
    assert (placement.devices, placement.processes) == (7, 7)
    places = [placement.bundle_of(role, rank) for role, size in SIZES.items() for rank in range(size)]
    assert places == [(bundle, 1.0) for bundle in range(7)]
    assert placement.bundles(has_gpus=False) == [{"CPU": 1.0}] * 7
    with pytest.raises(KeyError):
        placement.bundle_of("reward", 0)


def test_engines_of_one_gpu_share_its_bundle():
    """Six engines, three on each of two GPUs. The second GPU has a rank of the actor, too, and none of the critic."""
    sizes, together = {"actor": 2, "critic": 1, "generator": 6}, {"generator": 3, "actor": 1}
    placement = DevicePlacement(sizes, colocated=True, together=together)
    assert (placement.devices, placement.processes) == (2, 9)
    assert [placement.bundle_of("generator", rank) for rank in (0, 2, 3, 5)] == [(0, 1 / 5)] * 2 + [(1, 1 / 4)] * 2
    assert placement.bundle_of("critic", 0) == (0, 1 / 5)
    assert placement.bundles(has_gpus=True) == [{"CPU": 5.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}]
    apart = DevicePlacement(sizes, colocated=False, together=together)
    assert (apart.devices, apart.processes) == (5, 9)
    assert [apart.bundle_of("generator", rank) for rank in (2, 3)] == [(3, 1 / 3), (4, 1 / 3)]
    assert apart.bundles(has_gpus=True)[2:] == [{"CPU": 1.0, "GPU": 1.0}] + [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert apart.neighbours("generator", 0, ["a", "a", "a", "b", "c"]) == 3


def test_neighbours_count_role_processes_on_same_node():
    placement, nodes = DevicePlacement(SIZES, colocated=False), ["a", "a", "a", "b", "b", "c", "c"]
    assert [placement.neighbours("actor", rank, nodes) for rank in range(4)] == [3, 3, 3, 1]
    assert [placement.neighbours("critic", rank, nodes) for rank in range(2)] == [1, 1]
    colocated = DevicePlacement({"actor": 64, "critic": 8}, colocated=True)
    eight_nodes = [f"node-{bundle // 8}" for bundle in range(64)]
    assert colocated.neighbours("actor", 63, eight_nodes) == 8, "of 96 threads each has 12"


def test_gpu_nodes_fill_in_order_and_cpu_nodes_split_evenly():
    placement = DevicePlacement({"actor": 5, "critic": 2}, colocated=True)
    assert placement.nodes_of_bundles([4, 4]) == [0, 0, 0, 0, 1]
    assert placement.nodes_of_bundles([1, 8]) == [0, 1, 1, 1, 1]
    assert placement.nodes_of_bundles([0, 0]) == [0, 0, 0, 1, 1]
    assert placement.nodes_of_bundles([0, 0, 0, 0, 0, 0]) == [0, 1, 2, 3, 4]
