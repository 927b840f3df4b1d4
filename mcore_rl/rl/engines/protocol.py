"""HTTP protocols of vLLM 0.32 and 0.33 and of SGLang 0.5.23 as one table, read from their source. `ServerApi` sends
only what the table has; the tests' fake servers take, refuse and swallow the same calls, in the same states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

REQUIRED: Final = object()
"""Default of a field without which a server refuses a call."""
DIES: Final = 0
"""Status of a call that ends the server's process."""
SWALLOWED: Final = 200
"""Status of a call that is answered as if it had succeeded, although it did nothing, or harm."""
SESSION, PAUSED, COMPUTING = "session", "paused", "computing"
WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
DISCARDED = "discarded"
"""Conditions of a server: a weight update is open; requests wait; requests are in progress and do not wait; memory that
was released, by the names of tags; and weights that were not kept when it was, and that no update has sent since."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer to a call in a state in which the server does not do it."""

    when: str
    """Condition; "not " before it: its opposite; "tags asleep" and "tags awake": a tag that is, or is not, released;
    "cache first": the tags have the memory of keys and values while that of weights is released."""
    status: int
    """Status of the answer; DIES; SWALLOWED."""
    text: str
    """Part of the answer, or what happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """An address of a server, with what it takes and refuses."""

    source: str
    """File and line that say so."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields with the server's defaults, or REQUIRED."""
    place: Literal["body", "query", "get"] = "body"
    """Place of the fields: the JSON body or the address of a POST, or the address of a GET."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that a field may have; others are refused with the status `wrong_value`."""
    wrong_value: int = 422
    answer: Literal["json", "success", "text"] = "json"
    """Form of an answer; `success`: a JSON object whose "success" must be true, as status 200 alone says nothing."""
    refusals: tuple[Refusal, ...] = ()
    sets: tuple[str, ...] = ()
    """Conditions that hold after the call; "tags": those that the field `tags` names, all if it names none."""
    clears: tuple[str, ...] = ()


def _get(source: str, **fields: Any) -> Route:
    return Route(source=source, fields=fields, place="get")


def _post(source: str, fields: Mapping[str, Any], *refusals: Refusal, **more: Any) -> Route:
    return Route(source=source, fields=fields, refusals=refusals, **more)


