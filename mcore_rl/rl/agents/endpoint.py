"""The endpoint: OpenAI's chat.completions and completions, and Anthropic's messages, over HTTP, with a key for each
session.
"""

import hmac
import json
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY_BYTES = 64 << 20
"""Largest size of a request's body."""
MAX_DISCARDED_BYTES = 1 << 30
"""Bytes of a larger body that are read and dropped: clients that cannot finish sending do not read the refusal."""
IDLE_S = 60.0
"""Seconds after which a connection without a request is closed."""


class RefusedError(Exception):
    """A request that is answered with an error. No refusal has a status that official clients repeat."""

    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        """Take a sentence, the status of HTTP, and OpenAI's code of the error."""
        super().__init__(text)
        self.status, self.code = status, code


Answer = Callable[[str, Mapping[str, Any], bool, Callable[[], bool]], Mapping[str, Any]]
"""Function from a path, a body, whether the client asks again, and a function whether it still waits, to the answer."""


class Endpoint(ThreadingHTTPServer):
    """Serves sessions by their keys; each connection has a thread."""

    daemon_threads = True
    request_queue_size = 1024  # the default of 5 resets connections when many agents start together

    def __init__(self, host: str, port: int, model: str) -> None:
        """Listen at `host` and `port`; 0: any free port."""
        super().__init__((host, port), _Handler)
        self.model = model
        self.sessions: dict[str, Answer] = {}
        """The function that answers the requests of each session, by the session's key."""
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/v1"

    def answer_of(self, key: str) -> Answer | None:
        """Return the session of a key; keys are compared in constant time."""
        given = key.encode(errors="replace")
        found = [answer for own, answer in [*self.sessions.items()] if hmac.compare_digest(own.encode(), given)]
        return found[0] if found else None

    def close_in_child(self) -> None:
        """Close the inherited sockets in a forked process, so that a connection ends with this process's end of it."""
        for connection in (self.socket, *self.connections):
            connection.close()
        self.connections.clear()
        self.sessions.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    timeout = IDLE_S
    server: Endpoint

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client has gone: nobody waits for an answer
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: keys and bodies are never logged."""

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            self._send({"object": "list", "data": [{"id": self.server.model, "object": "model", "owned_by": "policy"}]})
        else:
            self._refuse(RefusedError(f"no such path: {self.path}", status=404))

    def do_POST(self) -> None:
        try:
            text = self._body()
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
            answer = self.server.answer_of(key or self.headers.get("x-api-key") or "")
            if answer is None:
                raise RefusedError("no session has this key", status=401, code="invalid_api_key")
            try:
                body = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RefusedError(f"the body is no JSON: {error}") from None
            if not isinstance(body, dict):
                raise RefusedError("the body is no object")
            again = self.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            found = answer(self.path.rstrip("/"), body, again, self._is_there)
        except RefusedError as error:
            self._refuse(error)
            return
        if not body.get("stream"):
            self._send(found)
        elif found.get("type") == "message":
            self._stream(f"event: {event['type']}\ndata: {json.dumps(event)}" for event in events_of(found))
        else:
            self._stream(f"data: {text}" for text in (*map(json.dumps, chunks_of(found, body)), "[DONE]"))

    def _body(self) -> bytes:
        try:
            size = int(self.headers.get("Content-Length") or "none")
        except ValueError:
            size = -1
        if 0 < size <= MAX_BODY_BYTES:
            return self.rfile.read(size)
        self.close_connection = True
        left = min(size, MAX_DISCARDED_BYTES)
        while left > 0 and (part := self.rfile.read(min(left, 1 << 20))):
            left -= len(part)
        shown = f"of {size} bytes" if size >= 0 else "without Content-Length"
        raise RefusedError(f"a body {shown}; wanted: 1 to {MAX_BODY_BYTES} bytes")

    def _is_there(self) -> bool:
        # A closed connection can be read, and has nothing.
        ready, _, _ = select.select([self.connection], [], [], 0)
        return not ready or bool(self.connection.recv(1, socket.MSG_PEEK))

    def _refuse(self, error: RefusedError) -> None:
        # Anthropic's clients read the outer type, OpenAI's only what is inside.
        self._send(
            {"type": "error", "error": {"message": str(error), "type": error.code, "code": error.code}}, error.status
        )

    def _send(self, value: Mapping[str, Any], status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, events: Iterable[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            data = f"{event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


def chunks_of(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole answer as the chunks of a stream: one with its text, one with its end, one with the usage."""
    is_chat = answer["object"] == "chat.completion"
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    for choice in answer["choices"]:
        delta: dict[str, Any] = {"text": choice.get("text")}
        if is_chat:
            calls = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls") or ())]
            delta = {"delta": choice["message"] | ({"tool_calls": calls} if calls else {})}
        empty: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        same = {"index": choice["index"]}
        yield {**head, "choices": [{**same, **delta, "finish_reason": None, "logprobs": choice["logprobs"]}]}
        yield {**head, "choices": [{**same, **empty, "finish_reason": choice["finish_reason"]}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": answer["usage"]}


def events_of(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole message as the events of Anthropic's stream, each block in one piece."""
    usage = message["usage"]
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**message, **empty, "usage": {**usage, "output_tokens": 0}}}
    begun: dict[str, Any]
    for n, block in enumerate(message["content"]):
        match block:
            case {"type": "tool_use", "input": given}:
                begun, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(given)}
            case {"type": kind}:
                begun, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": n, "content_block": {**block, **begun}}
        yield {"type": "content_block_delta", "index": n, "delta": delta}
        yield {"type": "content_block_stop", "index": n}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}
