"""Interface of an inference server: requests over HTTP and their answers. It contains no policy, such as retries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_rl.errors import EngineError
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.types import FinishReason, VersionSpan

NO_VERSION = -1
"""Version of a server's initial weights."""


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


class ServerApi(Protocol):
    """An inference server. Every method blocks, has a time limit, may be called from several threads at the same time,
    and raises ServerError on failure.
    """

    @property
    def url(self) -> str:
        """Address, such as http://127.0.0.1:8000."""

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

    def abort(self, request_id: str) -> None:
        """End a running request, so that its `generate` raises ServerError; does nothing if it is not running."""

    def pause(self) -> None:
        """Stop computing. Running requests and caches are kept, and new requests wait."""

    def start_update(self) -> None:
        """Begin a weight update."""

    def load(self, update: Mapping[str, Any]) -> None:
        """Load the tensors of a bucket; `update` is the transport's description of the bucket."""

    def finish_update(self, version: int) -> None:
        """End a weight update. The server's weights now have the version `version`."""

    def reset_caches(self) -> None:
        """Drop the cached keys and values of prompts and running requests; they are recomputed with the new weights."""

    def resume(self) -> None:
        """Continue computing after a `pause`; does nothing if the server is not paused."""

    def load_adapter(self, name: str, folder: str) -> None:
        """Load the low-rank adapter in the peft folder `folder`; requests then refer to it by `name`."""

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. No request in progress may use it."""

    def prompt_logprobs(self, tokens_T: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... under the server's weights, and the adapter if it is given, at
        temperature 1, without caches.
        """

    def is_healthy(self) -> bool:
        """Whether the server reports that it is healthy; never raises."""

    def version(self) -> str:
        """Return the version of the server's software, such as "0.32.0"."""

    def world_size(self) -> int:
        """Return the number of the server's workers; each worker has a part of the weights."""


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
