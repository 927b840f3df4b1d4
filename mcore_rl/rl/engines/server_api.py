"""Requests to inference servers: HTTP, the interface of a server, and checks of its answers and routes; no retries."""

import errno
import http.client
import json
import re
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, ClassVar, Literal
from urllib.parse import urlencode, urlsplit

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.extension import load_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.loss import TeacherServerConfig
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.protocol import PROTOCOLS, REQUIRED
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import FinishReason, VersionSpan
from mcore_rl.workers.launcher import environment_variable

CONNECT_S = 30.0
"""Seconds within which a server's machine accepts a connection."""
LOOK_S = 10.0
"""Seconds between looks whether a server that has not answered yet still listens."""
READ_BYTES = 1 << 16
SHOWN_BYTES = 300
"""Maximum number of bytes of an answer in an error message."""


class HttpClient:
    """Client of one server. Every call opens its own connection, so any number of threads may call."""

    def __init__(self, url: str, *, api_key: str | None = None, ca_file: str | None = None) -> None:
        """Take a URL, which may have a path prefix, a bearer token, and a file of CA certificates (None: system's)."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path
        self._connection: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=ca_file)
            self._connection = partial(http.client.HTTPSConnection, context=context)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def cut(self) -> None:
        """End all calls in progress, which then raise ServerError."""
        with self._lock:
            for connected in self._sockets:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """Return the JSON of the answer to a POST request (None if empty), or its text unless `is_json`. Raises
        ServerError if there is no complete answer in time, its status is not 200, or it is not valid JSON.
        """
        return self._call("POST", path, body or {}, timeout_s, is_json=is_json)

    def get(self, path: str, *, timeout_s: float, is_json: bool = True) -> Any:
        """Send a GET request. Returns what `post` does. Raises ServerError as `post` does."""
        return self._call("GET", path, None, timeout_s, is_json=is_json)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, *, is_json: bool) -> Any:
        where, deadline = f"{self.url}{path}", time.monotonic() + timeout_s
        data = None if body is None else json.dumps(body).encode()
        connection = self._connection(self._host, self._port, timeout=min(timeout_s, CONNECT_S))
        # The response may keep using the socket after the connection has released it.
        connected: socket.socket | None = None
        try:
            connection.connect()
            connected = connection.sock
            connected.settimeout(timeout_s)
            with self._lock:
                self._sockets.add(connected)
            connection.request(method, self._prefix + path, data, self._headers)
            self._wait(connected, deadline)
            response = connection.getresponse()
            text = b""
            while part := response.read1(READ_BYTES):
                text += part
                # A socket's timeout limits only silence: a server that sends a byte per minute would never reach it.
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                connected.settimeout(left_s)
            if response.length:
                raise ServerError(f"{where}: the answer ended {response.length} bytes too early")
        except TimeoutError:
            raise ServerError(f"{where}: no whole answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from None
        finally:
            with self._lock:
                self._sockets.discard(connected)
            connection.close()
        shown = text[:SHOWN_BYTES].decode(errors="replace")
        if response.status != 200:
            raise ServerError(f"{where}: status {response.status}: {shown}", status=response.status)
        if not is_json:
            return text.decode(errors="replace")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise ServerError(f"{where}: the answer is no JSON: {shown}") from None

    def _wait(self, connected: socket.socket, deadline: float) -> None:
        """Wait for an answer. vLLM never answers an open call of an update when its engine has died, but it no longer
        listens then: raises ConnectionRefusedError. Other failures to connect prove nothing.
        """
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        while not poll.poll(1000 * min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            with socket.socket(connected.family) as look:
                look.settimeout(LOOK_S)
                if look.connect_ex(connected.getpeername()) == errno.ECONNREFUSED:
                    raise ConnectionRefusedError("the server no longer listens: it ended, or its engine died")


NO_VERSION = -1
"""Version of a server's initial weights."""
MODEL = "policy"
"""Name under which the server serves the model (--served-model-name)."""
EXCLUDED = -9999.0
"""Logprob that vLLM sends for -inf, which JSON lacks."""
NEVER = -100.0
"""Lowest logit bias that the servers accept; it multiplies a token's weight by e^-100."""
HEALTH_S = 20.0
"""Seconds within which a server answers a question that it need not compute for."""
APIS = {"vllm": "mcore_rl.rl.engines.vllm_api:VllmApi", "sglang": "mcore_rl.rl.engines.sglang_api:SglangApi"}
"""Class of each kind of server; its module is imported only for a config that names it."""


