"""vLLM's HTTP API, for a server started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out.

It follows the source of vllm 0.32 and 0.33. This is the only file that speaks to vLLM.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.http_client import HttpClient
from mcore_rl.rl.engines.server_api import (
    ServedCompletion,
    ServerError,
    completion_of,
    finite_logprobs,
    version_spans,
)
from mcore_rl.rl.sampling import Cut

MODEL = "policy"
"""Name under which the server serves the model (--served-model-name)."""
ABORT_PREFIX = "generate-tokens-"
"""Prefix that the server adds to a request's id; an abort without it returns 200 and does nothing."""
NEVER = -100.0
"""Lowest logit bias that the server accepts; it multiplies a token's weight by e^-100."""
PROBE_TIMEOUT_S = 30.0


class VllmApi:
    """A vLLM server."""

    def __init__(
        self,
        http: HttpClient,
        *,
        vocab_size: int,
        request_timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        """Create the API of a server.

        Args:
            http: HTTP client of the server.
            vocab_size: Number of ids of the model, including padding of its vocabulary.
            request_timeout_s: Time limit of a completion, in seconds.
            update_timeout_s: Time limit of each call of a weight update, in seconds.
        """
        self._http, self._vocab_size = http, vocab_size
        self._request_s, self._update_s = request_timeout_s, update_timeout_s

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._http.url

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
        """Return the completion of a prompt; see `ServerApi.generate`."""
        cut = sampling.cut
        # Every field is sent, because an omitted field would get a default of the server or the model.
        parameters: dict[str, Any] = {
            "seed": seed,
            "temperature": cut.temperature,
            "top_p": cut.top_p,
            "top_k": cut.top_k,
            "min_p": cut.min_p,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": 0,
            "ignore_eos": True,
            "stop_token_ids": sorted(sampling.stop_tokens),
        }
        if padding := padding_ids(sampling, self._vocab_size):
            parameters["logit_bias"] = {str(token): NEVER for token in padding}
        body = {
            "request_id": request_id,
            "model": adapter or MODEL,
            "token_ids": list(prompt_T),
            "cache_salt": salt,
            "sampling_params": parameters,
        }
        answer = self._http.post("/inference/v1/generate", body, timeout_s=self._request_s)
        try:
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            tokens_T = tuple(choice["token_ids"])
            logprobs_T = tuple(entry["logprob"] for entry in content)
            if [entry["token_id"] for entry in content] != list(tokens_T):
                raise ServerError(f"{self.url}: the logprobs are not of the tokens that were returned")
            experts = choice.get("routed_experts")
            return completion_of(
                self.url,
                prompt_T,
                sampling,
                tokens_T=tokens_T,
                logprobs_T=logprobs_T,
                finish=choice["finish_reason"],
                versions=version_spans(choice["weight_versions"]),
                experts_TLK=None if experts is None or not sampling.with_routes else read_npy(experts),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: an answer of another form: {error!r}") from None

    def abort(self, request_id: str) -> None:
        """End a running request."""
        body = {"request_ids": [ABORT_PREFIX + request_id]}
        self._http.post("/inference/v1/abort_requests", body, timeout_s=PROBE_TIMEOUT_S)

    def pause(self) -> None:
        """Stop computing. A server that is decoding would crash if it were updated without a pause."""
        self._http.post("/pause?mode=keep&clear_cache=false", timeout_s=self._update_s)

    def start_update(self) -> None:
        """Begin a weight update."""
        self._http.post("/start_weight_update", timeout_s=self._update_s)

    def load(self, update: Mapping[str, Any]) -> None:
        """Load a bucket; `update` is the `update_info` of the transfer backend that the server was started with."""
        self._http.post("/update_weights", {"update_info": dict(update)}, timeout_s=self._update_s)

    def finish_update(self, version: int) -> None:
        """End a weight update. The server's weights now have the version `version`."""
        self._http.post("/finish_weight_update", {"weight_version": f"v{version}"}, timeout_s=self._update_s)

    def reset_caches(self) -> None:
        """Drop the cached keys and values of prompts and running requests."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = self._http.post(path, timeout_s=self._update_s)
        # A reset that did nothing also returns status 200.
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(f"{self.url}{path}: the caches were not reset: {answer}")

    def resume(self) -> None:
        """Continue computing."""
        self._http.post("/resume", timeout_s=self._update_s)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a low-rank adapter. Requests refer to it in their field `model`."""
        body = {"lora_name": name, "lora_path": folder}
        # The answer is a sentence rather than JSON.
        self._http.post("/v1/load_lora_adapter", body, timeout_s=self._update_s, is_json=False)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        body = {"lora_name": name}
        self._http.post("/v1/unload_lora_adapter", body, timeout_s=self._update_s, is_json=False)

    def prompt_logprobs(self, tokens_T: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... at temperature 1. Such a request does not use the prefix cache."""
        body = {
            "model": adapter or MODEL,
            "token_ids": list(tokens_T),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
        }
        answer = self._http.post("/inference/v1/generate", body, timeout_s=self._update_s)
        try:
            entries = answer["prompt_logprobs"][1:]
            logprobs = [
                entry[str(token)]["logprob"] for token, entry in zip(tokens_T[1:], entries, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: prompt logprobs of another form: {error!r}") from None
        return finite_logprobs(self.url, logprobs)

    def is_healthy(self) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            self._http.get("/health", timeout_s=PROBE_TIMEOUT_S)
        except ServerError:
            return False
        return True

    def version(self) -> str:
        """Return the version of vLLM."""
        answer = self._http.get("/version", timeout_s=PROBE_TIMEOUT_S)
        try:
            return str(answer["version"])
        except (KeyError, TypeError):
            raise ServerError(f"{self.url}/version: no version in {answer}") from None

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        answer = self._http.get("/get_world_size", timeout_s=self._update_s)
        try:
            return int(answer["world_size"])
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self.url}/get_world_size: no number in {answer}") from None


LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


def logprobs_mode(cut: Cut) -> LogprobsMode | None:
    """Return the --logprobs-mode that gives logprobs at the sampling temperature before top-k, top-p and min-p.

    `processed_logprobs` are at the temperature and after the cut, `raw_logprobs` at temperature 1 and before the cut.
    None if neither mode gives them.
    """
    if cut.is_open:
        return "processed_logprobs"
    return "raw_logprobs" if cut.temperature == 1.0 else None


def padding_ids(sampling: Sampling, vocab_size: int) -> range:
    """Return the model's ids beyond the tokenizer's vocabulary, which must not be drawn."""
    return range(sampling.vocab_size or vocab_size, vocab_size)


def read_npy(text: str) -> NDArray[np.int32]:
    """Decode the experts, which the server sends as base64 of a .npy file of uint8, uint16 or int32."""
    try:
        array: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise ServerError(f"routed_experts is no .npy file: {error}") from None
    # Wider integers would silently wrap around.
    if array.ndim != 3 or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int32):
        raise ServerError(
            f"routed_experts has shape {array.shape} and dtype {array.dtype}; wanted uint8, uint16 or int32 [tokens, "
            "layers, experts]"
        )
    return array.astype(np.int32)
