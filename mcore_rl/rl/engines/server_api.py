"""Requests to inference servers: HTTP, the interface of a server, and checks of its answers and routes.

It contains no policy, such as retries.
"""

import http.client
import json
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.extension import load_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import FinishReason, VersionSpan
from mcore_rl.workers.launcher import environment_variable

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

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, is_json: bool = True) -> Any:
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


NO_VERSION = -1
"""Version of a server's initial weights."""
MODEL = "policy"
"""Name under which the server serves the model (--served-model-name)."""
NEVER = -100.0
"""Lowest logit bias that the servers accept; it multiplies a token's weight by e^-100."""
PROBE_TIMEOUT_S = 30.0
APIS = {"vllm": "mcore_rl.rl.engines.vllm_api:VllmApi", "sglang": "mcore_rl.rl.engines.sglang_api:SglangApi"}
"""Class of each kind of server; its module is imported only for a config that names it."""


class ServerError(EngineError):
    """Raised if a server refuses a request, fails, gives an invalid answer, or does not answer in time. After a failed
    weight update, the server's weights are unknown.
    """

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
    experts_TLK: NDArray[np.int32] | None
    """Experts of each token of prompt and completion but the last, for all layers that the server recorded, unchecked
    (`served_routes.pick_layers` checks them and selects the MoE layers); None if not requested."""


class ServerApi(ABC):
    """An inference server. Every method blocks, has a time limit, may be called from several threads at the same time,
    and raises ServerError on failure.
    """

    KIND: ClassVar[str]
    """The value of rl.engine.kind."""
    TRIED: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]]
    """The first version of the software that was tried or read, and the first later version that was not."""

    def __init__(
        self,
        http: HttpClient,
        *,
        vocab_size: int,
        experts_per_token: int = 0,
        request_timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        """Create the API of a server.

        Args:
            http: HTTP client of the server.
            vocab_size: Number of ids of the model, including padding of its vocabulary.
            experts_per_token: Number of experts per token, for servers that send routes without a shape.
            request_timeout_s: Time limit of a completion, in seconds.
            update_timeout_s: Time limit of each call of a weight update, in seconds.
        """
        self._http, self._vocab_size, self._top_k = http, vocab_size, experts_per_token
        self._request_s, self._update_s = request_timeout_s, update_timeout_s

    @property
    def url(self) -> str:
        """Address, such as http://127.0.0.1:8000."""
        return self._http.url

    @abstractmethod
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
        """Return the completion of a prompt. The server ignores stop strings: the caller cuts the completion at them.

        Args:
            prompt_T: Ids of the prompt. The caller checks them, because an id beyond the vocabulary crashes some
                servers.
            sampling: Sampling parameters; all of them are sent, so that no default of the server applies.
            seed: Seed of this completion, 63 bits.
            salt: Requests with different salts share no cached prefix.
            request_id: Name by which `abort` identifies this request.
            adapter: Name of the low-rank adapter to sample with; None: the server's own weights.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a running request, so that its `generate` raises ServerError; does nothing if it is not running."""

    @abstractmethod
    def pause(self) -> None:
        """Stop computing. Running requests and caches are kept, and new requests wait."""

    @abstractmethod
    def start_update(self) -> None:
        """Begin a weight update."""

    @abstractmethod
    def load(self, update: Mapping[str, Any]) -> None:
        """Load the tensors of a bucket; `update` is the transport's description of the bucket."""

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """End a weight update. The server's weights now have the version `version`."""

    @abstractmethod
    def reset_caches(self) -> None:
        """Drop the cached keys and values of prompts and running requests; they are recomputed with the new weights."""

    @abstractmethod
    def resume(self) -> None:
        """Continue computing after a `pause`; does nothing if the server is not paused."""

    @abstractmethod
    def load_adapter(self, name: str, folder: str) -> None:
        """Load the low-rank adapter in the peft folder `folder`; requests then refer to it by `name`."""

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. No request in progress may use it."""

    @abstractmethod
    def prompt_logprobs(self, tokens_T: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... under the server's weights, and the adapter if it is given, at
        temperature 1, without caches.
        """

    def is_healthy(self) -> bool:
        """Whether the server reports that it is healthy; never raises."""
        try:
            self._http.get("/health", timeout_s=PROBE_TIMEOUT_S)
        except ServerError:
            return False
        return True

    @abstractmethod
    def version(self) -> str:
        """Return the version of the server's software, such as "0.32.0"."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of the server's workers; each worker has a part of the weights."""

    def refuse_untried(self) -> None:
        """Raise EngineError if the server runs an untried version of its software.

        The answers of such a server may have a different meaning, and its weight updates may be silently wrong.
        """
        version = self.version()
        first, beyond = self.TRIED
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())
        if not first <= numbers < beyond:
            dotted = [".".join(map(str, bound)) for bound in self.TRIED]
            raise EngineError(
                f"{self.url} is {self.KIND} {version}; tried are versions from {dotted[0]} to below {dotted[1]}. "
                "Install one of these."
            )

    def _logit_bias(self, sampling: Sampling) -> dict[str, dict[str, float]]:
        """Return the parameter that forbids the model's ids beyond the tokenizer's vocabulary; empty if none are."""
        padding = range(sampling.vocab_size or self._vocab_size, self._vocab_size)
        return {"logit_bias": {str(token): NEVER for token in padding}} if padding else {}

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Context that reads an answer: an answer of another form than expected becomes a ServerError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: {what} of another form: {error!r}") from None


