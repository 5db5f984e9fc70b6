"""A real browser for tests: headless Chromium over the DevTools protocol, through a pipe; no other library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab."""

    def __init__(self, command: int, answers: int) -> None:
        self.command, self.answers = command, answers
        self.count, self.session, self.rest = 0, "", b""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.command, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = os.read(self.answers, 1 << 20)
            assert data, "the browser is gone"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of an expression, in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                raise AssertionError(f"still not so after {seconds} s: {script}; {self.run('document.body.innerText')}")
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """What the browser found wrong: uncaught errors, and messages of its own (such as a blocked request)."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]))
        return found

    def asked_for(self) -> set[str]:
        """Every address that was requested."""
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        }


@contextmanager
def browser(folder: Path):
    """A page of a browser of its own, whose files are in the folder."""
    assert CHROMIUM is not None
    (read, command), (answers, write) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={folder / 'chromium'}"]
    shell = f'exec "$@" 3<&{read} 4>&{write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", CHROMIUM, *options, "--remote-debugging-pipe", "about:blank"],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        yield Page(command, answers)
    finally:
        process.kill()
        process.wait()
        os.close(command)
        os.close(answers)
