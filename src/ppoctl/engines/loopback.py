"""Process groups of one machine, which work without a network."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def is_loopback(address: str) -> bool:
    """Of a host, with or without a port."""
    return address.startswith(("127.", "localhost"))


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
