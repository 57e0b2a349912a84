"""HTTP client with one time limit for a complete exchange, whatever the server sends. It imports only the standard
library.

    Connection.exchange: name lookup, connection, TLS, request, status, headers, body: together within `limit_s`

The time limit of a socket restarts with each byte, so `http.client` waits forever for a server that sends a byte now
and then. Here each call on the socket gets the remaining time of the exchange.
"""

import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from threading import Thread
from typing import Any, cast
from urllib.parse import urlsplit

LeftS = Callable[[], float]
"""Function that returns the remaining seconds, or raises TimeoutError if no time is left."""


@dataclass(frozen=True)
class HttpResponse:
    """Response of a server."""

    status: int
    headers: Mapping[str, str]
    """Header values by lowercase name."""
    body: bytes
    is_whole: bool
    """Whether `body` is complete. False: the server's body is longer than the client reads, and `body` contains only
    the first bytes."""


class Connection:
    """Connection to a server, which stays open between exchanges. One thread calls `exchange`; any thread may call
    `cut`."""

    def __init__(self, url: str, *, limit_s: float, most_bytes: int) -> None:
        """Set the limits: read at most `most_bytes` of a body; 0: do not wait for the body. Raises ValueError or
        HTTPException if the URL is not valid."""
        address = urlsplit(url)
        host = address.netloc.rpartition("@")[2]
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._http = HTTPConnection(host) if self._tls is None else HTTPSConnection(host, context=self._tls)
        self._target = (address.path or "/") + (f"?{address.query}" if address.query else "")
        self._limit_s, self._most_bytes = limit_s, most_bytes
        self._left_s: LeftS = time_limit(limit_s)
        self._socket: socket.socket | None = None
        self._is_cut = False

    def exchange(
        self, method: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, target: str = ""
    ) -> HttpResponse:
        """Send a request and read the response. Raises TimeoutError if the exchange exceeds the time limit, and
        OSError or HTTPException if the response is not valid. The connection is then closed."""
        was_open, self._left_s = self._socket is not None, time_limit(self._limit_s)
        request = (method, target or self._target, body, dict(headers or {}))
        try:
            try:
                return self._exchanged(*request)
            except (HTTPException, OSError):
                # The server may have closed the connection since the last exchange, so connect again once.
                if not was_open or self._is_cut:
                    raise
                self.close()
                return self._exchanged(*request)
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError):  # the length is not a number, or the TLS connection was closed early
                raise HTTPException(str(error)) from error
            raise

    def _exchanged(self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]) -> HttpResponse:
        if self._socket is None:
            self._connect()
        self._http.request(method, target, body, headers)
        response = self._http.getresponse()
        read = response.read(self._most_bytes + 1) if self._most_bytes else b""
        if self._is_cut:  # the body may then be incomplete
            raise ConnectionAbortedError("the connection was cut")
        is_whole = len(read) <= self._most_bytes
        if self._most_bytes and is_whole and response.length:
            raise IncompleteRead(read, response.length)
        if not response.isclosed() or self._http.sock is None:
            self.close()
        names = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(response.status, names, read[: self._most_bytes], is_whole)

    def _connect(self) -> None:
        self._hold(connected(self._http.host, self._http.port, self._left_s, self._hold))
        assert self._socket is not None
        if self._tls is not None:
            self._socket.settimeout(self._left_s())
            host = self._http.host
            tls = self._tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
            self._hold(tls)
            tls.do_handshake()
        self._http.sock = cast(socket.socket, _Limited(self._socket, lambda: self._left_s()))

    def _hold(self, new_socket: socket.socket) -> None:
        """Store the socket, so that `cut` can shut it down."""
        self._socket = new_socket
        if self._is_cut:
            raise ConnectionAbortedError("the connection was cut")

    def close(self) -> None:
        """Close the connection; the next exchange opens it again. Only the thread that calls `exchange` may call
        this."""
        self._http.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def cut(self) -> None:
        """End the connection permanently. A running exchange fails at once."""
        self._is_cut = True
        if (held := self._socket) is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


def time_limit(limit_s: float) -> LeftS:
    """Return a function that returns the remaining time; the time limit starts now."""
    until = time.monotonic() + limit_s

    def left_s() -> float:
        if (left_s := until - time.monotonic()) <= 0:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return left_s

    return left_s


def connected(
    host: str, port: int, left_s: LeftS, hold: Callable[[socket.socket], None] = lambda _: None
) -> socket.socket:
    """Return a connection to the first address of the host that accepts a connection. `hold` receives each socket
    before it connects. Raises OSError."""
    addresses = _addresses(host, port, left_s())
    failed: OSError | None = None
    for tried, (family, kind, protocol, _, address) in enumerate(addresses):
        new_socket = socket.socket(family, kind, protocol)
        try:
            hold(new_socket)
            new_socket.settimeout(left_s() / (len(addresses) - tried))
            new_socket.connect(address)
            new_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return new_socket
        except OSError as error:
            new_socket.close()
            failed = error
    raise failed or OSError(f"`{host}` has no address")


def _addresses(host: str, port: int, limit_s: float) -> list[Any]:
    """Return the addresses of a host. The system's name lookup has no time limit, so it runs in a thread."""
    addresses: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            addresses.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            addresses.set_exception(error)

    Thread(target=look_up, name="name lookup", daemon=True).start()
    return addresses.result(limit_s)


class _Limited:
    """Socket for `http.client` whose calls never exceed the remaining time. `Connection` closes it."""

    def __init__(self, inner: socket.socket, left_s: LeftS) -> None:
        self._inner, self._left_s = inner, left_s

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._inner.settimeout(self._left_s())
            view = view[self._inner.send(view) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_ResponseReader(self._inner, self._left_s))

    def close(self) -> None:
        """Do nothing: a response may still be read from the socket."""


class _ResponseReader(io.RawIOBase):
    def __init__(self, inner: socket.socket, left_s: LeftS) -> None:
        self._inner, self._left_s = inner, left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._inner.settimeout(self._left_s())
        return self._inner.recv_into(buffer)
