"""Servers with one fault each, as a table: every one is found, with a plain message, before anything is trained on it.

The faults of weights are in test_weight_push.py, which has models. Here answers come from a table of numbers.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.errors import EngineError
from mcore_rl.rl.engines import server_api
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.protocol import DIES, PROTOCOLS, SWALLOWED
from mcore_rl.rl.engines.server_api import NO_VERSION, HttpClient, Owner, ServerApi, ServerError, pick_layers
from mcore_rl.rl.engines.server_process import ServerFleet
from mcore_rl.rl.engines.sglang_api import SglangApi
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.engines.weight_push import Sender
from tests.fake_server import GENERATE, FakeServer
from tests.sections import engine_config

VOCAB = 64
MODEL = ModelConfig(num_layers=3, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=8, first_dense_layers=1))
ASKED = Sampling(max_new_tokens=5, vocab_size=VOCAB, with_routes=True)
OWNER, LATER = Owner("0123abcd", "/runs/a"), Owner("89abcdef", "/runs/a")
OTHER = Owner("44444444", "/runs/b")
APIS = {"vllm": VllmApi, "sglang": SglangApi}


def api_of(server: FakeServer, owner: Owner | None = OWNER, timeout_s: float = 1.0) -> ServerApi:
    times = {"request_timeout_s": timeout_s, "update_timeout_s": timeout_s}
    return APIS[server.kind](HttpClient(server.url), vocab_size=VOCAB, experts_per_token=2, owner=owner, **times)


def fleet_of(server: FakeServer, folder: Path, owner: Owner = OWNER) -> ServerFleet:
    config = engine_config(kind=server.kind, urls=(server.url,), start_timeout_s=0.2)
    return ServerFleet(config, lambda url: api_of(server, owner), folder, None)


def update(server: FakeServer, folder: Path, version: int = 1) -> None:
    """A server's side of a push. Raises the reason for which the server failed."""
    fleet = fleet_of(server, folder)
    (url,) = fleet.ready()
    api = fleet.api_at(url)
    sender = Sender([api])
    sender.everywhere("pause", lambda server: server.pause())
    sender.everywhere("start", lambda server: server.start_update())
    sender.everywhere(
        "load", lambda server: server.load({"files": [{"path": "/w/layer_0/0.safetensors", "crc32": "0"}]})
    )
    sender.everywhere("finish", lambda server: server.finish_update(version))
    sender.everywhere("reset", lambda server: server.reset_caches())
    sender.everywhere("resume", lambda server: server.resume())
    sender.undo()
    sender.close()
    if sender.failed:
        raise EngineError(sender.failed[url])


def enter(server: FakeServer, folder: Path) -> None:
    fleet_of(server, folder).ready()


def complete(server: FakeServer, folder: Path) -> None:
    made = api_of(server).generate((5, 6), ASKED, 3, salt="s", request_id="a")
    pick_layers(server.url, made.experts_TLK, MODEL, num_tokens=6)


@dataclass
class Fault:
    does: Callable[[FakeServer, Path], None]
    message: str
    settings: dict[str, Any] = field(default_factory=dict)
    fault: tuple[str, str] | None = None
    """Path and fault of the fake server; GENERATE: the kind's own path."""
    kinds: tuple[str, ...] = ("vllm", "sglang")


def answer(fault: str, message: str) -> Fault:
    return Fault(complete, message, fault=("GENERATE", fault))


