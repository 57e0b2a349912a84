"""Headless Chromium, controlled over its DevTools protocol: `with Browser(program, folder) as browser: ...`."""

import base64
import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PATIENCE_S = 30.0
KEYS = {
    "Tab": 9,
    "Enter": 13,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


class Browser:
    """One browser with one page. Network requests and console messages of the page are recorded."""

    def __init__(self, program: str, folder: Path) -> None:
        self.folder = folder
        # Its sandbox needs privileges that root in a container does not have; the pages are trusted.
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        words += ["--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        with (folder / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen([*words, "about:blank"], stdout=log, stderr=log)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self._open = ExitStack()
        self._number = 0
        self._session = ""

    def __enter__(self) -> "Browser":
        try:
            port, path = self._until(self._address)
            self._socket = self._open.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._open.close()
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # -- what tests do

    def open(self, file: Path, *, width: int = 1400, scheme: str = "light", motion: str = "no-preference") -> None:
        """Open a file, and wait until its script has run."""
        self.asked.clear()
        self.errors.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=file.as_uri())
        self._until(lambda: self.js("document.documentElement?.dataset.ready"))
        self.asked = [url for url in self.asked if url != "about:blank"]

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        evaluated = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in evaluated, evaluated["exceptionDetails"]
        return evaluated["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key, as a user does."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        for _ in range(times):
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, file: Path) -> None:
        """Write a screenshot of the whole page, for people."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    # -- the protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the browser. Events that arrive before its answer are recorded."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps({**message, **({"sessionId": self._session} if self._session else {})}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                answer: dict[str, Any] = message["result"]
                return answer
            self._keep(message.get("method", ""), message.get("params", {}))

    def _keep(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.errors.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(about["args"]))

    def _address(self) -> list[str]:
        file = self.folder / "DevToolsActivePort"
        words = file.read_text().split() if file.exists() else []
        return words if len(words) == 2 else []

    def _until(self, found: Callable[[], Any]) -> Any:
        ends = time.monotonic() + PATIENCE_S
        while not (value := found()):
            if self.process.poll() is not None or time.monotonic() > ends:
                raise AssertionError(
                    (self.folder / "chromium.log").read_text(errors="replace")[-2000:] or self.errors
                )
            time.sleep(0.02)
        return value
