"""HTTP client of reward services, Sandbox Fusion and the checks of servers: limits of each try, retries, and one
circuit breaker for all threads that use the client.

    request: wait for the breaker --> try, over `http_network` --> pause --> next try

The client is built on httpcore, the transport below httpx. The time limits of httpx restart with each byte, so a
server that sends a byte now and then is never too late. aiohttp has a limit for the complete exchange, but requires
an event loop next to the threads of its users. httpcore accepts a network backend: here, each operation gets the
remaining time of its try. Connections that stay open, TLS, proxies and tunnels come from httpcore. It follows no
redirects.
"""

import math
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from threading import Condition, Event
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass
from zlib import crc32

import httpcore

from ppoctl.core.errors import ServiceLostError
from ppoctl.core.http_network import HttpNetwork

_BUSY = frozenset((408, 425, 429))
_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError)
_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one try."""

    answer_s: float
    """Seconds from the name lookup to the last byte of the body."""
    most_bytes: int
    """Maximum length of the body; 0: the body is not read."""
    connect_s: float = 10.0
    """Seconds until the connection, with TLS, is established."""
    first_byte_s: float = math.inf
    """Seconds from the name lookup to the first byte of the body."""


@dataclass(frozen=True)
class Retries:
    """Number of tries of a request, and pauses between them. A try fails if there is no answer, or if the status is
    408, 425, 429 or 5xx. All other answers are final."""

    tries: int = 1
    backoff_s: float = 1.0
    """Pause before the second try. It doubles before each further try, and a random factor from 0.5 to 1.5 applies. A
    `Retry-After` header of the server replaces the pause."""
    breaker_failures: int = 16
    """Number of consecutive tries without an answer, or with status 5xx, after which the server counts as down."""
    breaker_pause_s: float = 5.0
    """Pause between two tries while the server is down. Other requests wait, without losing tries."""
    give_up_s: float = 30.0
    """Seconds of downtime after which requests fail at once, except one every `breaker_pause_s`."""


@dataclass(frozen=True)
class HttpResponse:
    """Response of a server."""

    status: int
    headers: Mapping[str, str]
    """Header values by lowercase name."""
    body: bytes
    is_whole: bool
    """Whether `body` is complete. False: it contains only the first `most_bytes` bytes."""
    tries: int = 1

    @property
    def is_temporary(self) -> bool:
        """Whether the server may answer otherwise at the next try."""
        return self.status in _BUSY or self.status >= 500


class NoAnswerError(Exception):
    """The server did not answer, or its answer is not valid HTTP. The message does not contain the URL, which may
    contain a password."""

    def __init__(self, why: str, *, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late


class HttpClient:
    """Client of one URL. Any thread may send a request; connections stay open for later requests."""

    def __init__(
        self,
        url: str,
        limits: HttpLimits,
        retries: Retries = Retries(),
        *,
        headers: Mapping[str, str] | None = None,
        may_use_proxy: bool = False,
    ) -> None:
        """Raises ValueError if the URL is not valid. A user in the URL is sent to the server. With `may_use_proxy`,
        the proxy in the environment, if any, is used."""
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = (parts.hostname or "").encode("idna")
        self._url = httpcore.URL(scheme=parts.scheme, host=host, port=parts.port, target=target.encode())
        name = f"[{host.decode()}]" if b":" in host else host.decode()
        own = {"Host": name if parts.port is None else f"{name}:{parts.port}", "Accept-Encoding": "identity"}
        self._headers = _encoded({**own, **_user(parts, "Authorization"), **(headers or {})})
        self._limits, self._retries = limits, retries
        self._closing = Event()
        self._breaker = Breaker(url, retries, limits.answer_s, self._closing)
        self._network = HttpNetwork()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._proxy = _proxy(parts) if may_use_proxy else None
        self._idle: list[httpcore.ConnectionPool] = []
        """Connections that no thread uses. Each has a pool of its own, because a shared pool polls all of its
        connections at each request."""

    def request(self, method: str, body: bytes | None = None) -> HttpResponse:
        """Return the first final answer, or the answer to the last try. Raises NoAnswerError if there is none, and
        ServiceLostError if the server has been down for `give_up_s`."""
        chance = Random(crc32(body or b""))  # distributes tries over time, equally in every run
        tried, has_failed = 0, False
        while not self._closing.is_set():
            is_only_try = self._breaker.enter(has_failed=has_failed)
            answer = self._tried(method, body)
            if isinstance(answer, HttpResponse) and not answer.is_temporary:
                return replace(answer, tries=tried + 1)
            # The single try while the server is down is made for all requests, so it does not count as a try of this
            # request.
            tried, has_failed = tried + (not is_only_try), True
            if tried >= self._retries.tries:
                if isinstance(answer, HttpResponse):
                    return replace(answer, tries=tried)
                after = f" (after {tried} tries)" if tried > 1 else ""
                raise NoAnswerError(f"{answer}{after}", is_late=answer.is_late) from answer
            self._closing.wait(backoff_s(self._retries, tried, answer, chance))
        raise NoAnswerError("the client was closed")

    def close(self) -> None:
        """End running requests, and close the connections. May be called twice. A request that waits for a name
        lookup or a connection ends at its time limit."""
        self._closing.set()
        self._breaker.wake()
        self._network.cut()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _tried(self, method: str, body: bytes | None) -> HttpResponse | NoAnswerError:
        deadlines = _Deadlines(self._limits)
        try:
            answer = self._answered(method, body, deadlines)
        except NoAnswerError as error:
            self._breaker.failed(str(error))
            return error
        if answer.status >= 500:
            self._breaker.failed(f"it answered {answer.status}")
        else:
            self._breaker.answered()
        return answer

    def _answered(self, method: str, body: bytes | None, deadlines: "_Deadlines") -> HttpResponse:
        try:
            pool = self._idle.pop()
        except IndexError:
            pool = httpcore.ConnectionPool(self._tls, self._proxy, max_connections=1, network_backend=self._network)
        try:
            if pool.connections:
                # The server may have closed the connection since the last exchange, so connect again once.
                with suppress(httpcore.NetworkError, httpcore.RemoteProtocolError):
                    return self._exchanged(pool, method, body, deadlines)
            return self._exchanged(pool, method, body, deadlines)
        except (*_FAILURES, ImportError, ValueError) as error:
            raise deadlines.no_answer(error) from error
        finally:
            self._idle.append(pool)
            if self._closing.is_set():
                self._close_idle()

    def _exchanged(
        self, pool: httpcore.ConnectionPool, method: str, body: bytes | None, deadlines: "_Deadlines"
    ) -> HttpResponse:
        most, read, until = self._limits.most_bytes, bytearray(), deadlines.by_operation
        extensions = {"timeout": until}
        with pool.stream(method, self._url, headers=self._headers, content=body, extensions=extensions) as response:
            until["read"] = until["write"]
            for piece in response.iter_stream() if most else ():
                read += piece
                if len(read) > most:
                    break
        if self._network.is_cut:  # the body may then be incomplete
            raise httpcore.ReadError("the connection was closed")
        names = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
        return HttpResponse(response.status, names, bytes(read[:most]), len(read) <= most)


def require_listener(host: str, port: int, limit_s: float) -> None:
    """Connect to a server that need not speak HTTP. Raises NoAnswerError if it does not accept the connection."""
    deadlines = _Deadlines(HttpLimits(limit_s, 0))
    try:
        HttpNetwork().connect_tcp(host, port, deadlines.by_operation["connect"]).close()
    except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        raise deadlines.no_answer(error) from error


def backoff_s(retries: Retries, tried: int, answer: HttpResponse | NoAnswerError, chance: Random) -> float:
    """Return the seconds before the next try."""
    spread = 0.5 + chance.random()
    asked_for = answer.headers.get("retry-after", "") if isinstance(answer, HttpResponse) else ""
    if asked_for.isdecimal():
        return min(float(asked_for), retries.give_up_s)
    return min(retries.backoff_s * 2.0 ** max(tried - 1, 0), _LONGEST_BACKOFF_S) * spread


class Breaker:
    """Circuit breaker: whether the server answers, shared by all threads."""

    def __init__(self, url: str, retries: Retries, answer_s: float, closing: Event) -> None:
        self._url, self._retries, self._answer_s, self._closing = url, retries, answer_s, closing
        self._changed = Condition()
        self._failures = 0
        """Number of consecutive tries without an answer, or with status 5xx."""
        self._down_s = 0.0
        """Seconds of downtime, counted only while tries were made."""
        self._failed_s = 0.0
        """Time of the last failed try, on the monotonic clock."""
        self._is_tried = False
        """Whether a thread is making the single try."""
        self._why = ""

    def enter(self, *, has_failed: bool) -> bool:
        """Wait until a try may be made or the client is closed. Return whether the try is the single one while the
        server is down. Raises ServiceLostError if the server has been down for `give_up_s`; then only a request that
        has not failed yet may make the single try. `has_failed`: whether a try of the request has failed."""
        retries = self._retries
        with self._changed:
            while self._failures >= retries.breaker_failures and not self._closing.is_set():
                left_s = self._failed_s + retries.breaker_pause_s - time.monotonic()
                is_lost = self._down_s > retries.give_up_s
                if not self._is_tried and left_s <= 0 and not (is_lost and has_failed):
                    self._is_tried = True
                    return True
                if is_lost:
                    raise ServiceLostError(
                        f"the service `{self._url}` has not answered for {retries.give_up_s:g} s; last error: "
                        f"{self._why}",
                        hint="restart the service, then run `ppoctl resume RUN`; the rollouts are saved",
                    )
                self._changed.wait(None if self._is_tried else left_s)
        return False

    def failed(self, why: str) -> None:
        """Record a try without an answer, or with status 5xx."""
        now, longest_s = time.monotonic(), self._retries.breaker_pause_s + self._answer_s
        with self._changed:
            # No tries are made between two steps, so that time must not count as downtime.
            self._down_s = min(now - self._failed_s, longest_s) + self._down_s if self._failures else 0.0
            self._failures += 1
            self._failed_s, self._why, self._is_tried = now, why, False
            self._changed.notify_all()

    def answered(self) -> None:
        """Record that the server answered."""
        with self._changed:
            self._failures, self._is_tried = 0, False
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiting threads, so that they see that the client is closed."""
        with self._changed:
            self._changed.notify_all()