V, S = ("vllm",), ("sglang",)
FAULTS: dict[str, Fault] = {
    "is not there": Fault(enter, "0 of 1 servers answer.*silent: http", settings={"hangs": True}),
    "has another key": Fault(enter, "0 of 1 servers answer", settings={"api_key": "k"}),
    "is of an older vLLM": Fault(
        enter, "is vllm 0.31.0; tried are versions from 0.32", {"software": "0.31.0"}, None, V
    ),
    "is of a newer SGLang": Fault(enter, "is sglang 0.6.0, newer than the table", {"software": "0.6.0"}, None, S),
    "is another run's": Fault(
        enter, "belongs to the run /runs/b.*Give this run servers", {"version": OTHER.version(4)}
    ),
    "was claimed by another run": Fault(enter, "belongs to the run /runs/b", {"version": OTHER.version(None)}),
    "tells no version of its weights": Fault(
        enter, "0 of 1 servers answer|no JSON", {}, ("WEIGHTS", "always not_json")
    ),
    "refuses its claim": Fault(enter, "status 200 without success", {}, ("/update_weight_version", "no_success")),
    "fails at its claim": Fault(enter, "status 500", {}, ("/update_weight_version", "status_500")),
    "is not resumed": Fault(enter, "status 500.*Start the server anew", {}, ("RESUME", "status_500")),
    "cannot pause": Fault(update, "^pause: .*status 500", {}, ("PAUSE", "status_500")),
    "cannot start an update": Fault(update, "^start: .*status 500", {}, ("/start_weight_update", "status_500"), V),
    "cannot load": Fault(update, "^load: .*status 500", {}, ("LOAD", "status_500")),
    "hangs as it loads": Fault(update, "^load: .*no whole answer within 1 s", {}, ("LOAD", "hang")),
    "ends as it loads": Fault(update, "^load: .*RemoteDisconnected", {}, ("LOAD", "close_at_once")),
    "says 200 and no success": Fault(update, "^load: .*200 without success", {}, ("LOAD", "no_success"), S),
    "cannot finish": Fault(update, "^finish: .*status 500", {}, ("/finish_weight_update", "status_500"), V),
    "keeps old keys and values": Fault(update, "^reset: .*200 without", {}, ("/reset_prefix_cache", "no_success"), V),
    "cannot flush its cache": Fault(update, "^reset: .*status 400", {}, ("/flush_cache", "refused"), S),
    "answers with status 500": answer("status_500", "status 500"),
    "refuses a request": answer("refused", "status 400"),
    "closes the connection": answer("close_at_once", "RemoteDisconnected"),
    "closes it in the middle": answer("close", "bytes too early"),
    "answers a byte at a time": answer("trickle", "no whole answer within 1 s"),
    "answers never": answer("hang", "no whole answer within 1 s"),
    "answers a page": answer("not_json", "no JSON: <html>"),
    "was aborted": answer("aborted", "ended by 'abort'"),
    "is short of memory for the length": answer("cut_short", "cut at 4 tokens.*--max-model-len"),
    "tells spans of other tokens": answer("wrong_spans", "spans of versions"),
    "lists other tokens": answer("other_tokens", "not of the tokens"),
    "lists null for a logprob": answer("null_logprob", "None is no logprob"),
    "has weights of another run": Fault(complete, "belongs to the run /runs/b", {"version": OTHER.version(7)}),
    "was taken by another start": Fault(complete, "another start of this run", {"version": LATER.version(7)}),
    "records no routes": answer("no_routes", "came without routes.*--enable-return-routed-experts"),
    "misses a row": answer("missing_row", "routes of 5 tokens|routes of tokens are missing"),
    "records zeros": answer("zero_layer", r"layers \[2\] are all zero"),
    "names an expert twice": answer("expert_twice", "an expert of a token twice"),
    "names no expert": answer("no_such_expert", "experts 0 to 200"),
    "sends routes as fractions": Fault(complete, "dtype float32|experts 0 to", {"routes_dtype": "float32"}),
    "sends routes of other layers": Fault(complete, "routes of 4 layers", {"dense_layers": 2}),
}
NAMES = {"GENERATE": "generate", "WEIGHTS": "weights", "RESUME": "resume", "PAUSE": "pause"}
EXACT = {
    ("vllm", "LOAD"): "/update_weights",
    ("sglang", "LOAD"): "/update_weights_from_disk",
    ("vllm", "RESUME"): "/wake_up",
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in FAULTS for kind in FAULTS[name].kinds])
def test_a_server_with_a_fault_is_found_with_a_plain_message(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FAULTS[name]
    monkeypatch.setattr(server_api, "HEALTH_S", 1.0)  # seconds that a server that hangs is waited for
    with FakeServer(kind=kind, **{"dense_layers": 1} | case.settings) as server:
        if case.fault is not None:
            path, fault = case.fault
            path = EXACT.get((kind, path)) or (APIS[kind].STEPS[NAMES[path]][0] if path in NAMES else path)
            server.faults.append((path, fault))
        with pytest.raises(EngineError, match=rf"(?s){case.message}"):
            case.does(server, tmp_path)


DIRTY: dict[str, tuple[tuple[str, ...], set[str], dict[str, Any]]] = {
    "paused": (("vllm", "sglang"), {"paused"}, {}),
    "paused in an update": (("vllm", "sglang"), {"paused", "session"}, {}),
    "in an update without our extension": (V, {"paused", "session"}, {"has_extension": False}),
    "half filled": (V, {"paused"}, {"is_half_filled": True}),
    "asleep": (V, {"paused", "weights", "kv_cache"}, {}),
    "partly awake": (V, {"paused", "kv_cache"}, {}),
    "asleep in an update": (V, {"paused", "session", "weights", "kv_cache"}, {}),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in DIRTY for kind in DIRTY[name][0]])
