"""A stop while Ray starts: nothing waits for a Ray that does not answer, and Ray does not replace our signal
handlers."""

import os
import signal
import socket
import sys
import time
from types import FrameType

import pytest
import ray

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.ray.cluster import _keeping_signal_handler, join


def test_join_times_out_if_ray_does_not_answer() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EnvironmentProblemError) as caught:
            join(address, 1.0)
    message = caught.value.message
    assert message == f"no Ray cluster answers at `cluster.ray_address = {address}`: no answer within 1 s"
    assert time.monotonic() - began < 10


def test_signal_during_ray_start_reaches_our_handler() -> None:
    met: list[int] = []

    def ours(number: int, frame: FrameType | None) -> None:
        met.append(number)

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with _keeping_signal_handler():
            ray._private.utils.set_sigterm_handler(lambda number, _: sys.exit(number))  # as `ray.init` does first
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert met == [signal.SIGTERM]
