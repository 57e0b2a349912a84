"""Network of the HTTP client: each operation gets the remaining time of its try, and any thread can end all
connections."""

import socket
import ssl
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any

import httpcore

_PIECE_BYTES = 16 << 10
"""Bytes that are sent at once. The system accepts them in one call, so that the time limit does not restart."""


def _left_s(deadline: float | None, late: type[httpcore.TimeoutException]) -> float:
    """Return the seconds that remain of the time limit. Raises `late` if no time remains."""
    assert deadline is not None, "the client sets all time limits"
    if (left_s := deadline - time.monotonic()) <= 0:
        raise late
    return left_s


class HttpNetwork(httpcore.NetworkBackend):
    """Network whose time limits are times on the monotonic clock. Any thread can end its connections."""

    def __init__(self) -> None:
        self.streams: set[_Stream] = set()
        self.is_cut = False

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002 - never set
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002 - never set
    ) -> httpcore.NetworkStream:
        """Return a connection to the first address of the host that accepts a connection. Raises ConnectError or
        ConnectTimeout."""
        if self.is_cut:
            raise httpcore.ConnectError("the connection was closed")
        addresses = _addresses(host, port, _left_s(timeout, httpcore.ConnectTimeout))
        failed: Exception = httpcore.ConnectError(f"`{host}` has no address")
        for tried, address in enumerate(addresses):
            share_s = _left_s(timeout, httpcore.ConnectTimeout) / (len(addresses) - tried)
            try:
                return _Stream(httpcore.SyncBackend().connect_tcp(address, port, share_s), self)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed

    def cut(self) -> None:
        """End all connections permanently. Running operations fail at once."""
        self.is_cut = True
        for stream in tuple(self.streams):
            stream.cut()


class _Stream(httpcore.NetworkStream):
    """Connection whose time limits are times on the monotonic clock."""

    def __init__(self, inner: httpcore.NetworkStream, network: HttpNetwork) -> None:
        self._inner, self._network = inner, network
        network.streams.add(self)
        if network.is_cut:
            self.cut()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE_BYTES):
            self._inner.write(buffer[start : start + _PIECE_BYTES], _left_s(timeout, httpcore.WriteTimeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self._network.streams.discard(self)
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left_s), self._network)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def close(self) -> None:
        self._network.streams.discard(self)
        self._inner.close()

    def cut(self) -> None:
        with suppress(OSError):
            self.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _addresses(host: str, port: int, limit_s: float) -> list[str]:
    """Return the addresses of a host. The system's name lookup has no time limit, so it runs in a thread."""
    found: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            found.set_exception(error)

    Thread(target=look_up, name="name lookup", daemon=True).start()
    try:
        return [address[0] for *_, address in found.result(limit_s)]
    except TimeoutError as error:
        raise httpcore.ConnectTimeout from error
    except (OSError, ValueError) as error:
        raise httpcore.ConnectError(str(error)) from error
