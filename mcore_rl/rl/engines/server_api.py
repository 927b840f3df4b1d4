"""Interface of an inference server: what is asked of it over HTTP, and what it answers. Policy, such as retries, is not
here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_rl.errors import EngineError
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.types import FinishReason, VersionSpan

NO_VERSION = -1
"""Version of the weights with which a server starts."""


class ServerError(EngineError):
    """A server that did not do what it was asked: it refused, failed, gave an answer that cannot be right, or none in
    time. After a failed update of weights nobody knows the weights that it has.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer; None: there was no answer, or one with status 200 that is not right."""

    @property
    def is_refusal(self) -> bool:
        """Whether the server calls the request itself wrong, so that another server would refuse it too."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCompletion:
    """Answer of a server to one request: `logprobs_T[t]` belongs to `tokens_T[t]`."""

    tokens_T: tuple[int, ...]
    """Sampled tokens, with the stop token, if one ended the completion."""
    logprobs_T: tuple[float, ...]
    """Logprobs at the sampling temperature, in nats."""
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens, as the server reports them."""
    experts_TLK: NDArray[np.int32] | None
    """Experts of each token of prompt and completion but the last, for all layers that the server recorded, as they
    came (`served_routes.pick_layers` checks them and picks the layers that route); None: not asked for."""


class ServerApi(Protocol):
    """One server. Every method blocks, has a time limit of its own, may be called by several threads at a time, and
    raises ServerError when the server did not do it.
    """

    @property
    def url(self) -> str:
        """Address, such as http://127.0.0.1:8000."""

    def generate(
        self, prompt_T: Sequence[int], sampling: Sampling, seed: int, *, salt: str, request_id: str
    ) -> ServedCompletion:
        """Return the completion of a prompt. Stop strings are not the server's: the caller cuts at them.

        Args:
            prompt_T: Ids of the prompt, which the caller has checked: an id beyond the vocabulary ends some servers.
            sampling: Rules of sampling; all of them are sent, so that no default of the server counts.
            seed: Seed of this completion, in 63 bits.
            salt: Requests of different salts share no cached prefix.
            request_id: Name by which `abort` ends this request.
        """

    def abort(self, request_id: str) -> None:
        """End a running request, whose `generate` then raises ServerError; nothing happens if there is none."""

    def pause(self) -> None:
        """Stop computing. Running requests and caches stay, and requests that come wait."""

    def start_update(self) -> None:
        """Begin an update of weights."""

    def load(self, update: Mapping[str, Any]) -> None:
        """Load the tensors of one bucket, which `update` describes in the words of the transport."""

    def finish_update(self, version: int) -> None:
        """End an update of weights, which are those of `version` from here on."""

    def reset_caches(self) -> None:
        """Forget the keys and values of prompts and of running requests, which are computed again by the weights."""

    def resume(self) -> None:
        """Compute again after a `pause`; of a server that is not paused nothing changes."""

    def prompt_logprobs(self, tokens_T: Sequence[int]) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... under the server's weights, at temperature 1, without caches."""

    def is_healthy(self) -> bool:
        """Whether the server says that it can work; it never raises."""

    def version(self) -> str:
        """Return the version of the server's software, such as "0.32.0"."""

    def world_size(self) -> int:
        """Return the number of the server's workers, each of which has a part of the weights."""


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
    """Return an answer of the server `url` as a record; ServerError where it cannot be right."""
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
    """Return the logprobs; ServerError where one is no logprob, such as null (NaN as JSON) or a positive number."""
    wrong = [value for value in logprobs if not isinstance(value, float | int) or not -1e30 < value < 1e-5]
    if wrong:
        raise ServerError(f"{url}: {wrong[0]} is no logprob: the weights of the server may be broken")
    return [min(float(value), 0.0) for value in logprobs]


def version_spans(spans: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """Return the spans that a server reports. Versions are "v12", or another text before the first update, which is
    NO_VERSION. Spans of equal versions that follow each other are one.
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
