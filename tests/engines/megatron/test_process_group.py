"""The interface that gloo gets, and the roles for which gloo groups are created."""

import os
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron import process_group
from ppoctl.engines.megatron.process_group import GroupTimeouts, RankInfo, ensure_process_group, join
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import OpenRank

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
HERE, ELSEWHERE = "127.0.0.1:7", "10.0.0.1:7"


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments for torch and Megatron-Core in a process without a group: the interface at each call, and
    whether Megatron-Core is to create gloo groups."""
    found: dict[str, Any] = {}

    def join_world(*_: Any, **__: Any) -> None:
        found["world"] = os.environ.get("GLOO_SOCKET_IFNAME")

    def make_groups(**keywords: Any) -> None:
        found["groups"] = os.environ.get("GLOO_SOCKET_IFNAME")
        found["gloo"] = keywords["create_gloo_process_groups"]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group, "_met_at", "")  # restored after the test
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: "world" in found)
    monkeypatch.setattr(torch.distributed, "init_process_group", join_world)
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: "groups" in found)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", make_groups)
    monkeypatch.setattr(random, "initialize_rng_tracker", lambda **_: None)
    monkeypatch.setattr(ProcessGroupCollection, "use_mpu_process_groups", lambda: ProcessGroupCollection())
    return found


@pytest.mark.parametrize(("address", "interface"), [(HERE, "lo"), ("localhost:7", "lo"), (ELSEWHERE, None)])
def test_ranks_of_one_machine_use_loopback_and_others_the_network(arguments, address, interface):
    join(RankInfo(rank=1, world_size=2, address=address), GroupTimeouts(meet_s=1.0, collective_s=1.0))
    ensure_process_group(ParallelTable(data=2))
    assert (arguments["world"], arguments["groups"]) == (interface, interface)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_exported_gloo_interface_is_kept(arguments, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    ensure_process_group(ParallelTable())
    assert (arguments["world"], arguments["groups"], os.environ["GLOO_SOCKET_IFNAME"]) == ("eth7", "eth7", "eth7")


def test_single_process_uses_loopback_and_creates_gloo_groups(arguments):
    """Roles of one process share the groups: the first may have a full optimizer, and the second a distributed
    one."""
    ensure_process_group(ParallelTable())
    assert arguments == {"world": "lo", "groups": "lo", "gloo": True}


@pytest.mark.parametrize("is_split", [True, False])
def test_gloo_groups_exist_only_with_distributed_optimizer(arguments, is_split):
    join(RankInfo(rank=1, world_size=2, address=ELSEWHERE), GroupTimeouts(meet_s=1.0, collective_s=1.0))
    ensure_process_group(ParallelTable(data=2, distributed_optimizer=is_split))
    assert arguments["gloo"] == is_split


def opened(parallel: ParallelTable) -> None:
    """Open the second rank of a role whose first rank never comes."""
    settings = TrainerSettings("actor", "none", torch.float32, BySequences(microbatch_seqs=1), parallel)
    with pytest.raises(EnvironmentProblemError):
        OpenRank(settings, start_deadline_s=0.2)(1, 2, "127.0.0.1:1")


def test_tensor_ranks_use_one_gpu_queue_unless_exported(monkeypatch):
    """Megatron-Core relies on one queue: messages of tensor ranks must begin before the matrix product that they
    overlap."""
    monkeypatch.delenv(QUEUES, raising=False)
    opened(ParallelTable(data=2))
    assert QUEUES not in os.environ
    opened(ParallelTable(tensor=2))
    assert os.environ[QUEUES] == "1"
    monkeypatch.setenv(QUEUES, "8")
    opened(ParallelTable(tensor=2))
    assert os.environ[QUEUES] == "8"
