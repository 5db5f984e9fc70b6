"""Serves one page to browsers on this machine, and nothing else: no folder, no file, no other machine."""

from __future__ import annotations

import errno
import json
import sys
import threading
import zlib
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

from evenhand.checks import EvenhandError, number
from evenhand.watch.view import View

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")  # what a browser may call this machine; any other name may be a trap (DNS rebinding)
FIRST_PORT, PORTS = 20000, 10000  # a folder's usual port lies here, so that a page finds its server again
IDLE_SECONDS = 30
# The page around the report, and the report, which may use what it holds itself but fetch nothing.
OWN = "default-src 'none'; connect-src 'self'; frame-src 'self'; img-src data:; style-src 'unsafe-inline'"
POLICIES = {
    "/": f"{OWN}; script-src 'unsafe-inline'; frame-ancestors 'none'",
    "/report.html": "default-src 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'",
    "/state.json": "default-src 'none'",
}
HTML, JSON, TEXT = ("text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8")


class Server:
    """A folder's page on a port of this machine, in threads of its own.

    >>> from urllib.request import urlopen
    >>> with Server("runs/not-yet") as server:
    ...     print(json.load(urlopen(f"{server.url}state.json"))["said"])
    waiting for a run to begin in runs/not-yet
    """

    def __init__(self, folder: str | Path, port: int | None = None) -> None:
        if port is not None:
            number("port", port, low=1, high=65535, whole=True)
        self._server = _listen(View(folder), port, Path(folder))
        self._thread = threading.Thread(target=self._server.serve_forever, name="evenhand watch", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self) -> None:
        """Until somebody presses Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(1.0)


def _listen(view: View, port: int | None, folder: Path) -> _Listener:
    if port is not None:
        try:
            return _Listener(view, port)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise EvenhandError(f"port {port} {reason}; name another one, or none for a free one") from error
    usual = FIRST_PORT + zlib.crc32(str(folder.resolve()).encode()) % PORTS
    try:
        return _Listener(view, usual)
    except OSError:
        return _Listener(view, 0)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, view: View, port: int) -> None:
        self.view = view
        super().__init__((HOST, port), _Handler)

    @cached_property
    def shell(self) -> bytes:
        return (files("evenhand.watch") / "shell.html").read_bytes()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a browser that hangs up is nobody's fault
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One answer a connection (HTTP/1.0): none is left open when the server goes."""

    server: _Listener
    server_version, sys_version = "evenhand", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN, TEXT, b"this page is for this machine alone: open it as 127.0.0.1\n")
        elif path == "/":
            self._answer(HTTPStatus.OK, HTML, self.server.shell, policy=POLICIES[path])
        elif path == "/state.json":
            body = json.dumps(self.server.view.look().to_dict()).encode()
            self._answer(HTTPStatus.OK, JSON, body, policy=POLICIES[path])
        elif path == "/report.html":
            self._report(POLICIES[path])
        else:
            self._answer(HTTPStatus.NOT_FOUND, TEXT, b"there is one page here, /\n")

    do_HEAD = do_GET

    def _report(self, policy: str) -> None:
        seen = self.server.view.look()
        tag = f'"{seen.version}"'
        if not seen.page:
            self._answer(HTTPStatus.NOT_FOUND, TEXT, f"{seen.said}\n".encode())
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, HTML, b"", policy=policy, tag=tag)
        else:
            self._answer(HTTPStatus.OK, HTML, seen.page, policy=policy, tag=tag)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, *, policy: str = "", tag: str = "") -> None:
        self.send_response(status)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache" if tag else "no-store")
        self.send_header("Content-Security-Policy", policy or POLICIES["/state.json"])
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the training."""
