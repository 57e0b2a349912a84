"""Check with a timeout that a Ray cluster answers at an address. Ray's own timeout is 40 s, in a call that signals do
not interrupt."""

import socket
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

import ray

CONNECT_DEADLINE_S = 10.0
"""Seconds for a connection to the address, and again for a reply of Ray's protocol."""


def require_answer(address: str) -> None:
    """Raise OSError or ValueError if nothing answers at `host:port` in time. If something other than Ray answers,
    return: `ray.init` then raises an error that describes it."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S).close()
    answered: Future[None] = Future()

    def connect() -> None:
        with suppress(Exception):
            ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        answered.set_result(None)

    Thread(target=connect, name="ray", daemon=True).start()
    try:
        answered.result(CONNECT_DEADLINE_S)
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_DEADLINE_S:g} s") from None