_query = partial(_post, place="query")
NO_WEIGHTS = Refusal(WEIGHTS, DIES, "it touches weights whose memory was released")
NO_CACHE = Refusal(KV_CACHE, DIES, "it touches keys and values whose memory was released")
ON_META = Refusal(SESSION, DIES, "it computes with weights on the meta device")
UNSENT = Refusal(DISCARDED, SWALLOWED, "it computes with weights that were discarded, and that no update has sent")
CACHE_FIRST = Refusal("cache first", SWALLOWED, "keys and values take memory that the update of the weights needs")
ADAPTER = {"lora_name": REQUIRED, "lora_path": REQUIRED}
PAUSES = ("abort", "wait", "keep")
VLLM: Mapping[str, Route] = {
    "/version": _get("serve/instrumentator/basic.py"),
    "/health": _get("serve/instrumentator/health.py:218; 200 while paused, asleep, half updated or hung"),
    "/get_world_size": _get("rl/online/api_router.py:269", include_dp=True),
    "/weight_info": _get("rl/online/api_router.py:226; answered by the thread that computes"),
    "/v1/models": _get("openai/models/api_router.py:20"),
    "/tokenize": _post("serve/tokenize/protocol.py:23", {"prompt": REQUIRED, "add_special_tokens": True}),
    "/detokenize": _post("serve/tokenize/protocol.py:189", {"tokens": REQUIRED}),
    "/pause": _query(
        "rl/online/api_router.py:31", {"mode": "abort", "clear_cache": True}, values={"mode": PAUSES}, sets=(PAUSED,)
    ),
    "/resume": _query("v1/engine/core.py:951", {}, NO_WEIGHTS, NO_CACHE, ON_META, clears=(PAUSED,)),
    "/sleep": _query(
        "v1/engine/core.py:959, executor/abstract.py:382; without --enable-sleep-mode nothing is freed",
        {"level": 1, "mode": "abort"},
        Refusal(WEIGHTS, SWALLOWED, "it sleeps already"),
        values={"level": (0, 1, 2), "mode": PAUSES},
        sets=(PAUSED, WEIGHTS, KV_CACHE),
    ),
    "/wake_up": _query(
        "v1/engine/core.py:997, executor/abstract.py:394; resumes what is wholly awake",
        {"tags": None},
        Refusal("tags awake", SWALLOWED, "nothing is woken, as a tag is not asleep"),
        CACHE_FIRST,
        clears=("tags", PAUSED),
    ),
    "/release_kv_cache_memory": _query(
        "v1/engine/core.py:1021",
        {},
        Refusal(f"not {PAUSED}", 500, "requires a completed pause first"),
        Refusal(WEIGHTS, 500, "requires all executor memory to be resident"),
        sets=(KV_CACHE,),
    ),
    "/start_weight_update": _post(
        "v1/worker/gpu_worker.py:1524",
        {},
        Refusal(SESSION, 500, "a weight update is already active. Call finish_weight_update first"),
        Refusal(COMPUTING, DIES, "weights go to the meta device while requests are computed"),
        sets=(SESSION,),
    ),
    "/update_weights": _post(
        "v1/worker/gpu_worker.py:1550, reload/layerwise.py:104; an error closes the session, modules stay half filled",
        {"update_info": REQUIRED},
        Refusal(f"not {SESSION}", 500, "start_weight_update must be called before update_weights"),
        NO_WEIGHTS,
    ),
    "/finish_weight_update": _post(
        "v1/worker/gpu_worker.py:1587",
        {"weight_version": None},
        Refusal(f"not {SESSION}", 500, "called without a matching start_weight_update"),
        clears=(SESSION, DISCARDED),
    ),
    "/update_weight_version": _post("rl/online/api_router.py:217", {"new_version": REQUIRED}, answer="success"),
    "/reset_prefix_cache": _query(
        "serve/dev/cache/api_router.py:20; false, with status 200, for a request in progress unless these are reset",
        {"reset_running_requests": False, "reset_external": False},
        answer="success",
    ),
    "/collective_rpc": _post("serve/dev/rpc/api_router.py:23", {"method": REQUIRED, "args": (), "timeout": None}),
    "/inference/v1/generate": _post(
        "scale_out/token_in_token_out/protocol.py",
        {"token_ids": REQUIRED, "sampling_params": REQUIRED, "request_id": None, "model": None, "cache_salt": None},
        *(ON_META, NO_WEIGHTS, NO_CACHE, UNSENT),
    ),
    "/inference/v1/abort_requests": _post(
        "scale_out/token_in_token_out/api_router.py:79; an unknown id is answered with 200", {"request_ids": ()}
    ),
    "/v1/load_lora_adapter": _post("serve/lora/api_router.py", ADAPTER | {"load_inplace": False}, answer="text"),
    "/v1/unload_lora_adapter": _post(
        "serve/lora/api_router.py", {"lora_name": REQUIRED, "lora_int_id": None}, answer="text"
    ),
}
DISK = {"model_path": REQUIRED, "load_format": "dummy", "is_async": False, "keep_pause": False, "token_step": 0}
ASKED = {"input_ids": REQUIRED, "sampling_params": REQUIRED, "rid": None, "extra_key": None, "lora_path": None}
TENSORS = {"serialized_named_tensors": REQUIRED, "load_format": None, "selector": "all"}
UPDATE = {"flush_cache": True, "weight_version": None, "abort_all_requests": False, "torch_empty_cache": False}
SGLANG: Mapping[str, Route] = {
    "/health": _get("entrypoints/http_server.py:721; generates a token, for which a paused server has no time"),
    "/server_info": _get("entrypoints/http_server.py:863; asks the scheduler"),
    "/model_info": _get("entrypoints/http_server.py:812; does not ask the scheduler"),
    "/v1/models": _get("entrypoints/http_server.py:1993"),
    "/tokenize": _post("entrypoints/openai/protocol.py:1744", {"prompt": None, "add_special_tokens": True}),
    "/detokenize": _post("entrypoints/openai/protocol.py:1804", {"tokens": REQUIRED, "skip_special_tokens": True}),
    "/pause_generation": _post(
        "managers/tokenizer_manager.py:2267; abort does not pause the scheduler",
        {"mode": "abort"},
        values={"mode": ("abort", "retract", "in_place")},
        sets=(PAUSED,),
    ),
    "/continue_generation": _post(
        "managers/scheduler.py:5934", {"torch_empty_cache": True}, NO_WEIGHTS, NO_CACHE, clears=(PAUSED,)
    ),
    "/begin_weight_update": _post(
        "scheduler_components/weight_updater.py:309",
        {"selector": "all"},
        Refusal(SESSION, 400, "a weight-update session is already open"),
        answer="success",
        sets=(SESSION,),
    ),
    "/end_weight_update": _post(
        "scheduler_components/weight_updater.py:323",
        {},
        Refusal(f"not {SESSION}", 400, "no weight-update session is open"),
        answer="success",
        clears=(SESSION,),
    ),
    "/update_weights_from_disk": _post(
        "managers/tokenizer_manager.py:2295, model_runner_components/weight_updater.py:174; default: --load-format",
        DISK | UPDATE | {"recapture_cuda_graph": False, "manifest": None},
        Refusal(SESSION, SWALLOWED, "weights are post-processed by this call, and once more by the session"),
        NO_WEIGHTS,
        values={"load_format": ("auto", "safetensors", "pt")},
        wrong_value=400,
        answer="success",
        clears=(DISCARDED,),
    ),
    "/update_weights_from_tensor": _post(
        "scheduler_components/weight_updater.py:232",
        TENSORS | UPDATE,
        Refusal(f"not {SESSION}", 400, "must run between begin_weight_update() and end_weight_update()"),
        answer="success",
    ),
    "/update_weight_version": _post(
        "entrypoints/http_server.py:1527", {"new_version": REQUIRED, "abort_all_requests": True}, answer="success"
    ),
    "/flush_cache": _query(
        "managers/scheduler.py:5518", {"timeout": 0.0}, Refusal(COMPUTING, 400, "pending requests"), answer="text"
    ),
    "/release_memory_occupation": _post(
        "scheduler_components/weight_updater.py:337; without --enable-memory-saver nothing is freed",
        {"tags": None},
        Refusal(COMPUTING, DIES, "it should be called only when the server is idle"),
        Refusal("tags asleep", DIES, "memory is read that was released"),
        Refusal(f"not {PAUSED}", SWALLOWED, "the next request ends the server"),
        sets=("tags",),
    ),
    "/resume_memory_occupation": _post(
        "scheduler_components/weight_updater.py:383",
        {"tags": None},
        Refusal("tags awake", DIES, "KeyError of a tag that is not released"),
        CACHE_FIRST,
        clears=("tags",),
    ),
    "/generate": _post(
        "managers/io_struct.py:264",
        ASKED
        | {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "return_routed_experts": False},
        *(NO_WEIGHTS, NO_CACHE, UNSENT),
    ),
    "/abort_request": _post(
        "managers/io_struct.py:2285; an unknown id is answered with 200", {"rid": "", "abort_all": False}
    ),
    "/load_lora_adapter": _post("managers/tokenizer_control_mixin.py", ADAPTER | {"pinned": False}, answer="success"),
    "/unload_lora_adapter": _post("managers/tokenizer_control_mixin.py", {"lora_name": REQUIRED}, answer="success"),
}
PROTOCOLS: Mapping[str, Mapping[str, Route]] = {"vllm": VLLM, "sglang": SGLANG}
"""Calls of each rl.engine.kind, by path."""