@pytest.mark.parametrize("left_by", [None, LATER], ids=["nobody", "a former start of the run"])
def test_what_a_dead_trainer_left_is_undone_and_the_next_update_is_whole(
    name: str, kind: str, left_by: Owner | None, tmp_path: Path
) -> None:
    """No call of the entrance computes, and none of the update is refused, swallowed or deadly in the state that is
    left; the fake server fails this test otherwise."""
    _, state, settings = DIRTY[name]
    version = left_by.version(9) if left_by else "default"
    with FakeServer(kind=kind, state=set(state), version=version, **settings) as server:
        update(server, tmp_path)
        assert server.state == set() and not server.is_half_filled and not server.is_dead
        assert "/health" not in server.paths()
        assert server.version == OWNER.version(1)
        made = api_of(server).generate((5,), Sampling(max_new_tokens=5), 1, salt="s", request_id="a")
        assert made.versions[0].version == 1


def test_a_bucket_that_failed_leaves_nothing_that_makes_the_next_push_wrong(tmp_path: Path) -> None:
    """vLLM counts the parts that a failed update brought once more: without `abort_update` the next one is wrong."""
    with FakeServer() as server:
        server.faults.append(("/update_weights", "status_500"))
        with pytest.raises(EngineError, match="status 500"):
            update(server, tmp_path)
        assert not server.is_half_filled and server.state == set()
        update(server, tmp_path)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_failed_within_the_run_is_freed_of_its_open_update_before_the_next(kind, tmp_path: Path) -> None:
    with FakeServer(kind=kind) as server:
        fleet = fleet_of(server, tmp_path)
        assert fleet.ready() == [server.url]
        fleet.start_anew({server.url: "its answer did not come"})
        server.state |= {"paused", "session"}
        assert fleet.ready() == [server.url] and server.state == set()
        server.state.add("paused")  # as by a push of this run
        assert fleet.ready() == [server.url] and server.state == {"paused"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_belongs_to_one_run_until_the_run_releases_it(kind: str, tmp_path: Path) -> None:
    with FakeServer(kind=kind) as server:
        update(server, tmp_path)
        other = fleet_of(server, tmp_path, OTHER)
        with pytest.raises(EngineError, match=r"belongs to the run /runs/a: .* \(this run is /runs/b\)"):
            other.ready()
        assert server.version == OWNER.version(1), "a run that is refused changes nothing"
        ours = fleet_of(server, tmp_path)
        ours.ready()
        # A resumed run takes its servers over; the start before finds that out at its next update.
        assert fleet_of(server, tmp_path, LATER).ready() == [server.url]
        with pytest.raises(EngineError, match=r"0 of 1 servers can be used: .* belongs to another start of this run"):
            ours.ready()
        ours.release([server.url], 1)
        assert server.version == LATER.version(None), "only its owner releases a server"
        fleet_of(server, tmp_path, LATER).release([server.url], 7)
        assert server.version == "v7" and other.ready() == [server.url]
        without = api_of(server, owner=None).generate((5,), Sampling(max_new_tokens=2), 1, salt="s", request_id="a")
        assert without.versions[0].version == NO_VERSION


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_whose_engine_hangs_is_not_healthy_and_its_calls_can_be_cut(kind: str) -> None:
    """Its other process goes on to answer /health with 200."""
    with FakeServer(kind=kind) as server:
        api, errors = api_of(server, timeout_s=60.0), list[ServerError]()
        assert api.is_healthy()
        server.state.add("paused")
        assert api.is_healthy(), "it answers while paused"
        server.hangs = True

        def ask() -> None:
            try:
                api.generate((5,), ASKED, 1, salt="s", request_id="a")
            except ServerError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while GENERATE[kind] not in server.paths():
            time.sleep(0.01)
        start_s = time.monotonic()
        api.cut()
        thread.join(10)
        assert errors and time.monotonic() - start_s < 5


V_SLEEP, S_SLEEP = ("/sleep", {"level": 2, "mode": "keep"}), ("/release_memory_occupation", {})
V_PUSH = [("/start_weight_update", {}), ("/update_weights", {"update_info": {}}), ("/finish_weight_update", {})]
V_CACHE, S_PAUSE = ("/wake_up", {"tags": ["kv_cache"]}), ("/pause_generation", {"mode": "retract"})
V_CYCLE = [V_SLEEP, ("/wake_up", {"tags": ["weights"]}), *V_PUSH, V_CACHE]
DISK, TENSORS = "/update_weights_from_disk", "/update_weights_from_tensor"
S_CYCLE = [
    *(S_PAUSE, ("/flush_cache", {}), S_SLEEP, ("/resume_memory_occupation", {"tags": ["weights"]})),
    *(("/begin_weight_update", {}), (TENSORS, {"serialized_named_tensors": []}), ("/end_weight_update", {})),
    *(("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}), ("/continue_generation", {})),
]
LAWS: dict[str, tuple[str, set[str], list[tuple[str, dict[str, Any]]], object]] = {
    "a cycle": ("vllm", set(), V_CYCLE * 3, "fine"),
    "resumed while asleep": ("vllm", set(), [V_SLEEP, ("/resume", {})], DIES),
    "wake_up without tags only resumes": ("vllm", {"paused"}, [("/wake_up", {})], "fine"),
    "weights not woken before the push": ("vllm", set(), [V_SLEEP, *V_PUSH], DIES),
    "asleep twice": ("vllm", set(), [V_SLEEP, V_SLEEP], SWALLOWED),
    "a tag that is not asleep": ("vllm", set(), [V_SLEEP, ("/wake_up", {"tags": ["cuda_graph"]})], SWALLOWED),
    "a session left open": ("vllm", {"session"}, V_PUSH[:1], 500),
    "an update without a start": ("vllm", set(), V_PUSH[1:], 500),
    "an update while computing": ("vllm", {"computing"}, V_PUSH, DIES),
    "an end without a start": ("vllm", set(), V_PUSH[2:], 500),
    "keys released without a pause": ("vllm", set(), [("/release_kv_cache_memory", {})], 500),
    "resumed without keys": ("vllm", {"paused"}, [("/release_kv_cache_memory", {}), ("/resume", {})], DIES),
    "an unknown mode": ("vllm", set(), [("/pause", {"mode": "retract"})], 422),
    "an unknown field": ("vllm", set(), [("/wake_up", {"tag": "weights"})], SWALLOWED),
    "an unknown path": ("vllm", set(), [("/pause_generation", {})], SWALLOWED),
    "a cycle of SGLang": ("sglang", set(), S_CYCLE * 3, "fine"),
    "released while computing": ("sglang", {"computing"}, [S_SLEEP], DIES),
    "released twice": ("sglang", {"paused"}, [S_SLEEP, S_SLEEP], DIES),
    "a tag resumed twice": ("sglang", set(), [*S_CYCLE[:4], S_CYCLE[3]], DIES),
    "resumed without memory": ("sglang", set(), [*S_CYCLE[:3], S_CYCLE[-1]], DIES),
    "released without a pause": ("sglang", set(), [S_SLEEP], SWALLOWED),
    "from disk without a format": ("sglang", set(), [(DISK, {"model_path": "/w"})], 400),
    "from disk": ("sglang", set(), [(DISK, {"model_path": "/w", "load_format": "auto"})], "fine"),
    "from disk in a session": ("sglang", {"session"}, [(DISK, {"model_path": "/w", "load_format": "auto"})], SWALLOWED),
    "tensors without a session": ("sglang", set(), S_CYCLE[5:6], 400),
    "a session twice": ("sglang", {"session"}, S_CYCLE[4:5], 400),
    "a session that is not open": ("sglang", set(), S_CYCLE[6:7], 400),
    "flushed while computing": ("sglang", {"computing"}, [("/flush_cache", {})], 400),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_fake_server_is_never_kinder_than_the_real_one(name: str) -> None:
    """Each sequence of calls is refused at its last call, as the real servers' sources say."""
    kind, state, steps, wanted = LAWS[name]
    with FakeServer(kind=kind, state=set(state), may_be_misused=True) as server:
        server.num_open = int("computing" in state)
        for path, fields in steps:
            call = PROTOCOLS[kind].get(path)
            in_body = call is None or call.place == "body"
            found = server.answer(
                path, "" if in_body else urlencode(fields, doseq=True), fields if in_body else {}, None
            )
        assert server.is_dead == (wanted == DIES)
        assert bool(server.misuses) == (wanted in (DIES, SWALLOWED))
        if wanted not in ("fine", DIES, SWALLOWED):
            assert found.status == wanted
