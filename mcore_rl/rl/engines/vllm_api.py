"""vLLM's HTTP API, for a server started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out.

It follows the source of vllm 0.32 and 0.33. This is the only file that speaks to vLLM.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.server_api import (
    MODEL,
    PROBE_TIMEOUT_S,
    ServedCompletion,
    ServerApi,
    ServerError,
    completion_of,
    finite_logprobs,
    version_spans,
)

ABORT_PREFIX = "generate-tokens-"
"""Prefix that the server adds to a request's id; an abort without it returns 200 and does nothing."""


class VllmApi(ServerApi):
    """A vLLM server."""

    KIND = "vllm"
    TRIED = ((0, 32), (0, 34))

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
            **self._logit_bias(sampling),
        }
        body = {
            "request_id": request_id,
            "model": adapter or MODEL,
            "token_ids": list(prompt_T),
            "cache_salt": salt,
            "sampling_params": parameters,
        }
        answer = self._http.post("/inference/v1/generate", body, timeout_s=self._request_s)
        with self._reading("an answer"):
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
        with self._reading("prompt logprobs"):
            entries = answer["prompt_logprobs"][1:]
            logprobs = [entry[str(token)]["logprob"] for token, entry in zip(tokens_T[1:], entries, strict=True)]
        return finite_logprobs(self.url, logprobs)

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