class ServerError(EngineError):
    """Raised if a server fails, refuses, or answers wrongly or late. After a failed update its weights are unknown."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer; None if there was no answer, or an invalid answer with status 200."""

    @property
    def is_refusal(self) -> bool:
        """Whether the server rejected the request as invalid, so that any other server would reject it too."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCompletion:
    """A server's answer to a request. `logprobs_T[t]` belongs to `tokens_T[t]`."""

    tokens_T: tuple[int, ...]
    """Sampled tokens, including the stop token if a stop token ended the completion."""
    logprobs_T: tuple[float, ...]
    """Logprobs at the sampling temperature, in nats."""
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens, as the server reports them."""
    experts_TLK: NDArray[np.integer] | None
    """Experts of each token of prompt and completion but the last, for all layers that the server recorded, unchecked
    (`served_routes.pick_layers` checks them and selects the MoE layers); None if not requested."""


class TakenError(ServerError):
    """Raised if a server belongs to another run, which gives it weights of its own."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that a server belongs to, kept in its weights' version, v<step>-<token>@<run>, and in all completions."""

    token: str
    """Eight hexadecimal digits, new at each start of a run."""
    run: str
    """The run's folder."""

    def version(self, step: int | None) -> str:
        """Return the text for the weights of an optimizer step; None: for the weights before the run's first update."""
        return f"{'claim' if step is None else f'v{step}'}-{self.token}@{self.run}"


