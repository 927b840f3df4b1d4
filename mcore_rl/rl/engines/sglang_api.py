"""SGLang's side of the HTTP API, as read in the source of sglang 0.5.23 and tested only with a fake server."""

import base64
import binascii
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.rl.engines.server_api import HEALTH_S, Answered, ServerApi, ServerError

IDLE_S, IDLE_LOOK_S = 30.0, 0.2
"""Seconds within which a paused server has nothing in progress any more, and between two looks."""


class SglangApi(ServerApi):
    """An SGLang server."""

    KIND = "sglang"
    TRIED = ((0, 5, 23), (0, 5, 24))
    RESUMES_AWAKE = False
    KEEPS_ROUTES = False
    FIELDS = ("input_ids", "sampling_seed", "max_new_tokens", "rid", "extra_key")
    ALL_TOKENS = -1
    PARAMETERS = {"no_stop_trim": True}  # noqa: RUF012  # never changed
    STEPS = {  # noqa: RUF012  # never changed
        "generate": ("/generate", {}),
        "abort": ("/abort_request", {"rid": None}),
        "health": ("/server_info", {}),
        "weights": ("/model_info", {}),
        "software": ("/server_info", {}),
        "queue": ("/v1/loads", {}),
        # Requests keep their tokens, and their keys and values are recomputed: only so can the caches be flushed.
        "pause": ("/pause_generation", {"mode": "retract"}),
        # No start: a call that loads a file restores and post-processes weights by itself, and within a session they
        # would be post-processed once more.
        "finish": ("/update_weight_version", {"new_version": None, "abort_all_requests": False}),
        "set_version": ("/update_weight_version", {"new_version": None, "abort_all_requests": False}),
        "reset": ("/flush_cache", {}),
        "resume": ("/continue_generation", {}),
        "sleep": ("/release_memory_occupation", {}),
        "wake_weights": ("/resume_memory_occupation", {"tags": ("weights",)}),
        "wake_cache": ("/resume_memory_occupation", {"tags": ("kv_cache", "cuda_graph")}),
        "load_adapter": ("/load_lora_adapter", {}),
        "detokenize": ("/detokenize", {"skip_special_tokens": False}),
        "unload_adapter": ("/unload_lora_adapter", {}),
    }

    def load(self, update: Mapping[str, Any]) -> None:
        """Load a bucket: `files` of tensors, all files of one folder."""
        # Without a format the server takes that of its start, "dummy", and refuses.
        folder = str(Path(update["files"][0]["path"]).parent)
        self._call("/update_weights_from_disk", model_path=folder, load_format="auto", flush_cache=False)

    def undo_update(self) -> None:
        """End an update that was left open or failed, and resume the server, unless this run's sleep holds."""
        if self.is_asleep:
            return
        self._call_if_open("/end_weight_update")
        self._call("/continue_generation", limit_s=HEALTH_S)

    def _release(self, *, keeps_weights: bool) -> None:
        # The flag --enable-weights-cpu-backup decides whether weights are kept. A flush succeeds only while nothing is
        # in progress; a release before would end the server.
        self._step("pause")
        deadline = time.monotonic() + IDLE_S
        while True:
            try:
                self._step("reset")
                break
            except ServerError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
                time.sleep(IDLE_LOOK_S)
        self._step("sleep")

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(self._told("software", "tp_size")) * int(self._told("software", "pp_size"))

    def _queue(self, answer: Any) -> tuple[int, int] | None:
        of_engines = answer["loads"]
        running, waiting = (sum(one[f"num_{what}_reqs"] for one in of_engines) for what in ("running", "waiting"))
        return int(running), int(waiting)

    def _own_fields(self, adapter: str | None, *, with_routes: bool) -> dict[str, Any]:
        named = {} if adapter is None else {"lora_path": adapter}
        return {"return_logprob": True, "return_routed_experts": with_routes, **named}

    def _read(self, answer: Any) -> Answered:
        meta = answer["meta_info"]
        return Answered(
            tokens_T=answer["output_ids"],
            scored=[(entry[1], entry[0]) for entry in meta["output_token_logprobs"]],
            finish=meta["finish_reason"]["type"],
            spans=meta["weight_versions"],
            experts=meta.get("routed_experts"),
        )

    def _experts(self, text: str, num_tokens: int) -> NDArray[np.integer]:
        return read_flat(text, num_tokens, self._top_k)

    def _scoring(self, tokens_T: Sequence[int], adapter: str | None, start: int, top_k: int) -> dict[str, Any]:
        return {
            "input_ids": list(tokens_T),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "logprob_start_len": start,  # the tokens before it may come from the prefix cache
            "top_logprobs_num": top_k,
            **self._own_fields(adapter, with_routes=False),
        }

    def _scores(self, answer: Any, tokens_T: Sequence[int], start: int) -> Sequence[Mapping[int, float]]:
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        if [entry[1] for entry in entries] != list(tokens_T[start + 1 :]):
            raise ServerError(f"{self.url}: prompt logprobs of other tokens than were sent")
        top = meta.get("input_top_logprobs", [None] * (1 + len(entries)))[1:]
        return [
            {**{one[1]: one[0] for one in likeliest or ()}, entry[1]: entry[0]}
            for entry, likeliest in zip(entries, top, strict=True)
        ]


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
