"""Check with a timeout that a Ray cluster answers at an address. Ray's own timeout is 40 s, and signals do not
interrupt Ray's call."""

import socket
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

import ray

CONNECT_DEADLINE_S = 10.0
"""Timeout in seconds of the connection to the address, and again of the reply in Ray's protocol."""


def require_answer(address: str, deadline_s: float = CONNECT_DEADLINE_S) -> None:
    """Raise OSError or ValueError if no program answers at `host:port` in time. If a program other than Ray answers,
    return normally: `ray.init` then raises an error that describes the problem."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=deadline_s).close()
    answered: Future[None] = Future()

    def connect() -> None:
        with suppress(Exception):
            ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        answered.set_result(None)

    Thread(target=connect, name="ray", daemon=True).start()
    try:
        answered.result(deadline_s)
    except TimeoutError:
        raise TimeoutError(f"no answer within {deadline_s:g} s") from None
