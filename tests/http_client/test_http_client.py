"""HTTP client: time limits of each part of a try, retries, TLS and proxies."""

import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fakes.hostile import LOCALHOST, SLOW, black_hole, hostile, server_tls
from ppoctl.core.http_client import (
    HttpClient,
    HttpLimits,
    HttpResponse,
    NoAnswerError,
    Retries,
    backoff_s,
    require_listener,
)
from rewards.scoring_service import serving

GENEROUS = HttpLimits(20.0, 1000)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def failure(url: str, limits: HttpLimits, body: bytes | None = None) -> tuple[str, bool, float]:
    """Return the message of a request without an answer, whether it is about time, and the seconds that it took."""
    began = time.monotonic()
    with closing(HttpClient(url, limits)) as client, pytest.raises(NoAnswerError) as caught:
        client.request("POST", body)
    return str(caught.value), caught.value.is_late, time.monotonic() - began


def test_connection_first_byte_and_answer_have_own_limits() -> None:
    limits = HttpLimits(2.0, 1000, first_byte_s=0.4)
    with black_hole() as url:
        message, is_late, took_s = failure(url, replace(limits, connect_s=0.1))
    assert (message, is_late) == ("no connection within 0.1 s", True)
    assert took_s < 1.9
    with hostile(SLOW["no answer"]) as url:
        message, is_late, took_s = failure(url, limits)
    assert (message, is_late) == ("no answer within 0.4 s", True)
    assert 0.4 <= took_s < 1.9
    with hostile(SLOW["slow chunks"]) as url:
        message, is_late, took_s = failure(url, HttpLimits(0.8, 1000, first_byte_s=0.7))
    assert (message, is_late) == ("no answer within 0.8 s", True)
    assert 0.8 <= took_s < 5


def test_name_lookup_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        ended.wait(30)
        return []

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert failure("http://anywhere/", HttpLimits(0.2, 1000))[:2] == ("no connection within 0.2 s", True)
    ended.set()


@pytest.mark.parametrize("bytes_at_once", [0, 1000])
def test_server_that_reads_slowly_is_late(bytes_at_once: int) -> None:
    ended = threading.Event()

    def read(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not ended.wait(0.02):
                connection.recv(bytes_at_once) if bytes_at_once else None

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=read, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        message, is_late, took_s = failure(url, HttpLimits(0.3, 1000), b" " * (16 << 20))
        ended.set()
        thread.join()
    assert (message in ("no answer within 0.3 s", "no connection within 0.3 s"), is_late) == (True, True)
    assert took_s < 3


def test_body_of_exactly_the_limit_is_whole() -> None:
    with hostile(lambda _: iter([b"HTTP/1.0 200 OK\r\nX-Two: 2\r\n\r\n", b"abcde"])) as url:
        for most, body, is_whole in ((5, b"abcde", True), (4, b"abcd", False), (0, b"", True)):
            with closing(HttpClient(url, HttpLimits(20.0, most))) as client:
                assert client.request("GET") == HttpResponse(200, {"x-two": "2"}, body, is_whole)


def test_backoff_grows_and_is_deterministic() -> None:
    retries = Retries(tries=9, backoff_s=2.0, give_up_s=100)
    failed = NoAnswerError("no answer")

    def gaps() -> list[float]:
        chance = Random(b"a request")
        return [backoff_s(retries, tried, failed, chance) for tried in range(1, 9)]

    assert gaps() == gaps()
    for gap, planned in zip(gaps(), (2, 4, 8, 16, 32, 60, 60, 60), strict=True):
        assert 0.5 * planned <= gap <= 1.5 * planned
    for asked_for, seconds in (("7", 7), ("700", 100)):
        busy = HttpResponse(429, {"retry-after": asked_for}, b"", is_whole=True)
        assert backoff_s(retries, 1, busy, Random(1)) == seconds


def test_last_temporary_answer_is_returned_with_number_of_tries() -> None:
    retries = Retries(tries=3, backoff_s=0.01)
    with serving() as service, closing(HttpClient(service.url, GENEROUS, retries)) as client:
        for response, status, tries in (("503,429,500,500 1", 500, 3), ("503 2", 200, 2), ("404 3", 404, 1)):
            answer = client.request("POST", f'{{"response": "{response}"}}'.encode())
            assert (answer.status, answer.tries) == (status, tries)


@contextmanager
def one_connection(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that serves one connection."""

    def accept(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)


def test_known_certificate_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(LOCALHOST))
    with hostile(lambda _: iter([OK]), tls=True) as url, closing(HttpClient(url, GENEROUS)) as client:
        assert client.request("GET").body == b"hi"


@pytest.mark.parametrize("status", [b"200", b"407"])
def test_https_request_goes_through_tunnel_of_proxy(monkeypatch: pytest.MonkeyPatch, status: bytes) -> None:
    received: list[bytes] = []

    def tunnel(connection: socket.socket) -> None:
        received.append(connection.recv(4096))
        connection.sendall(b"HTTP/1.1 " + status + b" So\r\n\r\n")
        if status == b"200":
            with server_tls().wrap_socket(connection, server_side=True) as tls:
                received.append(tls.recv(4096))
                tls.sendall(OK)

    monkeypatch.setenv("SSL_CERT_FILE", str(LOCALHOST))
    with one_connection(tunnel) as address:
        monkeypatch.setenv("https_proxy", f"http://us:e%40r@{address}")
        url = "https://me:mine@mlflow.example:5000/a?b=1"
        with closing(HttpClient(url, GENEROUS, may_use_proxy=True)) as client:
            if status == b"200":
                assert client.request("GET").body == b"hi"
            else:
                with pytest.raises(NoAnswerError, match="ProxyError: 407 So"):
                    client.request("GET")
    assert received[0].startswith(b"CONNECT mlflow.example:5000 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic " + b64encode(b"us:e@r") in received[0]
    assert b64encode(b"me:mine") not in received[0], "the proxy must not receive the password of the server"
    for line in received[1:]:
        assert line.startswith(b"GET /a?b=1 HTTP/1.1\r\nHost: mlflow.example:5000\r\n")
        assert b"Authorization: Basic " + b64encode(b"me:mine") in line


def test_proxy_is_used_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(lambda _: iter([OK])) as url:
        for name, proxy in (("http_proxy", "socks5://127.0.0.1:9"), ("no_proxy", "")):
            monkeypatch.setenv(name, proxy)
        with closing(HttpClient(url, GENEROUS)) as client:
            assert client.request("GET").body == b"hi"
        with closing(HttpClient(url, GENEROUS, may_use_proxy=True)) as client, pytest.raises(NoAnswerError):
            client.request("GET")


def test_first_address_that_accepts_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def found(host: str, *arguments: Any, **keys: Any) -> list[Any]:
        hosts = ["127.0.0.1", "127.0.0.2"] if host == "two.example" else [host]
        return [address for each in hosts for address in look_up(each, *arguments, **keys)]

    monkeypatch.setattr("socket.getaddrinfo", found)
    with black_hole() as silent:
        port = int(silent.rpartition(":")[2].partition("/")[0])
        with pytest.raises(NoAnswerError, match=r"ConnectError: .* refused"):
            require_listener("two.example", port, 2.0)
        with socket.create_server(("127.0.0.2", port)):
            require_listener("two.example", port, 2.0)
