"""A service that misuses HTTP: responses that do not end, are too long, or are not valid HTTP. Ports that do not
answer."""

import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

LOCALHOST = Path(__file__).with_name("localhost.pem")
"""Key and certificate of `localhost` and `mlflow.example`."""
PAUSE_S = 0.05
"""Seconds between two pieces of a slow response."""
_OLD, _CLOSE = b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
_LONG = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_MIB = b" " * (1 << 20)
Pieces = Iterator[bytes]


def _slowly(begin: bytes, piece: bytes, ended: Event) -> Pieces:
    yield begin
    while not ended.wait(PAUSE_S):
        yield piece


def _fast(begin: bytes, piece: bytes, ended: Event) -> Pieces:
    yield begin
    while not ended.is_set():
        yield piece


def _once(*pieces: bytes) -> Callable[[Event], Pieces]:
    return lambda _: iter(pieces)


SLOW: dict[str, Callable[[Event], Pieces]] = {
    "HTTP/1.0, slow body": lambda ended: _slowly(_OLD, b" ", ended),
    "Connection: close, slow body": lambda ended: _slowly(_CLOSE, b" ", ended),
    "slow body of a known length": lambda ended: _slowly(_LONG % 1000, b" ", ended),
    "slow chunks": lambda ended: _slowly(_CHUNKED, b"1\r\n \r\n", ended),
    "slow bytes of a chunk": lambda ended: _slowly(_CHUNKED + b"3e8\r\n", b" ", ended),
    "slow trailers": lambda ended: _slowly(_CHUNKED + b"0\r\n", b"A: b\r\n", ended),
    "slow status line": lambda ended: _slowly(b"", b"H", ended),
    "slow headers": lambda ended: _slowly(b"HTTP/1.1 200 OK\r\n", b"A", ended),
    "100 Continue without end": lambda ended: _fast(b"", b"HTTP/1.1 100 Continue\r\n\r\n", ended),
    "no answer": lambda ended: iter([b""] * (not ended.wait(30))),
}
"""Responses that do not end by themselves."""
LONG: dict[str, Callable[[Event], Pieces]] = {
    "HTTP/1.0, endless body": lambda ended: _fast(_OLD, _MIB, ended),
    "endless chunks": lambda ended: _fast(_CHUNKED, b"100000\r\n" + _MIB + b"\r\n", ended),
    "100 MB": _once(_LONG % 100_000_000, *[b"1" * 1_000_000] * 100),
}
"""Responses of more bytes than a client reads."""
BROKEN: dict[str, Callable[[Event], Pieces]] = {
    "no byte": _once(),
    "no HTTP": _once(b"220 mail.example ready\r\n"),
    "less than its length": _once(_LONG % 10**15 + b"1"),
    "a chunk of less than its length": _once(_CHUNKED + b"fffffffffff\r\n1"),
    "a negative chunk": _once(_CHUNKED + b"-5\r\n1\r\n"),
    "no number as length of a chunk": _once(_CHUNKED + b"one\r\n1\r\n"),
    "a line without end": lambda ended: _fast(b"HTTP/1.1 200 ", b"A" * 1000, ended),
    "trailers without end": lambda ended: _fast(_CHUNKED + b"0\r\n", b"A: b\r\n" * 1000, ended),
    "headers without end": lambda ended: _fast(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", ended),
}
"""Responses that are not valid HTTP."""
WITHOUT_HEADERS = {
    "slow status line", "slow headers", "100 Continue without end", "no answer", "no byte", "no HTTP",
    "a line without end", "headers without end",
}  # fmt: skip
"""Responses whose headers are not complete or not valid."""
REFUSED: dict[str, Callable[[Event], Pieces]] = {
    "302": _once(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"),
    "429": _once(b"HTTP/1.1 429 Busy\r\nRetry-After: 1000\r\nContent-Length: 0\r\n\r\n"),
    "500": _once(b"HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n"),
}
"""Valid responses without the result, by their status."""


@contextmanager
def hostile(answer: Callable[[Event], Pieces], *, reset: bool = False, tls: bool = False) -> Iterator[str]:
    """Serve this response on every connection and yield the address. With `reset` the server then resets the
    connection."""
    ended = Event()
    context = server_tls() if tls else None

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), ExitStack() as opened:
            opened.enter_context(connection).settimeout(30)
            if context is not None:
                connection = opened.enter_context(context.wrap_socket(connection, server_side=True))
            connection.recv(1 << 16)
            for piece in answer(ended):
                connection.sendall(piece)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # closing with unread data would reset the connection
                pass

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http{'s' * tls}://127.0.0.1:{listener.getsockname()[1]}/score"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def server_tls() -> ssl.SSLContext:
    """Return the TLS settings of a server with the certificate `LOCALHOST`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(LOCALHOST)
    return context


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield an address that does not react to connections: Linux drops them while the listener's queue is full."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"


_bound: list[socket.socket] = []


def closed_port() -> str:
    """Return the address of a port without a listener. It stays bound until this process ends, so that no other
    process listens on it."""
    _bound.append(socket.socket())
    _bound[-1].bind(("127.0.0.1", 0))
    return f"127.0.0.1:{_bound[-1].getsockname()[1]}"
