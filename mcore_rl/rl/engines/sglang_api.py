"""SGLang's HTTP API, as read in the source of sglang 0.5.23 and tested only with a fake server.

This is the only file that speaks to SGLang.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.server_api import (
    PROBE_TIMEOUT_S,
    ServedCompletion,
    ServerApi,
    ServerError,
    completion_of,
    finite_logprobs,
    version_spans,
)


class SglangApi(ServerApi):
    """An SGLang server."""

    KIND = "sglang"
    TRIED = ((0, 5, 23), (0, 5, 24))

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
        parameters: dict[str, Any] = {
            "sampling_seed": seed,
            "temperature": cut.temperature,
            "top_p": cut.top_p,
            "top_k": cut.top_k or -1,
            "min_p": cut.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "ignore_eos": True,
            "stop_token_ids": sorted(sampling.stop_tokens),
            "no_stop_trim": True,
            **self._logit_bias(sampling),
        }
        body = {
            "rid": request_id,
            "input_ids": list(prompt_T),
            "sampling_params": parameters,
            "return_logprob": True,
            "extra_key": salt,
            "return_routed_experts": sampling.with_routes,
            **_named(adapter),
        }
        answer = self._http.post("/generate", body, timeout_s=self._request_s)
        with self._reading("an answer"):
            meta = answer["meta_info"]
            entries = meta["output_token_logprobs"]
            tokens_T = tuple(answer["output_ids"])
            if [entry[1] for entry in entries] != list(tokens_T):
                raise ServerError(f"{self.url}: the logprobs are not of the tokens that were returned")
            experts = meta.get("routed_experts")
            return completion_of(
                self.url,
                prompt_T,
                sampling,
                tokens_T=tokens_T,
                logprobs_T=tuple(entry[0] for entry in entries),
                finish=meta["finish_reason"]["type"],
                versions=version_spans(meta["weight_versions"]),
                experts_TLK=None
                if experts is None or not sampling.with_routes
                else read_flat(experts, len(prompt_T) + len(tokens_T) - 1, self._top_k),
            )

    def abort(self, request_id: str) -> None:
        """End a running request."""
        self._http.post("/abort_request", {"rid": request_id}, timeout_s=PROBE_TIMEOUT_S)

    def pause(self) -> None:
        """Stop computing. Running requests keep their tokens; their keys and values are recomputed later."""
        self._http.post("/pause_generation", {"mode": "retract"}, timeout_s=self._update_s)

    def start_update(self) -> None:
        """Begin a weight update."""
        self._succeeds("/begin_weight_update", {})

    def load(self, update: Mapping[str, Any]) -> None:
        """Load a bucket: a file of tensors `path`, the only file in its folder, or the tensors of a broadcast."""
        body = dict(update)
        if (path := body.pop("path", None)) is not None:
            folder = {"model_path": str(Path(path).parent), "flush_cache": False}
            self._succeeds("/update_weights_from_disk", folder)
        else:
            self._succeeds("/update_weights_from_distributed", body | {"flush_cache": False})

    def finish_update(self, version: int) -> None:
        """End a weight update. The server's weights now have the version `version`."""
        self._succeeds("/end_weight_update", {})
        self._succeeds("/update_weight_version", {"new_version": f"v{version}", "abort_all_requests": False})

    def reset_caches(self) -> None:
        """Drop the cached keys and values of prompts; `pause` has already dropped the running requests' own."""
        # The answer is a sentence rather than JSON, with status 400 if requests are still running.
        self._http.post("/flush_cache", timeout_s=self._update_s, is_json=False)

    def resume(self) -> None:
        """Continue computing."""
        self._http.post("/continue_generation", timeout_s=self._update_s)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a low-rank adapter."""
        self._succeeds("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self._succeeds("/unload_lora_adapter", {"lora_name": name})

    def prompt_logprobs(self, tokens_T: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of tokens 1, 2, ... at temperature 1."""
        body = {
            "input_ids": list(tokens_T),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            **_named(adapter),
        }
        answer = self._http.post("/generate", body, timeout_s=self._update_s)
        with self._reading("prompt logprobs"):
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != list(tokens_T[1:]):
                raise ServerError(f"{self.url}: prompt logprobs of other tokens than were sent")
            logprobs = [entry[0] for entry in entries]
        return finite_logprobs(self.url, logprobs)

    def version(self) -> str:
        """Return the version of SGLang."""
        return str(self._info("version"))

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(self._info("tp_size")) * int(self._info("pp_size"))

    def _info(self, name: str) -> Any:
        answer = self._http.get("/server_info", timeout_s=PROBE_TIMEOUT_S)
        try:
            return answer[name]
        except (KeyError, TypeError):
            raise ServerError(f"{self.url}/server_info: no {name}") from None

    def _succeeds(self, path: str, body: Mapping[str, Any]) -> None:
        answer = self._http.post(path, body, timeout_s=self._update_s)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(f"{self.url}{path}: no success: {answer}")


def _named(adapter: str | None) -> dict[str, str]:
    """Return the field of a request that names its adapter."""
    return {} if adapter is None else {"lora_path": adapter}


def read_flat(text: str, num_tokens: int, top_k: int) -> NDArray[np.int32]:
    """Decode the experts `[num_tokens, layers, top_k]`, which the server sends as base64 of int32 without a shape."""
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (ValueError, binascii.Error) as error:
        raise ServerError(f"routed_experts is no base64 of int32: {error}") from None
    if not numbers.size or numbers.size % (num_tokens * top_k):
        raise ServerError(
            f"routed_experts has {numbers.size} numbers, which are not {top_k} experts of {num_tokens} tokens in some "
            "layers: routes of tokens are missing"
        )
    return numbers.reshape(num_tokens, -1, top_k).astype(np.int32)
