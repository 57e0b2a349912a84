"""Whether a Ray answers at an address, asked within a time limit: Ray's own limit is 40 s, in a call that no signal
ends."""

import socket
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

import ray

CONNECT_DEADLINE_S = 10.0
"""Time for the address of a Ray to take a connection, and for what listens there to answer as a Ray."""


def require_answer(address: str) -> None:
    """Raise OSError or ValueError where nothing answers at `host:port` in time. What answers otherwise than a Ray
    passes: `ray.init` says in its own words what is wrong."""
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
