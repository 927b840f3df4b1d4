"""JSON over HTTP with a time limit on each call as a whole."""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.rl.engines.server_api import ServerError

READ_BYTES = 1 << 16
SHOWN_BYTES = 300
"""Maximum number of bytes of an answer in an error message."""


class HttpClient:
    """Client of one server. Every call opens its own connection, so any number of threads may call."""

    def __init__(self, url: str, *, api_key: str | None = None, ca_file: str | None = None) -> None:
        """Create a client of `url`.

        Args:
            url: Scheme, host and port, such as https://node7:8000, optionally with a path prefix.
            api_key: Key sent as a bearer token; None: no key is sent.
            ca_file: File of CA certificates that an https server's certificate is verified with; None: the system's.
        """
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path
        self._context = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, is_json: bool = True
    ) -> Any:
        """Send a POST request. Returns the answer's JSON, or its text unless `is_json`; None for an empty JSON answer.

        Raises:
            ServerError: if there was no complete answer in time, its status is not 200, or it is not valid JSON.
        """
        text = self._call("POST", path, body or {}, timeout_s)
        return self._json(path, text) if is_json else text.decode(errors="replace")

    def get(self, path: str, *, timeout_s: float) -> Any:
        """Send a GET request. Returns the answer's JSON, None if it is empty. Raises ServerError as `post` does."""
        return self._json(path, self._call("GET", path, None, timeout_s))

    def _json(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            shown = text[:SHOWN_BYTES].decode(errors="replace")
            raise ServerError(f"{self.url}{path}: the answer is no JSON: {shown}") from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        where, deadline = f"{self.url}{path}", time.monotonic() + timeout_s
        data = None if body is None else json.dumps(body).encode()
        connection = self._connection(timeout_s)
        try:
            connection.request(method, self._prefix + path, data, self._headers)
            # The response may keep using the socket after the connection has released it.
            socket = connection.sock
            response = connection.getresponse()
            text = b""
            while part := response.read1(READ_BYTES):
                text += part
                # A socket's timeout limits only silence: a server that sends a byte per minute would never reach it.
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                socket.settimeout(left_s)
            if response.length:
                raise ServerError(f"{where}: the answer ended {response.length} bytes too early")
        except TimeoutError:
            raise ServerError(f"{where}: no whole answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            shown = text[:SHOWN_BYTES].decode(errors="replace")
            raise ServerError(f"{where}: status {response.status}: {shown}", status=response.status)
        return text

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
