"""Process groups on one machine. They work without a network, and no other machine can reach them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported


def is_loopback(address: str) -> bool:
    """Whether a host, with or without a port, is a loopback address."""
    return address.startswith(("127.", "localhost"))


def open_store(host: str, port: int, timeout: timedelta, *, world_size: int | None = None) -> TCPStore:
    """Return the store in which processes meet. The store accepts every connection, so it listens only at `host`.
    torch's own store would listen on every address of the machine. With `world_size`, the function waits for all
    members. Raises OSError or DistError."""
    listener = socket.create_server((host, port))
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=world_size is not None,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Context in which gloo uses the loopback interface unless another is set. By default gloo resolves the host
    name, and fails on a laptop without a network."""
    with environment("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME") or "lo"):
        yield


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Context in which an environment variable is set."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