VERSION = re.compile(r"(?:claim|v(?P<step>\d+))(?:-(?P<token>[0-9a-f]{8})@(?P<run>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Fields of a server's answer to a request for a completion."""

    tokens_T: Sequence[int]
    scored: Sequence[tuple[int, float]]
    """Token and logprob of each sampled token, as the server lists them."""
    finish: str
    spans: Sequence[Mapping[str, Any]]
    """Version, start and end of each span of the tokens."""
    experts: str | None
    """Encoded routes; None if there are none."""


class ServerApi(ABC):
    """An inference server, by its table in `protocol.toml`. Every method blocks, has a time limit, may be called from
    several threads at the same time, and raises ServerError on failure.
    """

    KIND: ClassVar[str]
    """The value of rl.engine.kind."""
    TRIED: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]]
    """The first version of the software that was tried or read, and the first later version that was not."""
    RESUMES_AWAKE: ClassVar[bool]
    """Whether the server computes again by itself once all of its memory is back."""
    KEEPS_ROUTES: ClassVar[bool]
    """Whether the routes of tokens that are computed again after an update are those that sampled them."""
    STEPS: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]]
    """Path and fields of calls that both kinds have, by what they do; a field that is None gets a name of the caller's.
    health: answered by the thread that computes; weights: tells their version; start: missing if it is not needed."""
    FIELDS: ClassVar[tuple[str, str, str, str, str]]
    """Names of a request's fields: prompt, seed, maximum number of new tokens, id, salt."""
    ALL_TOKENS: ClassVar[int]
    """The value of top_k without a cut."""
    PARAMETERS: ClassVar[Mapping[str, Any]]
    """Sampling parameters that only this kind of server has."""
    REQUEST_NAME: ClassVar[str] = ""
    """Prefix that the server adds to a request's id; an abort without it returns 200 and does nothing."""

    def __init__(
        self,
        http: HttpClient,
        *,
        vocab_size: int,
        experts_per_token: int = 0,
        request_timeout_s: float,
        update_timeout_s: float,
        owner: Owner | None = None,
        model_name: str | None = MODEL,
    ) -> None:
        """Create the API of a server. `vocab_size` includes padding of the vocabulary; `experts_per_token` is for
        servers that send routes without a shape; `owner` sends weights to the server (None: weights of any run are
        read); `model_name` is the name of the server's model (None: it has only one).
        """
        self._model_name = model_name
        self._http, self._vocab_size, self._top_k = http, vocab_size, experts_per_token
        self._request_s, self._update_s, self.owner = request_timeout_s, update_timeout_s, owner
        # Neither kind of server says what is released, and a call for what is not ends it or does nothing.
        self._asleep: Literal["nothing", "cache", "all"] = "nothing"

    @property
    def url(self) -> str:
        """Address, such as http://127.0.0.1:8000."""
        return self._http.url

    def cut(self) -> None:
        """End all calls in progress, which then raise ServerError."""
        self._http.cut()

    def generate(
        self,
        prompt_T: Sequence[int],
        sampling: Sampling,
        seed: int,
        *,
        salt: str,
        request_id: str,
        adapter: str | None = None,
    ) -> ServedCompletion:
        """Return the completion of a prompt, not cut at stop strings, which the server ignores. The caller checks the
        ids, as one beyond the vocabulary crashes some servers. `seed` has 63 bits; requests with different salts share
        no cached prefix; `abort` takes the `request_id`; without `adapter`, the server's own weights sample.
        """
        cut, padding = sampling.cut, range(sampling.vocab_size or self._vocab_size, self._vocab_size)
        prompt, seed_name, length, name, salt_name = self.FIELDS
        # Every field is sent, because an omitted field would get a default of the server or the model.
        parameters = {seed_name: seed, length: sampling.max_new_tokens, **self.PARAMETERS}
        parameters |= {"temperature": cut.temperature, "top_k": cut.top_k or self.ALL_TOKENS, "top_p": cut.top_p}
        parameters |= {"min_p": cut.min_p, "ignore_eos": True, "stop_token_ids": sorted(sampling.stop_tokens)}
        if padding:  # the model's ids beyond the tokenizer's vocabulary are forbidden
            parameters["logit_bias"] = {str(token): NEVER for token in padding}
        body = {prompt: list(prompt_T), "sampling_params": parameters, name: request_id, salt_name: salt}
        fields = body | self._own_fields(adapter, with_routes=sampling.with_routes)
        answer = self._call(self.STEPS["generate"][0], limit_s=self._request_s, **fields)
        with self._reading("an answer"):
            read = self._read(answer)
            if [token for token, _ in read.scored] != list(read.tokens_T):
                raise ServerError(f"{self.url}: the logprobs are not of the tokens that were returned")
            _check_end(self.url, prompt_T, sampling, read)
            logprobs = finite_logprobs(self.url, [logprob for _, logprob in read.scored])
            return ServedCompletion(
                tokens_T=tuple(read.tokens_T),
                logprobs_T=tuple(logprobs),
                finish="stop" if read.finish == "stop" else "length",
                versions=version_spans(self.url, read.spans, self.owner, num_tokens=len(logprobs)),
                experts_TLK=self._experts(read.experts, len(prompt_T) + len(logprobs) - 1)
                if read.experts is not None and sampling.with_routes
                else None,
            )

    @abstractmethod
    def _own_fields(self, adapter: str | None, *, with_routes: bool) -> dict[str, Any]:
        """Return the fields of a request that only this kind of server has."""

    @abstractmethod
    def _read(self, answer: Any) -> Answered:
        """Return the fields of an answer."""

    @abstractmethod
    def _experts(self, text: str, num_tokens: int) -> NDArray[np.integer]:
        """Decode routes of `num_tokens` tokens, `[T, layers, K]`."""

    def abort(self, request_id: str) -> None:
        """End a running request, so that its `generate` raises ServerError; does nothing if it is not running."""
        self._step("abort", limit_s=HEALTH_S, name=self.REQUEST_NAME + request_id)

    @property
    def is_asleep(self) -> bool:
        """Whether memory is released, which only `pause` and `resume` bring back."""
        return self._asleep != "nothing"

    def sleep(self, *, keeps_weights: bool) -> None:
        """Stop computing, and release the memory of weights, keys and values. Without `keeps_weights` the weights are
        lost. No request may be in progress.
        """
        self._release(keeps_weights=keeps_weights)
        self._asleep = "all"

    @abstractmethod
    def _release(self, *, keeps_weights: bool) -> None:
        """Make the calls of `sleep`."""

    def _wake(self, step: str, status: str) -> None:
        """Bring memory back. Raises ServerError if the answer tells another state than `status`."""
        answer = self._step(step)
        if isinstance(answer, dict) and answer.get("status", status) != status:
            raise ServerError(
                f"{self.url}{self.STEPS[step][0]}: status 200, and the server is {answer['status']}, not {status}"
            )

    def pause(self) -> None:
        """Stop computing, without which an update ends the server. Running requests are kept, and new requests wait. A
        server that sleeps gets the memory of its weights back, and computes nothing either.
        """
        if self._asleep == "all":
            self._wake("wake_weights", "sleeping")
            self._asleep = "cache"
        elif self._asleep == "nothing":
            self._step("pause")

    def start_update(self) -> None:
        """Begin a weight update."""
        if "start" in self.STEPS:
            self._step("start")

    def take(self, files: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
        """Let vLLM's workers keep the bytes of files. Returns why they refuse differences, by file name. Raises
        ServerError if they refuse a whole file.
        """
        ask = partial(self._step, "take", args=[json.dumps(list(files))])
        try:
            answer = ask()
        except ServerError as error:
            if error.status is not None:
                raise
            answer = ask()  # its answer may be lost: a file that is kept already is not taken twice
        with self._reading("files to keep"):
            refused = {name: str(why) for of_worker in answer["results"] for name, why in of_worker.items()}
        if whole := [file for file in files if not file["base"] and file["name"] in refused]:
            raise ServerError(f"{self.url} cannot keep {whole[0]['path']}: {refused[whole[0]['name']]}")
        return refused

    @abstractmethod
    def load(self, update: Mapping[str, Any]) -> None:
        """Load the tensors of a bucket; `update` is the transport's description of the bucket."""

    def finish_update(self, version: int) -> None:
        """End a weight update. The server's weights now have the version `version`."""
        self._step("finish", name=self.owner.version(version) if self.owner else f"v{version}")

    def reset_caches(self) -> None:
        """Drop the cached keys and values of prompts and running requests; they are recomputed with the new weights."""
        self._step("reset")

    def resume(self) -> None:
        """Continue after a `pause`, if there was one; released memory of keys and values comes back first."""
        assert self._asleep != "all", "weights come first"
        if self._asleep == "cache":
            self._wake("wake_cache", "awake")
            self._asleep = "nothing"
            if not self.RESUMES_AWAKE:
                self._step("resume")
        else:
            self._step("resume")

    @abstractmethod
    def undo_update(self) -> None:
        """End an open or failed update, wake and resume the server. Its weights may be wrong until a whole update. One
        that this object has put to sleep stays as it is: its process ends with the run.
        """

    def load_adapter(self, name: str, folder: str) -> None:
        """Load the low-rank adapter in the peft folder `folder`; requests then refer to it by `name`."""
        self._step("load_adapter", lora_name=name, lora_path=folder)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. No request in progress may use it."""
        self._step("unload_adapter", lora_name=name)

    def prompt_logprobs(self, tokens_T: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... by the server's weights and adapter, at temperature 1, uncached."""
        logprobs, _ = self.scores(tokens_T, adapter=adapter)
        return finite_logprobs(self.url, logprobs)

    def scores(
        self, tokens_T: Sequence[int], *, start: int = 0, top_k: int = 0, adapter: str | None = None
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Return the logprobs of tokens start + 1, start + 2, ... at temperature 1, EXCLUDED or less for a probability
        of 0, and in the place of each the `top_k` likeliest tokens with their logprobs, from the likeliest on. Raises
        ServerError if any is missing.
        """
        answer = self._call(self.STEPS["generate"][0], **self._scoring(tokens_T, adapter, start, top_k))
        with self._reading("prompt logprobs"):
            entries = self._scores(answer, tokens_T, start)
            logprobs = [entry[token] for token, entry in zip(tokens_T[start + 1 :], entries, strict=True)]
            top = [sorted(entry.items(), key=lambda pair: -pair[1])[:top_k] for entry in entries]
            if short := [len(likeliest) for likeliest in top if len(likeliest) < top_k]:
                raise ServerError(f"{self.url}: {short[0]} likeliest tokens, wanted {top_k}")
            finite_logprobs(self.url, [max(value, EXCLUDED) for entry in entries for value in entry.values()])
            return logprobs, top

    @abstractmethod
    def _scoring(self, tokens_T: Sequence[int], adapter: str | None, start: int, top_k: int) -> dict[str, Any]:
        """Return the fields of a request for the logprobs of a prompt, as `scores` has them."""

    @abstractmethod
    def _scores(self, answer: Any, tokens_T: Sequence[int], start: int) -> Sequence[Mapping[int, float]]:
        """Return, for tokens start + 1, start + 2, ..., the logprobs in an answer by token."""

    def model(self) -> tuple[str, int]:
        """Return the name of the server's model, and how many tokens a request may have with its answer."""
        with self._reading("/v1/models"):
            card = self._call("/v1/models", limit_s=HEALTH_S)["data"][0]
            return f"{card['id']} ({card['root']})", int(card["max_model_len"])

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text by the server's tokenizer, without tokens that mark its ends."""
        with self._reading("/tokenize"):
            answer = self._call("/tokenize", limit_s=HEALTH_S, prompt=text, add_special_tokens=False)
            return [int(token) for token in answer["tokens"]]

    def text_of(self, tokens_T: Sequence[int]) -> str:
        """Return the text of tokens by the server's tokenizer, with the names of special tokens."""
        with self._reading("/detokenize"):
            answer = self._step("detokenize", limit_s=HEALTH_S, tokens=list(tokens_T))
            return str(answer["prompt" if "prompt" in answer else "text"])

    def is_healthy(self) -> bool:
        """Return whether the thread that computes answers; never raises. The process that takes requests answers for
        its own health also while that thread hangs.
        """
        try:
            self._step("health", limit_s=HEALTH_S)
        except ServerError:
            return False
        return True

    def queue(self) -> tuple[int, int] | None:
        """Return how many requests the server computes, and how many wait there; None if it does not say so."""
        try:
            with self._reading("load"):
                return self._queue(self._step("queue", limit_s=HEALTH_S))
        except ServerError:
            return None

    @abstractmethod
    def _queue(self, answer: Any) -> tuple[int, int] | None:
        """Return the numbers of `queue` in an answer."""

    def is_ours(self, owner: Owner, *, is_first: bool = False) -> bool:
        """Return whether the server is of this start of a run (`owns`). Raises TakenError if it is another run's."""
        return owns(self.url, str(self._told("weights", "weight_version")), owner, is_first=is_first)

    def name_weights(self, text: str) -> None:
        """Set the text of the weights' version."""
        self._step("set_version", limit_s=HEALTH_S, name=text)

    def version(self) -> str:
        """Return the version of the server's software, such as "0.32.0"."""
        return str(self._told("software", "version"))

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of the server's workers; each worker has a part of the weights."""

    def refuse_untried(self) -> None:
        """Raise EngineError for an untried version of the software: its weight updates may be silently wrong."""
        version = self.version()
        first, beyond = self.TRIED
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())
        if not first <= numbers < beyond:
            dotted = [".".join(map(str, bound)) for bound in self.TRIED]
            newer = ", newer than the table of its protocol (rl/engines/protocol.toml)" if numbers >= beyond else ""
            raise EngineError(
                f"{self.url} is {self.KIND} {version}{newer}; tried are versions from {dotted[0]} to below "
                f"{dotted[1]}. Install one of these."
            )

    def _told(self, step: str, name: str) -> Any:
        """Return the field `name` of a step's answer."""
        with self._reading(f"{self.STEPS[step][0]}, which lacks {name},"):
            return self._step(step, limit_s=HEALTH_S)[name]

    def _step(self, step: str, *, limit_s: float | None = None, name: str = "", **fields: Any) -> Any:
        """Make a call of `STEPS`, with further fields."""
        path, fixed = self.STEPS[step]
        filled = {key: {None: name, (None,): [name]}.get(value, value) for key, value in fixed.items()}
        return self._call(path, limit_s=limit_s, **filled, **fields)

    def _call(self, path: str, *, limit_s: float | None = None, **fields: Any) -> Any:
        """Make a call of the protocol. Returns the answer. Raises ServerError unless the answer tells success."""
        call, limit_s = PROTOCOLS[self.KIND][path], limit_s or self._update_s
        missing = {name for name, default in call.fields.items() if default is REQUIRED} - fields.keys()
        assert fields.keys() <= call.fields.keys() and not missing, (path, fields.keys(), missing)
        for name, allowed in call.values.items():
            assert fields.get(name, call.fields[name]) in allowed, (path, name, allowed)
        if call.place == "get":
            return self._http.get(path, timeout_s=limit_s, is_json=call.answer != "text")
        where = path
        if call.place == "query" and fields:
            texts = {name: value if isinstance(value, tuple) else str(value).lower() for name, value in fields.items()}
            where += "?" + urlencode(texts, doseq=True)
        body = fields if call.place == "body" else None
        answer = self._http.post(where, body, timeout_s=limit_s, is_json=call.answer != "text")
        if call.answer == "success" and not (isinstance(answer, dict) and answer.get("success") is True):
            raise ServerError(f"{self.url}{where}: status 200 without success: {answer}")
        return answer

    def _call_if_open(self, path: str) -> None:
        """Make a call that a server without an open update refuses, as its table says; such a refusal is no error."""
        try:
            self._call(path, limit_s=HEALTH_S)
        except ServerError as error:
            refusals = PROTOCOLS[self.KIND][path].refusals
            if not any(error.status == refusal.status and refusal.text in str(error) for refusal in refusals):
                raise

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Context that reads an answer: an answer of another form than expected becomes a ServerError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: {what} of another form: {error!r}") from None


def server_apis(
    engine: ServedConfig | TeacherServerConfig,
    model: ModelConfig,
    owner: Owner | None = None,
    *,
    model_name: str | None = MODEL,
) -> Callable[[str], ServerApi]:
    """Return a function that maps a server's address to its API, for the run `owner` that sends it weights. Raises
    ConfigError if the environment variable named by `engine.api_key_env` is not set.
    """
    key = environment_variable(engine.api_key_env) if engine.api_key_env else None
    if engine.api_key_env and key is None:
        raise ConfigError(
            f"the key of the servers is to be read from the environment variable {engine.api_key_env}, which is not "
            "set here. Export it, or clear the section's api_key_env or --api-key-env."
        )
    api: type[ServerApi] = load_extension("rl.engine.kind", APIS[engine.kind])
    return lambda url: api(
        HttpClient(url, api_key=key, ca_file=engine.ca_file),
        vocab_size=model.vocab_size,
        experts_per_token=model.moe.top_k,
        request_timeout_s=engine.request_timeout_s,
        update_timeout_s=engine.update_timeout_s,
        owner=owner,
        model_name=model_name,
    )


def owns(url: str, text: str, owner: Owner, *, is_first: bool = False) -> bool:
    """Return whether the version `text` is of this start of the run `owner`; false if it is of no run or, with
    `is_first`, of a former start. Raises TakenError if it is of another run, or otherwise of another start.
    """
    found = VERSION.fullmatch(text)
    if found is None or found["run"] is None or found["token"] == owner.token:
        return found is not None and found["run"] is not None
    if is_first and found["run"] == owner.run:
        return False
    other = "another start of this run" if found["run"] == owner.run else f"the run {found['run']}"
    raise TakenError(
        f"{url} belongs to {other}: both would get completions of the other's weights (this run is {owner.run}). Give "
        "this run servers of its own. If that run has ended, start the server anew, or send "
        '{"new_version": "default"} to its /update_weight_version'
    )


def _check_end(url: str, prompt_T: Sequence[int], sampling: Sampling, read: Answered) -> None:
    """Raise ServerError unless the completion ended as it was asked to, with tokens of the vocabulary."""
    tokens_T, finish, limit = read.tokens_T, read.finish, sampling.vocab_size
    if finish not in ("stop", "length"):
        raise ServerError(f"{url}: a completion ended by {finish!r}, not by a stop token or its length")
    if not tokens_T:
        raise ServerError(f"{url}: a completion without tokens")
    if (finish == "stop") != (tokens_T[-1] in sampling.stop_tokens):
        raise ServerError(
            f"{url}: finish_reason={finish!r} with the last token {tokens_T[-1]}; the stop tokens are "
            f"{sorted(sampling.stop_tokens)}"
        )
    if finish == "length" and len(tokens_T) != sampling.max_new_tokens:
        raise ServerError(
            f"{url}: the completion of a prompt of {len(prompt_T)} tokens was cut at {len(tokens_T)} tokens, and "
            f"{sampling.max_new_tokens} were asked for: the server holds fewer than both together. Start it with a "
            "larger --max-model-len"
        )
    if any(token < 0 or (limit is not None and token >= limit) for token in tokens_T):
        raise ServerError(f"{url}: a sampled id is outside of the vocabulary of {limit} ids")


def finite_logprobs(url: str, logprobs: Sequence[float]) -> list[float]:
    """Return the logprobs. Raises ServerError if a value is not a logprob, such as null (NaN as JSON) or positive."""
    wrong = [value for value in logprobs if not isinstance(value, float | int) or not -1e30 < value < 1e-5]
    if wrong:
        raise ServerError(f"{url}: {wrong[0]} is no logprob: the weights of the server may be broken")
    return [min(float(value), 0.0) for value in logprobs]


def version_spans(
    url: str, spans: Sequence[Mapping[str, Any]], owner: Owner | None, *, num_tokens: int
) -> tuple[VersionSpan, ...]:
    """Return the versions of the weights that sampled `num_tokens` tokens; NO_VERSION for a text that `Owner.version`
    did not make. Adjacent spans of a version are merged. Raises TakenError if another run gave the server weights, and
    ServerError if the spans are not those of the tokens, by rising version.
    """
    found: list[VersionSpan] = []
    for span in spans:
        text = str(span["version"])
        named = VERSION.fullmatch(text)
        is_ours = owner is None or owns(url, text, owner)
        version = int(named["step"]) if named and named["step"] and is_ours else NO_VERSION
        start, end = int(span["start"]), int(span["end"])
        if found and found[-1].version == version and found[-1].end == start:
            start = found.pop().start
        found.append(VersionSpan(version, start, end))
    ends = [span.end for span in found]
    if (
        not found
        or [span.start for span in found] != [0, *ends[:-1]]
        or ends[-1] != num_tokens
        or any(span.start >= span.end for span in found)
        or [span.version for span in found] != sorted({span.version for span in found})
    ):
        raise ServerError(f"{url}: the spans of versions {found} are not those of {num_tokens} tokens")
    return tuple(found)


LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


def logprobs_mode(cut: Cut) -> LogprobsMode | None:
    """Return the --logprobs-mode with logprobs at the sampling temperature before the cut, None if there is none:
    `processed_logprobs` are at the temperature after the cut, `raw_logprobs` at temperature 1 before it.
    """
    if cut.is_open:
        return "processed_logprobs"
    return "raw_logprobs" if cut.temperature == 1.0 else None


def logprobs_remedy(kind: str, sampling: Sampling, vocab_size: int) -> str:
    """Return what to do with a server of a model of `vocab_size` ids whose logprobs are not as training needs them."""
    mode, num_ids = logprobs_mode(sampling.cut), sampling.vocab_size or vocab_size
    if kind == "sglang":
        return "Start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    other = 'set rl.rollout.top_k=none, top_p=1 and min_p=0, or rl.engine.kind="sglang"'
    if mode is None:
        return f"vLLM reports them in no --logprobs-mode: {other}"
    if mode == "processed_logprobs" or num_ids == vocab_size:
        return f"Start vLLM with --logprobs-mode {mode}"
    return (
        f"Start vLLM with --logprobs-mode {mode}. If it was, the {vocab_size - num_ids} ids that only pad the model's "
        f"vocabulary of {vocab_size} have too much probability, which this mode counts: {other}"
    )


ROUTES_FLAG = "--enable-return-routed-experts"
"""Argument that makes vLLM and SGLang record routes."""
FEW_TOKENS = 8
"""With one expert per token, fewer tokens than this may all have expert 0; more tokens count as not recorded."""


def pick_layers(
    url: str, experts_TLK: NDArray[np.integer] | None, model: ModelConfig, *, num_tokens: int, may_miss: bool = False
) -> NDArray[np.integer]:
    """Return the experts `[num_tokens, MoE layers, K]` of a completion, from routes of all hidden layers or only of the
    MoE layers. `num_tokens` excludes the last token, which enters no layer. With `may_miss` (replay.missing), rows that
    the server filled with -1, or with zeros for several experts, are -1. Raises ServerError if routes are missing or
    invalid.
    """
    if experts_TLK is None:
        raise ServerError(f"{url}: the completion came without routes. Start the server with {ROUTES_FLAG}")
    moe_layers = [layer for layer, has_router in enumerate(model.moe_layers) if has_router]
    num_rows, num_layers, top_k = experts_TLK.shape
    if num_rows != num_tokens:
        raise ServerError(f"{url}: routes of {num_rows} tokens, and {num_tokens} entered the model")
    if top_k != model.moe.top_k or num_layers not in (model.num_layers, len(moe_layers)):
        raise ServerError(
            f"{url}: routes of {num_layers} layers with {top_k} experts a token; the model has {model.num_layers} "
            f"layers, {len(moe_layers)} of them with routers, and {model.moe.top_k} experts a token"
        )
    picked_TLK = experts_TLK if num_layers == len(moe_layers) else experts_TLK[:, moe_layers]
    if may_miss:
        is_missing_T = (picked_TLK == -1).all(axis=(1, 2))
        if top_k > 1:
            is_missing_T |= (picked_TLK == 0).all(axis=(1, 2))
        if is_missing_T.any() and not is_missing_T.all():
            _check_routes(url, picked_TLK[~is_missing_T], model, moe_layers)
            return np.where(is_missing_T[:, None, None], np.int32(-1), picked_TLK)
    _check_routes(url, picked_TLK, model, moe_layers)
    return picked_TLK


def without_recomputed(
    url: str, experts_TLK: NDArray[np.integer], versions: Sequence[VersionSpan], num_prompt: int, *, may_miss: bool
) -> NDArray[np.integer]:
    """Return the experts `[T, layers, K]`, with -1 for tokens recomputed under newer weights. A server that gets
    weights while a request runs overwrites the routes of its tokens so far, but their logprobs are still from the
    weights that sampled them. Raises ServerError if there are such tokens and `may_miss` (replay.missing) is false.
    """
    # The last older token entered the model only under the newer weights, which then sampled the next token.
    num_recomputed = num_prompt + versions[-1].start - 1 if len(versions) > 1 else 0
    if not num_recomputed:
        return experts_TLK
    if not may_miss:
        raise ServerError(
            f"{url}: weights came after {versions[-1].start} tokens of the completion, and the server computed the "
            f"routes of {num_recomputed} tokens again with them: they are not the routes with which these were "
            'sampled. replay.missing="live" routes them live, "refuse" leaves their completion out'
        )
    kept_TLK = experts_TLK.astype(np.int32)  # bytes have no -1
    kept_TLK[:num_recomputed] = -1
    return kept_TLK


def _check_routes(url: str, picked_TLK: NDArray[np.integer], model: ModelConfig, moe_layers: Sequence[int]) -> None:
    if picked_TLK.size and (picked_TLK.min() < 0 or picked_TLK.max() >= model.moe.num_experts):
        raise ServerError(
            f"{url}: routes name experts {picked_TLK.min()} to {picked_TLK.max()}, and a layer has "
            f"{model.moe.num_experts}"
        )
    # Few tokens with one expert each may all have expert 0.
    may_be_zero = picked_TLK.shape[2] == 1 and picked_TLK.shape[0] < FEW_TOKENS
    is_zero_L = (picked_TLK == 0).all(axis=(0, 2))
    zero = [layer for layer, is_zero in zip(moe_layers, is_zero_L, strict=True) if is_zero]
    if zero and not may_be_zero:
        raise ServerError(f"{url}: the routes of layers {zero} are all zero: they were not recorded")
    # Long rows for each of the K experts: sorting rows of K takes ten times as long.
    experts_KTL = np.ascontiguousarray(np.moveaxis(picked_TLK, 2, 0))
    if any((one_TL == other_TL).any() for one_TL, other_TL in combinations(experts_KTL, 2)):
        raise ServerError(f"{url}: the routes name an expert of a token twice")
