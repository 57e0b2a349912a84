"""A local HTTP service whose answer is encoded in the response that it scores."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any


class Service(ThreadingHTTPServer):
    """A service that records its requests in `asked`, in order. While `is_down`, it closes every connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.at_once = self.most_at_once = 0
        self.seen: Counter[str] = Counter()
        self.is_down = False
        self.ended = Event()
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score?v=1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, response = self.server, str(body["response"])
        with server.lock:
            server.asked.append(body)
            server.headers.append({**dict(self.headers.items()), "path": self.path})
            server.seen[response] += 1
            seen = server.seen[response]
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            if server.is_down:
                self.close_connection = True
            else:
                self._answer(response, seen)
        finally:
            with server.lock:
                server.at_once -= 1

    def _answer(self, response: str, seen: int) -> None:
        """Answer `STATUS BODY`; for `STATUS... BODY`, each status in turn and then 200; other words name a
        misbehavior."""
        word, _, rest = response.partition(" ")
        if word == "hang":
            self.server.ended.wait(60)
        elif word == "vanish":
            self.close_connection = True
        elif word == "sleep":
            time.sleep(float(rest))
            self._say(200, "1")
        elif word == "once":  # close the connection after one answer, without announcing it
            self._say(200, rest)
            self.close_connection = True
        else:
            statuses = [int(status) for status in word.split(",")]
            self._say(statuses[seen - 1] if seen <= len(statuses) else 200, rest)

    def _say(self, status: int, body: str) -> None:
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        answer = body.encode(errors="replace")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Keep request logs out of the tests' output."""


@contextmanager
def serving() -> Iterator[Service]:
    """Yield a service that runs within the context."""
    service = Service()
    thread = Thread(target=service.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.ended.set()
        service.shutdown()
        service.server_close()
        thread.join()
