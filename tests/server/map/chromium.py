"""A page in a headless Chromium, driven through its DevTools protocol over two pipes.

No port is opened and nothing but the browser itself is needed.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
ANSWER_SECONDS = 60.0
LAUNCHER = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, which reads at descriptor 3 and writes at 4."""


def find_chromium() -> str | None:
    """The browser's path; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserPage:
    """One page: it is opened, asked, and pointed at."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._ids = itertools.count(1)
        self._buffer = bytearray()
        self._session: str | None = None
        self._loads = 0
        self.problems: list[str] = []
        """What the browser complained about: errors in scripts, and what the policy forbade."""

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        told = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to an address, and wait until the document is there."""
        before = self._loads
        self.call("Page.navigate", url=url)
        while self._loads == before:
            self._note(self._receive())

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=preferred)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise's once it is there."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            raise AssertionError(told["exceptionDetails"])
        return told["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        """The first value of an expression that is true; asked again and again."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}; {self.problems}")

    def press(self, key: str) -> None:
        enters = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **enters)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the browser; events that come meanwhile are looked through for problems."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            self._note(told)
            if told.get("id") == number:
                if "error" in told:
                    raise AssertionError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._reading], [], [], ANSWER_SECONDS)[0]:
                raise AssertionError("the browser does not answer")
            read = os.read(self._reading, 1 << 20)
            if not read:
                raise AssertionError("the browser has ended")
            self._buffer += read
        body, _, rest = self._buffer.partition(b"\0")
        self._buffer = rest
        told: dict[str, Any] = json.loads(body)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        parameters = told.get("params", {})
        self._loads += told.get("method") == "Page.loadEventFired"
        if told.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        if told.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


@contextlib.contextmanager
def browser_page(chromium: str) -> Iterator[BrowserPage]:
    """A page in a browser of its own, which ends with the context."""
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [sys.executable, "-c", LAUNCHER, str(to_browser), str(from_browser)]
        command += [chromium, "--headless=new", "--no-sandbox", "--hide-scrollbars"]
        command += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-lcd-text"]  # greys, so that screenshots are smaller
        command += ["--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"]
        with subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            os.close(to_browser)
            os.close(from_browser)
            try:
                page = BrowserPage(reading, writing)
                page.attach()
                yield page
            finally:
                process.kill()
                os.close(reading)
                os.close(writing)
