"""A Sandbox Fusion endpoint that runs no programs: its answers are fixed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def endpoint(answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of an endpoint and the requests it received. It returns these answers in turn, then repeats
    the last."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, answer = answers[min(len(received), len(answers)) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run_code", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ended(stdout: str, status: str = "Finished", code: int = 0) -> dict[str, Any]:
    run = {"status": status, "stdout": stdout, "return_code": code}
    return {"status": "Success" if (status, code) == ("Finished", 0) else "Failed", "run_result": run}
