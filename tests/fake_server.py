"""An inference server that speaks vLLM's and SGLang's protocols, and fails as real ones do when it is told to.

It is an interpreter of mcore_rl/rl/engines/protocol.toml: what the real servers refuse it refuses, and what they
swallow, or die of, is a fault of the client, which fails the test at its end. Its answers come from an `Answers`:
`TableAnswers` needs no model, `ModelAnswers` is the native engine on weights of its own, which updates replace. As a
program (`python tests/fake_server.py --port 8000 ...`) it answers from a table.
"""

import argparse
import base64
import io
import json
import math
import re
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol
from unittest.mock import MagicMock
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray

TABLE = runpy.run_path(str(Path(__file__).parents[1] / "mcore_rl/rl/engines/protocol.py"), run_name="protocol")
"""By its file: as a program, the server has on its path what vLLM's workers have, which is not the package."""
PROTOCOLS, REQUIRED, DIES, SWALLOWED = (TABLE[name] for name in ("PROTOCOLS", "REQUIRED", "DIES", "SWALLOWED"))
TAGS = {"vllm": ("weights", "kv_cache"), "sglang": ("weights", "kv_cache", "cuda_graph")}
OF_API_PROCESS = ("/health", "/version", "/model_info", "/metrics", "/v1/loads")
"""Paths that answer while the engine hangs."""


LOADING = threading.Lock()


@cache
def worker_module() -> dict[str, Any]:
    """Members of mcore_rl/vllm_worker.py, in which stubs stand for vLLM's code."""

    class Generic:
        def __class_getitem__(cls, item: object) -> type:
            return cls

    transfer = "vllm.distributed.weight_transfer"
    stubs: dict[str, Any] = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", transfer)}
    stubs |= {name: ModuleType(name) for name in ("vllm.model_executor", "vllm.model_executor.model_loader")}
    stubs |= {f"{transfer}.factory": MagicMock(), "vllm.model_executor.model_loader.reload": MagicMock()}
    stubs[transfer].base = MagicMock(
        WeightTransferUpdateInfo=object, WeightTransferInitInfo=object, WeightTransferEngine=Generic
    )
    sys.modules.update(stubs)
    try:
        return runpy.run_path(str(Path(__file__).parents[1] / "mcore_rl/vllm_worker.py"), run_name="vllm_worker")
    finally:
        for name in stubs:
            del sys.modules[name]


def worker_engine(name: str = "FileEngine") -> Any:
    """An engine of mcore_rl/vllm_worker.py in a worker of vLLM, which has received nothing yet."""
    with LOADING:
        members = worker_module()
    engine = members[name].__new__(members[name])
    engine.device, engine.extension = "cpu", members["Extension"]
    return engine


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A completion that is asked for, in whichever protocol."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: str
    """Logprobs from logits as they are (raw), divided by the temperature (tempered), and cut too (processed)."""
    stops: frozenset[int]
    never: frozenset[int]
    """Ids with a logit bias that forbids them."""
    salt: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    experts: NDArray[np.int64] | None = None
    """`[prompt + tokens - 1, MoE layers, K]`; None: the model has none."""


class Answers(Protocol):
    def complete(self, asked: Asked) -> Answer: ...

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        """Logprobs of tokens 1, 2, ... and of the `top` likeliest tokens in the place of each."""
        ...

    def load(self, update: Mapping[str, Any]) -> None: ...

    def finish(self) -> None: ...

    def adapted(self, folder: str) -> "Answers":
        """Answers of the present weights with the low-rank adapter in a folder of peft."""


