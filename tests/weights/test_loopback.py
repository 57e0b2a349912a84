"""The rendezvous of a process group listens only on the requested interface."""

import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore, rendezvous

from ppoctl.engines.vllm.vllm_environment import join_tensor_ranks
from ppoctl.engines.weights.broadcast import meeting
from ppoctl.engines.weights.loopback import open_store

SOON = timedelta(seconds=20)


def listening_addresses(port: int) -> set[str]:
    """Return the addresses at which this process listens on the port."""
    mine = psutil.Process(os.getpid()).net_connections("inet")
    return {each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


def test_store_listens_only_on_its_address():
    store = open_store("127.0.0.1", 0, SOON)
    assert listening_addresses(store.port) == {"127.0.0.1"}
    TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=SOON).set("said", "heard")
    assert store.get("said") == b"heard"


def test_weight_link_rendezvous_listens_only_on_its_address():
    with meeting("127.0.0.1", 20.0) as address:
        host, port = address.split(":")
        assert listening_addresses(int(port)) == {host}
    assert not listening_addresses(int(port))


def test_tensor_ranks_of_engine_listen_only_on_loopback(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # restored after the test
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join_tensor_ranks(0, 1, f"127.0.0.1:{port}")
    store, rank, size = next(rendezvous("env://", timeout=SOON))
    store.set("said", "heard")
    assert (rank, size, store.get("said")) == (0, 1, b"heard")
    assert listening_addresses(port) == {"127.0.0.1"}