def server_apis(engine: ServedConfig, model: ModelConfig) -> Callable[[str], ServerApi]:
    """Return a function that maps a server's address to its API.

    Raises:
        ConfigError: if the environment variable named by rl.engine.api_key_env is not set.
    """
    key = environment_variable(engine.api_key_env) if engine.api_key_env else None
    if engine.api_key_env and key is None:
        raise ConfigError(
            f"the key of the servers is to be read from the environment variable {engine.api_key_env}, which is not "
            "set here. Export it, or clear rl.engine.api_key_env or --api-key-env."
        )
    api: type[ServerApi] = load_extension("rl.engine.kind", APIS[engine.kind])
    return lambda url: api(
        HttpClient(url, api_key=key, ca_file=engine.ca_file),
        vocab_size=model.vocab_size,
        experts_per_token=model.moe.top_k,
        request_timeout_s=engine.request_timeout_s,
        update_timeout_s=engine.update_timeout_s,
    )


def completion_of(
    url: str,
    prompt_T: Sequence[int],
    sampling: Sampling,
    *,
    tokens_T: tuple[int, ...],
    logprobs_T: tuple[float, ...],
    finish: str,
    versions: tuple[VersionSpan, ...],
    experts_TLK: NDArray[np.int32] | None,
) -> ServedCompletion:
    """Convert an answer of the server `url` to a record. Raises ServerError if the answer is inconsistent."""
    if finish not in ("stop", "length"):
        raise ServerError(f"{url}: a completion ended by {finish!r}, not by a stop token or its length")
    if not tokens_T or len(logprobs_T) != len(tokens_T):
        raise ServerError(f"{url}: {len(tokens_T)} tokens with {len(logprobs_T)} logprobs")
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
    limit = sampling.vocab_size
    if any(token < 0 or (limit is not None and token >= limit) for token in tokens_T):
        raise ServerError(f"{url}: a sampled id is outside of the vocabulary of {limit} ids")
    ends = [span.end for span in versions]
    if (
        not versions
        or [span.start for span in versions] != [0, *ends[:-1]]
        or ends[-1] != len(tokens_T)
        or any(span.start >= span.end for span in versions)
        or [span.version for span in versions] != sorted({span.version for span in versions})
    ):
        raise ServerError(f"{url}: the spans of versions {versions} are not those of {len(tokens_T)} tokens")
    return ServedCompletion(
        tokens_T=tokens_T,
        logprobs_T=tuple(finite_logprobs(url, logprobs_T)),
        finish="stop" if finish == "stop" else "length",
        versions=versions,
        experts_TLK=experts_TLK,
    )


def finite_logprobs(url: str, logprobs: Sequence[float]) -> list[float]:
    """Return the logprobs. Raises ServerError if a value is not a logprob, such as null (NaN as JSON) or positive."""
    wrong = [value for value in logprobs if not isinstance(value, float | int) or not -1e30 < value < 1e-5]
    if wrong:
        raise ServerError(f"{url}: {wrong[0]} is no logprob: the weights of the server may be broken")
    return [min(float(value), 0.0) for value in logprobs]


