"""A headless Chromium that opens a page from disk, clicks, and says what it finds: the DevTools protocol over pipes."""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds for anything


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One tab. Use as a context manager.

    Attributes:
        complaints: errors, warnings and uncaught exceptions of pages, and requests that go beyond the disk.
    """

    def __init__(self, profile: Path):
        self.complaints: list[str] = []
        self._buffer, self._number = b"", 0
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe "
            f"--user-data-dir={profile} --window-size=1280,1000 --disable-background-networking about:blank"
        )
        # The protocol's pipes are descriptors 3 and 4 of the browser.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", script, "bash", str(find_chromium()), *flags.split()]
        log = open(profile.with_suffix(".log"), "w")  # noqa: SIM115 (the process keeps it)
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        os.close(to_read)
        os.close(to_write)
        os.set_blocking(self._read, False)

    def __enter__(self) -> "Browser":
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        os.close(self._read)
        os.close(self._write)

    _session: str | None = None

    def open(self, page: Path) -> float:
        """Open a page of `usage-report --html` and wait until it is drawn; the milliseconds that it says that took."""
        self._call("Page.navigate", {"url": page.resolve().as_uri()})
        return float(self.wait("document.documentElement?.dataset.ready"))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (awaited)."""
        wanted = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"still not true: {script}; {self.complaints}"
            time.sleep(0.05)
        return value

    def click(self, x: float, y: float, button: str = "left") -> None:
        """A click at a place of the window, in CSS pixels."""
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button, clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float], *, held: bool = True) -> None:
        """Press, move and release; without `held` the page is not told of a release that came before the move."""
        self._mouse("mousePressed", *start, "left", clickCount=1)
        self._mouse("mouseMoved", *end, "left" if held else "none", buttons=int(held))
        self._mouse("mouseReleased", *end, "left", clickCount=1)

    def _mouse(self, kind: str, x: float, y: float, button: str, **more: int) -> None:
        self._call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, "button": button, **more})

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            fields = {"type": kind, "key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
            self._call("Input.dispatchKeyEvent", fields | ({"text": key} if len(key) == 1 else {}))

    def prefer(self, scheme: str, width: int = 1280, height: int = 1000) -> None:
        """Let the system wish for a "light" or "dark" theme; and set the window's size."""
        self._call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        self._call("Emulation.setScrollbarsHidden", {"hidden": True})

    def picture(self, path: Path, selector: str = "body") -> None:
        """A PNG of the part of the page that a CSS selector names."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y, width, height = self.run(f"(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])({box})")
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        wanted = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", wanted)["data"]))

    def print(self) -> bytes:
        """The page as a PDF, colours of backgrounds with it."""
        return base64.b64decode(self._call("Page.printToPDF", {"printBackground": True})["data"])

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self._receive()
            if answer is None:
                assert self._process.poll() is None, "the browser has ended"
                time.sleep(0.005)
            elif answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            else:
                self._note(answer.get("method", ""), answer.get("params", {}))
        raise AssertionError(f"no answer to {method}")

    def _receive(self) -> dict[str, Any] | None:
        try:
            while b"\0" not in self._buffer:
                block = os.read(self._read, 1 << 20)
                if not block:
                    return None
                self._buffer += block
        except BlockingIOError:
            return None
        first, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(first))

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(facts["exceptionDetails"])[:1000])
        if method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(facts["args"])[:1000])
        if method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(facts["entry"])[:1000])
        if method == "Network.requestWillBeSent" and not facts["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.complaints.append(facts["request"]["url"])
