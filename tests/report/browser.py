"""A headless Chromium for tests, spoken to over a pipe in its DevTools protocol: no driver and no package is needed.

Chromium reads commands from file descriptor 3 and writes answers and events to 4, each a JSON object that ends with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLAYWRIGHT = ("chromium-*/chrome-linux*/chrome", "chromium_headless_shell-*/chrome-*/*headless*shell")


def find() -> str | None:
    """KVANT_CHROMIUM, a Chromium on the path, or one that Playwright has fetched."""
    named = os.environ.get("KVANT_CHROMIUM")
    if named:
        return named
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    cache = Path.home() / ".cache" / "ms-playwright"
    return next((found for pattern in PLAYWRIGHT for found in sorted(glob.glob(str(cache / pattern)))), None)


class Browser:
    """One page. `errors` are console errors and exceptions, `requests` the addresses that were asked for."""

    def __init__(self, chromium: str, home: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        self.scheme: list[dict[str, str]] = []
        to_child, self.write = os.pipe()
        self.read, from_child = os.pipe()
        options = [
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
            "--disable-gpu",
            "--no-first-run",
        ]
        options += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # root has no user namespace to shut it in

        def descriptors() -> None:
            first, second = os.dup(to_child), os.dup(from_child)  # either may be 3 or 4 itself
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [chromium, *options],
            preexec_fn=descriptors,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self.buffer = b""
        self.count = 0
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data) :]
        while True:
            answer = self.receive(60.0)
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]  # type: ignore[no-any-return]

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer or event; events are noted."""
        until = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {seconds:.0f} seconds")
            part = os.read(self.read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            if not params["request"]["url"].startswith(("data:", "blob:")):  # is in the page itself
                self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.loaded = False
        self.scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.medium("screen")
        self.resize(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + 60
        while not self.loaded:
            self.receive(max(0.1, until - time.monotonic()))

    def medium(self, name: str) -> None:
        """screen, print, or nothing for what is being done."""
        self.call("Emulation.setEmulatedMedia", media=name, features=self.scheme)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Moves the mouse."""
        for dx in (-2, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed, on A4."""
        self.medium("")
        found = self.call(
            "Page.printToPDF", printBackground=False, preferCSSPageSize=False, paperWidth=8.27, paperHeight=11.69
        )
        return base64.b64decode(found["data"])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)


@contextlib.contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        browser = Browser(executable, home)
        try:
            yield browser
        finally:
            browser.close()