def version_spans(spans: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """Return the version spans that a server reports. A version is a text such as "v12"; any other text, as before the
    first update, is NO_VERSION. Adjacent spans of the same version are merged.
    """
    found: list[VersionSpan] = []
    for span in spans:
        name = str(span["version"])
        version = int(name[1:]) if name[:1] == "v" and name[1:].isdecimal() else NO_VERSION
        start, end = int(span["start"]), int(span["end"])
        if found and found[-1].version == version and found[-1].end == start:
            start = found.pop().start
        found.append(VersionSpan(version, start, end))
    return tuple(found)


LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


def logprobs_mode(cut: Cut) -> LogprobsMode | None:
    """Return the --logprobs-mode that gives logprobs at the sampling temperature before top-k, top-p and min-p.

    `processed_logprobs` are at the temperature and after the cut, `raw_logprobs` at temperature 1 and before the cut.
    None if neither mode gives them.
    """
    if cut.is_open:
        return "processed_logprobs"
    return "raw_logprobs" if cut.temperature == 1.0 else None


ROUTES_FLAG = "--enable-return-routed-experts"
"""Argument that makes vLLM and SGLang record routes."""
FEW_TOKENS = 8
"""With one expert per token, fewer tokens than this may all have expert 0; more tokens count as not recorded."""


def pick_layers(
    url: str, experts_TLK: NDArray[np.int32] | None, model: ModelConfig, *, num_tokens: int, may_miss: bool = False
) -> NDArray[np.int32]:
    """Return the experts `[num_tokens, MoE layers, K]` of a completion.

    Args:
        url: The server's address, for error messages.
        experts_TLK: The server's routes, of all hidden layers (dense layers have zeros) or only of the MoE layers;
            None if the answer has no routes.
        model: The model's config.
        num_tokens: Number of tokens of prompt and completion, without the last token, which enters no layer.
        may_miss: Whether the server may leave out some tokens (replay.missing). It fills their rows with -1, or with
            zeros, which are not valid routes if a token has several experts. These rows are -1 in the result.

    Raises:
        ServerError: if routes are missing or invalid. If the server recorded nothing, routes are zeros; if recording
            was cut short, rows are missing. Such a completion must be generated again.
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
    url: str, experts_TLK: NDArray[np.int32], versions: Sequence[VersionSpan], num_prompt: int, *, may_miss: bool
) -> NDArray[np.int32]:
    """Set rows that were recomputed under newer weights to -1, and return the experts.

    A server that gets new weights while a request runs recomputes the request's tokens so far (SGLang's "retract",
    vLLM's reset of running requests), and overwrites the routes that it returns at the end of the request. The logprobs
    of these tokens are still from the weights that sampled them, so the routes no longer match.

    Args:
        url: The server's address, for error messages.
        experts_TLK: Experts `[T, layers, K]` of prompt and completion, without the last token.
        versions: Versions of the weights that sampled the completion's tokens.
        num_prompt: Number of tokens of the prompt.
        may_miss: Whether tokens may have no routes (replay.missing).

    Raises:
        ServerError: if there are such rows and `may_miss` is false.
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
    kept_TLK = experts_TLK.copy()
    kept_TLK[:num_recomputed] = -1
    return kept_TLK


def _check_routes(url: str, picked_TLK: NDArray[np.int32], model: ModelConfig, moe_layers: Sequence[int]) -> None:
    """Raise a ServerError if these are not valid routes of the MoE layers."""
    if picked_TLK.size and (picked_TLK.min() < 0 or picked_TLK.max() >= model.moe.num_experts):
        raise ServerError(
            f"{url}: routes name experts {picked_TLK.min()} to {picked_TLK.max()}, and a layer has "
            f"{model.moe.num_experts}"
        )
    if zero := _zero_layers(picked_TLK, moe_layers):
        raise ServerError(f"{url}: the routes of layers {zero} are all zero: they were not recorded")
    if model.moe.top_k > 1 and (np.diff(np.sort(picked_TLK, axis=2), axis=2) == 0).any():
        raise ServerError(f"{url}: the routes name an expert of a token twice")


def _zero_layers(experts_TLK: NDArray[np.int32], layers: Sequence[int]) -> list[int]:
    """Return the layers in which every expert is 0; none for few tokens with one expert each, where this can occur."""
    few = experts_TLK.shape[2] == 1 and experts_TLK.shape[0] < FEW_TOKENS
    is_zero_L = (experts_TLK == 0).all(axis=(0, 2))
    return [] if few else [layer for layer, is_zero in zip(layers, is_zero_L, strict=True) if is_zero]
