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