@dataclass
class _Deadlines:
    """Times on the monotonic clock at which the operations of one try must have ended."""

    limits: HttpLimits
    by_operation: dict[str, float] = field(init=False)
    """Time by operation. httpcore passes these numbers unchanged to the network backend, which is `HttpNetwork`."""

    def __post_init__(self) -> None:
        now, limits = time.monotonic(), self.limits
        end = now + limits.answer_s
        connect, read = min(end, now + limits.connect_s), min(end, now + limits.first_byte_s)
        self.by_operation = {"connect": connect, "write": end, "read": read}

    def no_answer(self, error: Exception) -> NoAnswerError:
        """Return the error of a failed try."""
        limits = self.limits
        if isinstance(error, httpcore.ConnectTimeout):
            return NoAnswerError(f"no connection within {min(limits.connect_s, limits.answer_s):g} s", is_late=True)
        if isinstance(error, httpcore.TimeoutException):
            has_begun = self.by_operation["read"] == self.by_operation["write"]
            return NoAnswerError(
                f"no answer within {limits.answer_s if has_begun else limits.first_byte_s:g} s", is_late=True
            )
        return NoAnswerError(f"{type(error).__name__}: {error}")


def _proxy(parts: SplitResult) -> httpcore.Proxy | None:
    """Return the proxy that the environment names for a URL. Raises ValueError if its address is not valid."""
    address = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    if address is None:
        return None
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    url = httpcore.URL(scheme=proxy.scheme, host=proxy.hostname or "", port=proxy.port, target="/")
    tls = ssl.create_default_context() if proxy.scheme == "https" else None
    return httpcore.Proxy(url, headers=_encoded(_user(proxy, "Proxy-Authorization")), ssl_context=tls)


def _user(parts: SplitResult, header: str) -> dict[str, str]:
    """Return the HTTP header with the user and password of a URL; empty: the URL has no user."""
    user, _, _ = parts.netloc.rpartition("@")
    return {header: f"Basic {b64encode(unquote(user).encode()).decode()}"} if user else {}


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes | str, bytes | str]]:
    return [(name, value.encode("latin-1")) for name, value in headers.items()]