class TableAnswers:
    """Token t of a completion is a number that its seed and t decide; all ids are alike likely."""

    def __init__(self, vocab: int = 64, layers: int = 2, experts: int = 8, top_k: int = 2) -> None:
        self.vocab, self.shape = vocab, (layers, experts, top_k)
        self.loads: list[Mapping[str, Any]] = []

    def complete(self, asked: Asked) -> Answer:
        tokens: list[int] = []
        while len(tokens) < asked.max_tokens:
            token = (asked.seed * 7919 + len(tokens) * 104729 + asked.prompt[0]) % self.vocab
            if token in asked.never:
                token = 0
            tokens.append(token)
            if token in asked.stops:
                break
        kept = asked.top_k if asked.logprobs == "processed" and asked.top_k else self.vocab
        return Answer(
            tokens=tuple(tokens),
            logprobs=(-math.log(kept),) * len(tokens),
            experts=self.experts_of((*asked.prompt, *tokens)[:-1]),
        )

    def experts_of(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        layers, experts, top_k = self.shape
        rows = [
            [[(token + layer + 3 * k + 1) % experts for k in range(top_k)] for layer in range(layers)]
            for token in tokens
        ]
        return np.array(rows)

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        return [dict.fromkeys([*range(top), token], -math.log(self.vocab)) for token in tokens[1:]]

    def load(self, update: Mapping[str, Any]) -> None:
        self.loads.append(update)

    def finish(self) -> None: ...

    def adapted(self, folder: str) -> "Answers":
        return self


FAULTS = (
    *("status_500", "refused", "hang", "trickle", "close", "close_at_once", "not_json", "no_success", "aborted"),
    *("wrong_spans", "other_tokens", "null_logprob", "cut_short", "no_routes", "missing_row", "zero_layer"),
    *("expert_twice", "no_such_expert", "no_prefix"),
)
HANG_S = 120.0
SOFTWARE = {"vllm": "0.32.0", "sglang": "0.5.23"}
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


@dataclass
class FakeServer:
    """A server in threads of this process, between `__enter__` and `__exit__`."""

    answers: Answers = field(default_factory=TableAnswers)
    kind: str = "vllm"
    host: str = "127.0.0.1"
    port: int = 0
    software: str | None = None
    """The version of its software; None: one that was tried."""
    logprobs_mode: str = "raw_logprobs"
    """vLLM's --logprobs-mode, and its default."""
    returns_original: bool = False
    """SGLang's SGLANG_RETURN_ORIGINAL_LOGPROB: logprobs at temperature 1."""
    routes_dtype: str | None = None
    """Dtype of routes; None: vLLM's for few experts, or SGLang's."""
    dense_layers: int | None = None
    """First layers without experts, which routes have as zeros; None: routes have the layers with experts alone."""
    api_key: str | None = None
    max_len: int = 1 << 20
    max_logprobs: int = 20
    """vLLM's --max-logprobs."""
    tokenizer: Any = None
    """Has `encode` and `decode`; None: the server was started without a tokenizer."""
    model_name: str = "policy"
    scales: float = 1.0
    """Factor of all logprobs of prompts: they are logits, or at another temperature."""
    delay_s: float = 0.0
    faults: list[tuple[str, str]] = field(default_factory=list)
    """(path, fault): the next call of the path that is none of the probe's has the fault. "always" before the name:
    every such call."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    with_query: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    version: str = "default"
    queue: Callable[["FakeServer"], tuple[int, int]] | None = None
    """Tells how many requests it computes and how many wait; None: the server does not say."""
    tokens_before_pause: int = 0
    """Tokens that a request has when it meets a pause. They keep their logprobs, and go through the model once more
    after it, as prompts do: their routes are those of the weights that are there then. A request that has all of its
    tokens by then goes through it too."""
    before_answer: Callable[[Asked], None] = lambda asked: None

    state: set[str] = field(default_factory=set)
    """Conditions of the protocol's table that hold."""
    hangs: bool = False
    """Whether the thread that computes hangs; it answers nothing then, and the other process does."""
    has_extension: bool = True
    """Whether vLLM's workers have this package's extension."""
    engine: Any = None
    """Part of a worker that keeps the bytes of files, or a slot open (`worker_engine`); None: it keeps none."""
    is_half_filled: bool = False
    """Whether a failed update has left modules of vLLM with a part of their weights: what comes next is wrong."""
    misuses: list[str] = field(default_factory=list)
    """Calls that the real server swallows, dies of or does not know."""
    keeps_weights: bool = False
    """SGLang's --enable-weights-cpu-backup: whether weights are kept while their memory is released."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of a GPU that are released by the name of a tag."""
    total_bytes: int = 0
    """Bytes of the GPU; 0: there is room for everything."""
    other_bytes: Callable[[], int] = lambda: 0
    """Bytes of the GPU that others have."""
    on_hang: Callable[[str], None] = lambda path: None
    may_be_misused: bool = False

    def __enter__(self) -> "FakeServer":
        self.ended = threading.Event()
        self.lock = threading.Condition()
        self.is_dead = False
        self.num_open = 0
        self.adapters: dict[str, Answers] = {}
        self.running: Counter[str] = Counter()
        self.aborted: set[str] = set()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = _Server((self.host, self.port), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_port
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        self.ended.set()
        with self.lock:
            self.lock.notify_all()
        self.http.shutdown()
        self.http.server_close()
        assert self.may_be_misused or error or not self.misuses, self.misuses

    def pause(self) -> None:
        with self.lock:
            self.state.add("paused")

    @property
    def resident_bytes(self) -> int:
        return 0 if self.is_dead else sum(size for tag, size in self.sizes.items() if tag not in self.state)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    def queried(self) -> list[tuple[str, dict[str, Any]]]:
        """Calls but for completions, with the fields of the body and, as texts, of the address."""
        return [(path, fields) for path, fields in self.with_query if path != GENERATE[self.kind]]

    def rollouts(self) -> list[dict[str, Any]]:
        """Requests for completions but those of the probe."""
        return [body for body in self.bodies(GENERATE[self.kind]) if not is_of_probe(body)]

    def fault_of(self, path: str, body: Mapping[str, Any]) -> str | None:
        if path == GENERATE[self.kind] and is_of_probe(body):
            path = "probe"
        with self.lock:
            for index, (at, fault) in enumerate(self.faults):
                if at == path:
                    if fault.startswith("always "):
                        return fault.removeprefix("always ")
                    del self.faults[index]
                    return fault
        return None

    def answer(self, path: str, query: str, body: dict[str, Any], fault: str | None) -> Any:
        """The JSON of an answer, a Refusal, or None: the server dies."""
        self.calls.append((path, body))
        self.with_query.append((path, {name: texts[-1] for name, texts in parse_qs(query).items()} | body))
        call = PROTOCOLS[self.kind].get(path)
        if call is None:
            return self._misused(f"{path}: no such path", 404)
        given = body if call.place == "body" else _of_query(query, call.fields)
        values = {**call.fields, **given}
        if unknown := given.keys() - call.fields.keys():
            return self._misused(f"{path}: unknown {sorted(unknown)}", 422)
        if missing := [name for name, value in values.items() if value is REQUIRED]:
            return self._misused(f"{path}: without {missing}", 422)
        for name, allowed in call.values.items():
            if values[name] not in allowed:
                return Refusal(call.wrong_value, json.dumps({"success": False, "message": f"{name}={values[name]}"}))
        for name, pattern in call.patterns.items():
            if values[name] is not None and not re.fullmatch(pattern, values[name]):
                return Refusal(400, f"Parameter {name!r} must match {pattern}")
        tags = set(values.get("tags") or TAGS[self.kind])
        for refusal in call.refusals:
            if self._holds(refusal.when, tags if values.get("tags") or self.kind == "sglang" else set()):
                if refusal.status in (DIES, SWALLOWED):
                    self.misuses.append(f"{path}: {refusal.text}")
                if refusal.status == DIES:
                    self.is_dead = True
                    return None
                if refusal.status != SWALLOWED:
                    return Refusal(refusal.status, json.dumps({"success": False, "message": refusal.text}))
        found = self._done(path, values, body, fault)
        if isinstance(found, Refusal):
            return found
        with self.lock:
            self.state |= {name for name in call.sets if name != "tags"} | (tags if "tags" in call.sets else set())
            self.state -= {name for name in call.clears if name != "tags"} | (tags if "tags" in call.clears else set())
            if path == "/sleep" and values["level"] == 0:
                self.state -= set(TAGS["vllm"])
            if (path == "/sleep" and values["level"] == 2) or (
                path == "/release_memory_occupation" and "weights" in tags and not self.keeps_weights
            ):
                self.state.add("discarded")
            there = self.resident_bytes + self.other_bytes()
            if "tags" in call.clears and self.total_bytes and there > self.total_bytes:
                self.misuses.append(f"{path}: out of memory: {there} of {self.total_bytes} bytes")
                self.is_dead = True
                return None
            if "tags" in call.clears and self.kind == "vllm" and self.state & set(TAGS["vllm"]):
                self.state.add("paused")  # partly awake
            if path in ("/sleep", "/wake_up"):
                found = {"status": "sleeping" if self.state & set(TAGS["vllm"]) else "awake"}
            self.lock.notify_all()
        return found

    def _misused(self, text: str, status: int) -> "Refusal":
        self.misuses.append(text)
        return Refusal(status, text)

    def _holds(self, when: str, tags: set[str]) -> bool:
        if when == "tags asleep":
            return bool(tags & self.state)
        if when == "tags awake":
            return bool(tags - self.state)
        if when == "cache first":
            return "kv_cache" in tags and "weights" in self.state - tags
        if when == "computing":
            return self.num_open > 0 and "paused" not in self.state
        return when in self.state if not when.startswith("not ") else when.removeprefix("not ") not in self.state

    def _done(self, path: str, values: dict[str, Any], body: dict[str, Any], fault: str | None) -> Any:
        if path in GENERATE.values():
            return self._generated(body, fault)
        if path == "/health":
            return Refusal(503, "") if self.kind == "sglang" and "paused" in self.state else ""
        if path == "/v1/models":
            return {"data": [{"id": self.model_name, "root": self.model_name, "max_model_len": self.max_len}]}
        if path in ("/tokenize", "/detokenize"):
            if self.tokenizer is None:
                return Refusal(404, "no tokenizer")
            if path == "/tokenize":
                return {"tokens": self.tokenizer.encode(values["prompt"])}
            return {{"vllm": "prompt", "sglang": "text"}[self.kind]: self.tokenizer.decode(values["tokens"])}
        if path in ("/metrics", "/v1/loads"):
            if self.queue is None:
                return Refusal(404, "Not Found")
            running, waiting = self.queue(self)
            if self.kind == "sglang":
                return {"loads": [{"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}]}
            labels = '{engine="0",model_name="policy"}'
            lines = (f"vllm:num_requests_{n}{labels} {c:.1f}" for n, c in (("running", running), ("waiting", waiting)))
            other = f'vllm:num_requests_waiting_by_reason{{reason="capacity"}} {waiting:.1f}'
            return "\n".join(("# TYPE vllm:num_requests_running gauge", *lines, other, ""))
        if path in ("/version", "/server_info"):
            return {"version": self.software or SOFTWARE[self.kind], "tp_size": 1, "pp_size": 1}
        if path in ("/weight_info", "/model_info"):
            return {"weight_version": self.version}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path in ("/inference/v1/abort_requests", "/abort_request"):
            names = values.get("request_ids") or [values["rid"]]
            self.aborted |= {name.removeprefix("generate-tokens-") for name in names}
        elif path == "/collective_rpc":
            if values["method"] == "take_files" and self.has_extension:
                self.engine = self.engine or worker_engine()
                worker = SimpleNamespace(weight_transfer_engine=self.engine)
                return {"results": [self.engine.extension.take_files(worker, *values["args"])]}
            if values["method"] != "abort_update" or not self.has_extension:
                return Refusal(500, f"no method {values['method']}")
            self._end_update()
            self.state.discard("session")
            return {"results": [None]}
        elif path == "/update_weights":
            update = values["update_info"]
            if "source" in update:
                self.engine = self.engine or worker_engine("SlotEngine")
            if "source" in update or any("version" in file for file in update.get("files", ())):
                try:
                    update = {"tensors": dict(self.engine._tensors(SimpleNamespace(**update)))}
                except (AttributeError, RuntimeError, ValueError) as error:
                    self.is_half_filled = True
                    self.state.discard("session")
                    return Refusal(500, f"no such file here: {error}")
            self.answers.load(update)
        elif path == "/update_weights_from_disk":
            files = sorted(Path(values["model_path"]).glob("*.safetensors"))
            self.answers.load({"files": [{"path": str(path)} for path in files]})
        elif path in ("/finish_weight_update", "/update_weight_version"):
            if not self.is_half_filled and (path == "/finish_weight_update" or self.kind == "sglang"):
                self.answers.finish()
            self._end_update()
            self.version = values.get("weight_version") or values.get("new_version") or self.version
        elif path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            if values["lora_name"] in self.adapters:
                return Refusal(400, f"{values['lora_name']} has already been loaded")
            self.adapters[values["lora_name"]] = self.answers.adapted(values["lora_path"])
        elif path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            if self.adapters.pop(values["lora_name"], None) is None:
                return Refusal(404, f"{values['lora_name']} is not loaded")
        elif path == "/reset_prefix_cache":
            return {"success": fault != "no_success" and (values["reset_running_requests"] or not self.num_open)}
        elif path == "/flush_cache":
            return "Cache flushed."
        return {"success": fault != "no_success"}

    def _end_update(self) -> None:
        self.is_half_filled = False
        if self.engine is not None:
            self.engine.end_update()

    def _generated(self, body: dict[str, Any], fault: str | None) -> Any:
        asked, wants_prompt = self._asked(body)
        if any(token < 0 for token in asked.prompt) or not asked.prompt:
            return Refusal(400, "token ids are not right")
        adapter = body.get("lora_path") if self.kind == "sglang" else body["model"]
        if adapter not in (None, "policy", *self.adapters):
            return Refusal(404, f"The model {adapter} does not exist.")
        answers = self.adapters.get(adapter or "", self.answers)
        if wants_prompt:
            if len(asked.prompt) + asked.max_tokens > self.max_len:
                return Refusal(400, f"maximum context length is {self.max_len} tokens")
            parameters = body["sampling_params"]
            top, start = parameters.get("prompt_logprobs", body.get("top_logprobs_num", 0)), 0
            if self.kind == "vllm" and top > self.max_logprobs:
                return Refusal(400, f"Requested prompt logprobs of {top}, greater than max allowed")
            start = body.get("logprob_start_len", 0)
            return self._scored(asked.prompt, answers.score(asked.prompt, top), start, top, fault)
        name = body.get("request_id") or body.get("rid") or ""
        with self.lock:
            self.running[name] += 1
            self.num_open += 1
        try:
            return self._completed(name, body, asked, answers, fault)
        finally:
            with self.lock:
                self.num_open -= 1

    def _completed(
        self, name: str, body: dict[str, Any], asked: Asked, answers: Answers, fault: str | None
    ) -> dict[str, Any]:
        first, began = Answer(tokens=(), logprobs=()), self.version
        if self.tokens_before_pause:
            first, began = self._computed(answers, replace(asked, max_tokens=self.tokens_before_pause))
        self.before_answer(asked)
        end_s = time.monotonic() + self.delay_s
        while time.monotonic() < end_s and name not in self.aborted:
            time.sleep(0.005)
        with self.lock:
            self.lock.wait_for(lambda: "paused" not in self.state or self.ended.is_set())
        is_whole = len(first.tokens) == asked.max_tokens or first.tokens[-1:] in {(stop,) for stop in asked.stops}
        known = (*asked.prompt, *first.tokens)
        answer, ended = self._computed(
            answers,
            replace(
                asked,
                prompt=known[:-1] if is_whole else known,
                max_tokens=1 if is_whole else asked.max_tokens - len(first.tokens),
            ),
        )
        if self.kind == "vllm" and first.experts is not None and answer.experts is not None:
            # It keeps the rows of each step (v1/engine/output_processor.py:785), SGLang those of the last pass.
            answer.experts[: len(first.experts)] = first.experts
        tokens, logprobs = ((), ()) if is_whole else (answer.tokens, answer.logprobs)
        answer = replace(answer, tokens=(*first.tokens, *tokens), logprobs=(*first.logprobs, *logprobs))
        room = self.max_len - len(asked.prompt)
        tokens, logprobs = answer.tokens[:room], answer.logprobs[:room]
        finish = "stop" if tokens[-1] in asked.stops else "length"
        if name in self.aborted or fault == "aborted":
            finish = "abort"
        if fault == "cut_short":
            tokens, logprobs, finish = tokens[:-1], logprobs[:-1], "length"
        spans = [
            {"version": version, "start": start, "end": end}
            for version, start, end in ((began, 0, len(first.tokens)), (ended, len(first.tokens), len(tokens)))
            if start < end
        ]
        if fault == "wrong_spans":
            spans[-1]["end"] = len(tokens) - 1
        listed: list[float | None] = list(logprobs)
        if fault == "null_logprob":
            listed[0] = None
        named = [token + 1 if fault == "other_tokens" else token for token in tokens]
        routes = None if answer.experts is None else self._routes(answer.experts, len(tokens), asked, fault)
        if self.kind == "vllm":
            choice = {
                "index": 0,
                "finish_reason": finish,
                "token_ids": list(tokens),
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": value, "top_logprobs": []}
                        for token, value in zip(named, listed, strict=True)
                    ]
                },
                "weight_versions": spans,
                "routed_experts": routes,
            }
            return {"request_id": name, "choices": [choice], "prompt_logprobs": None}
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[value, token, None] for value, token in zip(listed, named, strict=True)],
            "weight_versions": spans,
        }
        if body.get("return_routed_experts"):
            meta["routed_experts"] = routes
        return {"output_ids": list(tokens), "meta_info": meta}

    def _computed(self, answers: Answers, asked: Asked) -> tuple[Answer, str]:
        """The answer and the version of its weights: real servers update none while they compute."""
        while True:
            version = self.version
            answer = answers.complete(asked)
            if self.version == version:
                return answer, version

    def _asked(self, body: dict[str, Any]) -> tuple[Asked, bool]:
        parameters = body["sampling_params"]
        names = {
            "vllm": ("token_ids", "seed", "max_tokens"),
            "sglang": ("input_ids", "sampling_seed", "max_new_tokens"),
        }
        ids, seed, max_tokens = names[self.kind]
        sglangs = "raw" if self.returns_original else "tempered"
        wants_prompt = "prompt_logprobs" in parameters or body.get("logprob_start_len", -1) >= 0
        asked = Asked(
            prompt=tuple(body[ids]),
            seed=parameters.get(seed, 0),
            max_tokens=parameters[max_tokens],
            temperature=parameters.get("temperature", 1.0),
            top_k=max(parameters.get("top_k", 0), 0),
            top_p=parameters.get("top_p", 1.0),
            min_p=parameters.get("min_p", 0.0),
            logprobs=self.logprobs_mode.removesuffix("_logprobs") if self.kind == "vllm" else sglangs,
            stops=frozenset(parameters.get("stop_token_ids", ())),
            never=frozenset(int(token) for token in parameters.get("logit_bias", {})),
            salt=body.get("cache_salt") or body.get("extra_key") or "",
        )
        return asked, wants_prompt

    def _scored(
        self, tokens: Sequence[int], entries: list[dict[int, float]], start: int, top: int, fault: str | None
    ) -> Any:
        entries = [{token: self.scales * value for token, value in entry.items()} for entry in entries]
        if fault == "null_logprob":
            entries[-1] = dict.fromkeys(entries[-1])  # type: ignore[arg-type]
        if fault == "cut_short":
            tokens, entries = tokens[:-1], entries[:-1]
        if self.kind == "vllm":
            listed = [{str(token): {"logprob": value} for token, value in entry.items()} for entry in entries]
            return {"choices": [], "prompt_logprobs": [None, *listed]}
        pairs = [[entry[token], token, None] for token, entry in zip(tokens[1:], entries, strict=True)][start:]
        meta = {"input_token_logprobs": [[None, tokens[start], None], *pairs]}
        if top:
            likeliest = [sorted(((v, t, None) for t, v in e.items()), reverse=True)[:top] for e in entries[start:]]
            meta["input_top_logprobs"] = [None, *likeliest]  # type: ignore[list-item]
        return {"output_ids": [0], "meta_info": meta}

    def _routes(self, experts: NDArray[np.int64], length: int, asked: Asked, fault: str | None) -> str | None:
        rows = experts[: len(asked.prompt) + length - 1].copy()
        if fault == "no_routes":
            return None
        if fault == "missing_row":
            rows = rows[:-1]
        elif fault == "no_prefix":
            rows = rows[len(asked.prompt) - 1 :]
        elif fault == "zero_layer":
            rows[:, 1] = 0
        elif fault == "expert_twice":
            rows[0, 0] = rows[0, 0, 0]
        elif fault == "no_such_expert":
            rows[0, 0, 0] = 200
        if self.dense_layers:
            dense = np.zeros((len(rows), self.dense_layers, rows.shape[2]), rows.dtype)
            rows = np.concatenate([dense, rows], 1)
        if self.kind == "sglang":
            return base64.b64encode(rows.astype(self.routes_dtype or np.int32).tobytes()).decode()
        file = io.BytesIO()
        np.save(file, rows.astype(self.routes_dtype or np.uint8))
        return base64.b64encode(file.getvalue()).decode()


def _of_query(query: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields in an address, of their defaults' types."""
    found: dict[str, Any] = {}
    for name, texts in parse_qs(query).items():
        default, text = fields.get(name), texts[-1]
        if isinstance(default, bool):
            found[name] = text == "true"
        else:
            found[name] = texts if name == "tags" else type(default)(text) if default is not None else text
    return found


def is_of_probe(body: Mapping[str, Any]) -> bool:
    return str(body.get("request_id") or body.get("rid") or "probe-").startswith("probe-")


class _Server(ThreadingHTTPServer):
    request_queue_size = 256


@dataclass(frozen=True)
class Refusal:
    status: int
    text: str


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        self._do({})

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        if len(content := self.rfile.read(size)) < size:  # the client has given up
            self.close_connection = True
            return
        self._do(json.loads(content or b"{}"))

    def _do(self, body: dict[str, Any]) -> None:
        parts, fake = urlsplit(self.path), self.fake
        if fake.api_key is not None and self.headers["Authorization"] != f"Bearer {fake.api_key}":
            self._send(401, b'{"error": "Unauthorized"}')
            return
        if fake.is_dead:
            self.close_connection = True
            return
        fault = fake.fault_of(parts.path, body)
        if fake.hangs and parts.path not in OF_API_PROCESS:
            fault = "hang"
        if fault == "close_at_once":
            fake.calls.append((parts.path, body))
            self.close_connection = True
            return
        if fault == "hang":
            fake.calls.append((parts.path, body))
            fake.on_hang("probe" if parts.path == GENERATE[fake.kind] and is_of_probe(body) else parts.path)
            fake.ended.wait(HANG_S)
            return
        if fault in ("status_500", "refused"):
            fake.calls.append((parts.path, body))
            if parts.path == "/update_weights":
                fake.is_half_filled = True
                fake.state.discard("session")
            self._send(500 if fault == "status_500" else 400, b'{"error": {"message": "told to"}}')
            return
        found = fake.answer(parts.path, parts.query, body, fault)
        if isinstance(found, Refusal):
            self._send(found.status, found.text.encode())
            return
        if found is None:
            self.close_connection = True
            return
        content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self._send(200, b"<html>" if fault == "not_json" else content, fault)

    def _send(self, status: int, content: bytes, fault: str | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault == "close":
                content = content[: len(content) // 2]
            if fault != "trickle":
                self.wfile.write(content)
                return
            for place in range(len(content)):
                self.wfile.write(content[place : place + 1])
                if self.fake.ended.wait(0.1):
                    return
        except OSError:
            pass  # the client has given up


def main() -> None:
    """Serve as a vLLM or SGLang server would that is started with the same arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", "--model-path", required=True)
    parser.add_argument("--logprobs-mode", default=FakeServer.logprobs_mode)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--hang", default="", help="PATH#N: its N-th call hangs, and a line says so")
    arguments, others = parser.parse_known_args()
    with open(f"{arguments.model}/config.json") as file:
        vocab = json.load(file)["vocab_size"]
    sys.stdout.write(f"started with {' '.join(others)}\n")
    sys.stdout.flush()
    if arguments.die:
        raise SystemExit("no memory left for the model")
    settings = {"host": arguments.host, "port": arguments.port, "logprobs_mode": arguments.logprobs_mode}
    kind = "sglang" if "--model-path" in sys.argv else "vllm"
    path, _, nth = arguments.hang.partition("#")
    faults = [(path, "none")] * (int(nth or 1) - 1) + [(path, "hang")] if path else []

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    class Said(list[str]):
        def append(self, misuse: str) -> None:
            say(f"misused: {misuse}")

    server = FakeServer(TableAnswers(vocab), kind, faults=faults, on_hang=lambda at: say(f"hangs at {at}"), **settings)
    server.misuses = Said()
    with server:
        server.ended.wait()


if __name__ == "__main__":
    main()
