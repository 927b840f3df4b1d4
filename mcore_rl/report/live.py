"""A page on this machine that follows runs while they go on."""

import hashlib
import socketserver
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock

from mcore_rl.errors import ConfigError, DataError, error_text
from mcore_rl.report.page import rendered, views_of

HOST = "127.0.0.1"
FILES = ("*", "samples/*.jsonl", "logs/*/failure.json")
"""Files of a run that the page is made from; the logs themselves grow all the time."""


class LiveServer(socketserver.ThreadingTCPServer):
    """Serves the page of some runs to browsers on this machine; the page is made anew when a file of them changes."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], port: int) -> None:
        """Make the page and listen on `port` of 127.0.0.1; 0: on any free port.

        Raises:
            DataError: for a folder that is not a run.
            ConfigError: if the port cannot be had.
        """
        self._run_dirs, self._lock, self._made = run_dirs, Lock(), ("", b"")
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port {port} is no port. Choose one below 65536, or 0 for any that is free.")
        self.page()
        try:
            super().__init__((HOST, port), _Answer)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be had: {error.strerror}. Choose another, or 0 for any that is free."
            ) from None

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names by which a browser on this machine asks; a page elsewhere that has us fetched has its own name."""
        port = self.server_address[1]
        return (f"{HOST}:{port}", f"localhost:{port}")

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self.hosts[0]}/"

    def page(self) -> tuple[str, bytes]:
        """Return stamp and HTML of the page; DataError while a run cannot be read."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._made[0]:
                self._made = (stamp, rendered(views_of(self._run_dirs), stamp).encode(errors="replace"))
            return self._made

    def _stamp(self) -> str:
        """Return a text that changes when a file of a run changes, quoted as an ETag is."""
        states = repr([state for run_dir in self._run_dirs for state in _states(run_dir)])
        return f'"{hashlib.sha256(states.encode(errors="replace")).hexdigest()[:16]}"'


class _Answer(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._send(403, "This page is for browsers on its own machine.")
        elif self.path != "/":
            self._send(404, f"The page is at {self.server.url}")
        else:
            try:
                stamp, page = self.server.page()
            except DataError as error:
                self._send(503, error_text(error))
                return
            if self.headers.get("If-None-Match") == stamp:
                self._send(304, "")
            else:
                self._send(200, page, stamp)

    def _send(self, status: int, content: str | bytes, stamp: str = "") -> None:
        kind = "html" if isinstance(content, bytes) else "plain"
        body = content if isinstance(content, bytes) else content.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if stamp:
            self.send_header("ETag", stamp)
        self.end_headers()
        with suppress(ConnectionError):  # the reader has closed the page
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page asks every few seconds."""


def _states(run_dir: Path) -> Iterator[tuple[str, int, int]]:
    for pattern in FILES:
        for path in sorted(run_dir.glob(pattern)):
            with suppress(FileNotFoundError):  # a file that the run has just replaced
                status = path.stat()
                yield str(path), status.st_mtime_ns, status.st_size
