"""vLLM's side of the HTTP API, for a server started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out."""

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.rl.engines.server_api import HEALTH_S, Answered, ServerApi, ServerError

QUEUE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
"""Lines of /metrics with the numbers of requests."""


class VllmApi(ServerApi):
    """A vLLM server."""

    KIND = "vllm"
    TRIED = ((0, 32), (0, 34))
    RESUMES_AWAKE = True
    KEEPS_ROUTES = True
    FIELDS = ("token_ids", "seed", "max_tokens", "request_id", "cache_salt")
    ALL_TOKENS = 0
    PARAMETERS = {"logprobs": 0}  # noqa: RUF012  # never changed
    REQUEST_NAME = "generate-tokens-"
    STEPS = {  # noqa: RUF012  # never changed
        "generate": ("/inference/v1/generate", {}),
        "abort": ("/inference/v1/abort_requests", {"request_ids": (None,)}),
        "health": ("/weight_info", {}),
        "weights": ("/weight_info", {}),
        "software": ("/version", {}),
        "queue": ("/metrics", {}),
        "workers": ("/get_world_size", {}),
        "pause": ("/pause", {"mode": "keep", "clear_cache": False}),
        "start": ("/start_weight_update", {}),
        "take": ("/collective_rpc", {"method": "take_files"}),
        "finish": ("/finish_weight_update", {"weight_version": None}),
        "set_version": ("/update_weight_version", {"new_version": None}),
        "reset": ("/reset_prefix_cache", {"reset_running_requests": True}),
        "resume": ("/resume", {}),
        "sleep": ("/sleep", {"mode": "keep"}),
        "wake_weights": ("/wake_up", {"tags": ("weights",)}),
        "wake_cache": ("/wake_up", {"tags": ("kv_cache",)}),
        "load_adapter": ("/v1/load_lora_adapter", {}),
        "detokenize": ("/detokenize", {}),
        "unload_adapter": ("/v1/unload_lora_adapter", {}),
    }

    def load(self, update: Mapping[str, Any]) -> None:
        """Load a bucket; `update` is the `update_info` of the transfer backend that the server was started with."""
        self._call("/update_weights", update_info=dict(update))

    def undo_update(self) -> None:
        """End an update that was left open or failed, wake the server, and resume it, unless this run's sleep holds."""
        if self.is_asleep:
            return
        try:
            self._call("/collective_rpc", limit_s=HEALTH_S, method="abort_update")
        except ServerError as error:
            if error.status is None:
                raise
            # The server's workers lack this package's extension: the next push cannot repair half-filled modules, and
            # its probe says so.
            self._call_if_open("/finish_weight_update")
        # Without tags it wakes a server that sleeps, and resumes it, while /resume would let it compute without memory.
        self._call("/wake_up", limit_s=HEALTH_S)

    def _release(self, *, keeps_weights: bool) -> None:
        # Level 1 keeps the weights in main memory. The default mode would abort requests.
        self._step("sleep", level=1 if keeps_weights else 2)

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(self._told("workers", "world_size"))

    def _queue(self, answer: Any) -> tuple[int, int] | None:
        numbers: dict[str, float] = {}
        for name, number in QUEUE.findall(answer):  # a line for each data-parallel engine
            numbers[name] = numbers.get(name, 0.0) + float(number)
        return None if len(numbers) < 2 else (int(numbers["running"]), int(numbers["waiting"]))

    def _own_fields(self, adapter: str | None, *, with_routes: bool) -> dict[str, Any]:
        return {"model": adapter or self._model_name}

    def _read(self, answer: Any) -> Answered:
        choice = answer["choices"][0]
        return Answered(
            tokens_T=choice["token_ids"],
            scored=[(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]],
            finish=choice["finish_reason"],
            spans=choice["weight_versions"],
            experts=choice.get("routed_experts"),
        )

    def _experts(self, text: str, num_tokens: int) -> NDArray[np.integer]:
        return read_npy(text)

    def _scoring(self, tokens_T: Sequence[int], adapter: str | None, start: int, top_k: int) -> dict[str, Any]:
        parameters = {"max_tokens": 1, "prompt_logprobs": top_k}  # such a request does not use the prefix cache
        return {"model": adapter or self._model_name, "token_ids": list(tokens_T), "sampling_params": parameters}

    def _scores(self, answer: Any, tokens_T: Sequence[int], start: int) -> Sequence[Mapping[int, float]]:
        entries = answer["prompt_logprobs"][start + 1 :]
        return [{int(token): one["logprob"] for token, one in entry.items()} for entry in entries]


def read_npy(text: str) -> NDArray[np.integer]:
    """Decode the experts, which the server sends as base64 of a .npy file of uint8, uint16 or int32, without copies."""
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
    return array
