"""Process groups of one machine, which work without a network and are not heard on one."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported


def is_loopback(address: str) -> bool:
    """Whether a host, with or without a port, is this machine by its loopback address."""
    return address.startswith(("127.", "localhost"))


def open_store(host: str, port: int, timeout: timedelta, *, world_size: int | None = None) -> TCPStore:
    """The store in which processes meet; whoever reaches it is let in. It listens at `host` only: torch's own would
    listen at every address of the machine. Waits for all where `world_size` is given. Raises OSError, DistError."""
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
    """gloo resolves the host name unless told an interface; a laptop without a network has none."""
    with environment("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME") or "lo"):
        yield


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
