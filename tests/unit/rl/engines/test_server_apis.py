"""vLLM's and SGLang's protocols against a server that speaks them, with the faults of real ones."""

import math
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.rl.engines import server_api
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.server_api import (
    NO_VERSION,
    HttpClient,
    ServerApi,
    ServerError,
    logprobs_mode,
    pick_layers,
    without_recomputed,
)
from mcore_rl.rl.engines.sglang_api import SglangApi
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import VersionSpan
from tests.fake_server import GENERATE, HANG_S, SOFTWARE, FakeServer

VOCAB = 64
SAMPLING = Sampling(max_new_tokens=5, cut=Cut(temperature=0.7), stop_tokens=frozenset({70}))
KINDS = ["vllm", "sglang"]


def api_of(server: FakeServer, *, request_timeout_s: float = 5.0, vocab: int = VOCAB, **http: str) -> ServerApi:
    client = HttpClient(server.url, **http)
    if server.kind == "vllm":
        return VllmApi(client, vocab_size=vocab, request_timeout_s=request_timeout_s, update_timeout_s=5.0)
    return SglangApi(
        client, vocab_size=vocab, experts_per_token=2, request_timeout_s=request_timeout_s, update_timeout_s=5.0
    )


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with FakeServer(kind=request.param) as found:
        yield found


def test_all_rules_of_sampling_are_sent_and_the_answer_is_read(server: FakeServer) -> None:
    """Each field is sent, since a server has defaults of its own; ids beyond the tokenizer's are forbidden."""
    sampling = Sampling(max_new_tokens=5, cut=Cut(temperature=0.7), stop_tokens=frozenset({9, 3}), vocab_size=VOCAB - 2)
    made = api_of(server).generate((5, 6), sampling, 11, salt="v3", request_id="a1")
    tokens = [(11 * 7919 + t * 104729 + 5) % VOCAB for t in range(5)]
    tokens = [0 if token >= VOCAB - 2 else token for token in tokens]
    assert made.tokens_T == tuple(tokens) and made.finish == "length"
    assert made.logprobs_T == pytest.approx([-math.log(VOCAB)] * 5)
    assert made.versions == (VersionSpan(NO_VERSION, 0, 5),) and made.experts_TLK is None
    (body,) = server.bodies(GENERATE[server.kind])
    common = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "stop_token_ids": [3, 9]}
    common["logit_bias"] = {"62": -100.0, "63": -100.0}
    if server.kind == "vllm":
        assert body == {
            "request_id": "a1",
            "model": "policy",
            "token_ids": [5, 6],
            "cache_salt": "v3",
            "sampling_params": common | {"seed": 11, "top_k": 0, "max_tokens": 5, "logprobs": 0},
        }
    else:
        sent = common | {"sampling_seed": 11, "top_k": -1, "max_new_tokens": 5, "no_stop_trim": True}
        assert body == {
            "rid": "a1", "input_ids": [5, 6], "extra_key": "v3", "sampling_params": sent, "return_logprob": True,
            "return_routed_experts": False,
        }  # fmt: skip


CYCLE: dict[str, list[tuple[str, dict[str, object]]]] = {
    "vllm": [
        ("/sleep", {"level": "2", "mode": "keep"}),
        ("/wake_up", {"tags": "weights"}),
        ("/start_weight_update", {}),
        ("/finish_weight_update", {}),
        ("/reset_prefix_cache", {"reset_running_requests": "true"}),
        ("/wake_up", {"tags": "kv_cache"}),
    ],
    "sglang": [
        ("/pause_generation", {"mode": "retract"}),
        ("/flush_cache", {}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/update_weights_from_disk", {}),
        ("/update_weight_version", {}),
        ("/flush_cache", {}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
        ("/continue_generation", {}),
    ],
}
"""Calls of a step of servers that share the trainer's GPUs: sleep, wake weights, push, wake keys and values."""


def updated(api: ServerApi) -> None:
    api.pause()
    api.start_update()
    if api.KIND == "sglang":
        api.load({"files": [{"path": "/weights/model.safetensors"}]})
    api.finish_update(3)
    api.reset_caches()
    api.resume()


def test_a_server_sleeps_and_wakes_by_the_calls_of_the_table_time_and_again(server: FakeServer) -> None:
    """Weights are woken before they are pushed, keys and values after it; and it answers with what was pushed."""
    api = api_of(server)
    for _ in range(3):
        server.with_query.clear()
        api.sleep(keeps_weights=False)
        assert api.is_asleep and {"weights", "kv_cache", "discarded"} <= server.state
        updated(api)
        assert not api.is_asleep and not server.state
        for (path, fields), (wanted, some) in zip(server.queried(), CYCLE[server.kind], strict=True):
            assert path == wanted and some.items() <= fields.items()
        assert api.generate((5,), SAMPLING, 1, salt="v3", request_id="a").finish == "length"


def test_a_server_of_adapters_keeps_its_base_while_it_sleeps_and_answers_without_a_push(server: FakeServer) -> None:
    api, server.keeps_weights = api_of(server), True
    api.sleep(keeps_weights=True)
    api.pause()
    api.load_adapter("policy-1", "/adapters")
    api.resume()
    made = api.generate((5,), SAMPLING, 1, salt="v3", request_id="a", adapter="policy-1")
    assert made.finish == "length" and not server.state


@pytest.mark.parametrize("kind", KINDS)
def test_each_slip_in_the_cycle_of_a_sleeping_server_is_a_misuse_of_the_fake(kind: str) -> None:
    """So that a client which makes it fails its test: the laws of the table."""

    def misuses(slip: str) -> list[str]:
        with FakeServer(kind=kind, may_be_misused=True) as server:
            api = api_of(server)
            api.sleep(keeps_weights=False)
            if slip == "asleep twice":
                api.sleep(keeps_weights=False)
            elif slip == "resumed asleep":
                api._step("resume")
            elif slip == "keys and values first":
                api._step("wake_cache")
            elif slip == "no push":
                api.pause()
                api.resume()
            elif slip == "the same tag twice":
                api.pause()
                api._step("wake_weights")
            with suppress(ServerError):
                api.generate((5,), SAMPLING, 1, salt="v3", request_id="a")
            return server.misuses

    for slip in ("asleep twice", "resumed asleep", "keys and values first", "no push", "the same tag twice"):
        with suppress(ServerError):
            assert misuses(slip), slip


def test_a_vllm_server_that_says_it_is_awake_while_its_weights_alone_are_is_not_believed() -> None:
    with FakeServer() as server:
        api = api_of(server)
        with pytest.raises(ServerError, match="/wake_up: status 200, and the server is awake, not sleeping"):
            api._asleep = "all"  # the server was started anew, and does not sleep
            server.may_be_misused = True
            api.pause()


def test_a_stop_token_ends_with_stop_also_at_the_last_place(server: FakeServer) -> None:
    free = api_of(server).generate((5,), SAMPLING, 1, salt="v0", request_id="a")
    for place in (2, 4):
        stops = Sampling(max_new_tokens=5, stop_tokens=frozenset({free.tokens_T[place]}))
        made = api_of(server).generate((5,), stops, 1, salt="v0", request_id="b")
        assert made.finish == "stop" and made.tokens_T == free.tokens_T[: place + 1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status_500", "status 500"),
        ("refused", "status 400: .*told to"),
        ("close_at_once", "RemoteDisconnected"),
        ("close", "bytes too early"),
        ("not_json", "no JSON: <html>"),
        ("aborted", "ended by 'abort'"),
        ("wrong_spans", "spans of versions"),
        ("other_tokens", "not of the tokens"),
        ("null_logprob", "None is no logprob"),
        ("cut_short", "cut at 4 tokens, and 5 were asked for.*--max-model-len"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_error(server: FakeServer, fault: str, message: str) -> None:
    server.faults.append((GENERATE[server.kind], fault))
    api = api_of(server)
    with pytest.raises(ServerError, match=message) as caught:
        api.generate((5,), SAMPLING, 1, salt="v0", request_id="a")
    assert caught.value.is_refusal == (fault == "refused")
    assert api.generate((5,), SAMPLING, 1, salt="v0", request_id="b").finish == "length"


@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_silence_and_an_answer_by_the_byte_end_at_the_time_limit(fault: str) -> None:
    with FakeServer(faults=[(GENERATE["vllm"], fault)]) as server:
        start_s = time.monotonic()
        with pytest.raises(ServerError, match=r"no whole answer within 0\.3 s"):
            api_of(server, request_timeout_s=0.3).generate((5,), SAMPLING, 1, salt="v0", request_id="a")
        assert time.monotonic() - start_s < HANG_S


def test_a_server_that_is_not_there_is_an_error_and_not_healthy() -> None:
    with FakeServer() as server:
        api = api_of(server)
        assert api.is_healthy()
    assert not api.is_healthy()
    with pytest.raises(ServerError, match="ConnectionRefusedError"):
        api.generate((5,), SAMPLING, 1, salt="v0", request_id="a")


def test_a_server_that_ends_while_a_call_is_open_is_found_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real vLLM keeps the connection of an update's call open when its engine has died, and listens no more."""
    monkeypatch.setattr(server_api, "LOOK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.post, "/pause", timeout_s=60.0)
            held, _ = listener.accept()
            time.sleep(0.5)
            assert not call.done()  # it listens: whoever takes long is waited for
            listener.close()
            with pytest.raises(ServerError, match="no longer listens"):
                call.result(10.0)
            held.close()


def test_an_update_calls_each_step_and_counts_no_status_as_success(server: FakeServer) -> None:
    api = api_of(server)
    api.pause()
    api.start_update()
    api.load({"files": [{"path": "/weights/layer_0/0.safetensors", "crc32": "01234567"}]})
    api.finish_update(7)
    api.reset_caches()
    api.resume()
    wanted = {
        "vllm": (
            *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            *("/reset_prefix_cache", "/resume"),
        ),
        "sglang": (
            *("/pause_generation", "/update_weights_from_disk", "/update_weight_version", "/flush_cache"),
            "/continue_generation",
        ),
    }
    assert tuple(server.paths()) == wanted[server.kind]
    if server.kind == "vllm":
        assert server.calls[2][1] == {
            "update_info": {"files": [{"path": "/weights/layer_0/0.safetensors", "crc32": "01234567"}]}
        }
    else:
        assert server.calls[1][1] == {"model_path": "/weights/layer_0", "load_format": "auto", "flush_cache": False}
        assert server.calls[2][1] == {"new_version": "v7", "abort_all_requests": False}
    assert api.generate((5,), SAMPLING, 1, salt="v7", request_id="a").versions == (VersionSpan(7, 0, 5),)
    path = {"vllm": "/reset_prefix_cache", "sglang": "/update_weights_from_disk"}[server.kind]
    server.faults.append((path, "no_success"))
    with pytest.raises(ServerError, match="status 200 without success"):
        api.reset_caches() if server.kind == "vllm" else api.load({"files": [{"path": "/w/a"}]})


def test_prompt_logprobs_are_of_the_tokens_that_were_sent(server: FakeServer) -> None:
    assert api_of(server).prompt_logprobs((4, 5, 6)) == pytest.approx([-math.log(VOCAB)] * 2)


def test_an_abort_names_the_request_as_the_server_does(server: FakeServer) -> None:
    """vLLM answers 200 to an abort of a name without its beginning, and does nothing."""
    server.delay_s = HANG_S
    api, errors = api_of(server), list[ServerError]()

    def ask() -> None:
        try:
            api.generate((5,), SAMPLING, 1, salt="v0", request_id="a1")
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.running["a1"]:
        time.sleep(0.01)
    api.abort("a1")
    thread.join()
    assert "ended by 'abort'" in str(errors[0])
    if server.kind == "vllm":
        assert server.bodies("/inference/v1/abort_requests") == [{"request_ids": ["generate-tokens-a1"]}]


def test_versions_of_software_and_keys(server: FakeServer) -> None:
    server.api_key = "secret"
    with pytest.raises(ServerError, match="status 401"):
        api_of(server).version()
    assert api_of(server, api_key="secret").version() == SOFTWARE[server.kind]


def test_a_server_with_a_certificate_of_ones_own_is_known_by_its_file(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words.split(), *names], check=True, capture_output=True)
    with FakeServer() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        assert HttpClient(url, ca_file=str(certificate)).get("/version", timeout_s=5) == {
            "version": "0.32.0",
            "tp_size": 1,
            "pp_size": 1,
        }
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            HttpClient(url).get("/version", timeout_s=5)


MODEL = ModelConfig(num_layers=3, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=8, first_dense_layers=1))
ROUTED = Sampling(max_new_tokens=5, stop_tokens=frozenset({70}), with_routes=True)


@pytest.mark.parametrize("dense_layers", [None, 1], ids=["MoE layers", "all layers"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("vllm", "uint8"), ("vllm", "uint16"), ("vllm", "int32"), ("sglang", "int32")]
)
def test_routes_of_both_formats_are_those_of_the_layers_that_route_in_the_dtype_that_came(kind, dtype, dense_layers):
    with FakeServer(kind=kind, routes_dtype=dtype, dense_layers=dense_layers) as server:
        made = api_of(server).generate((5, 6), ROUTED, 3, salt="v0", request_id="a")
        picked = pick_layers(server.url, made.experts_TLK, MODEL, num_tokens=6)
        tokens = (5, 6, *made.tokens_T[:-1])
        wanted = [[[(t + layer + 3 * k + 1) % 8 for k in (0, 1)] for layer in (0, 1)] for t in tokens]
        assert picked.dtype == dtype and picked.tolist() == wanted


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no_routes", "came without routes.*--enable-return-routed-experts"),
        ("missing_row", "routes of 5 tokens, and 6 entered|routes of tokens are missing"),
        ("zero_layer", r"the routes of layers \[2\] are all zero"),
        ("expert_twice", "an expert of a token twice"),
        ("no_such_expert", "experts 0 to 200, and a layer has 8"),
    ],
)
def test_routes_that_cannot_be_right_are_an_error(server: FakeServer, fault: str, message: str) -> None:
    server.faults.append((GENERATE[server.kind], fault))
    with pytest.raises(ServerError, match=message):
        made = api_of(server).generate((5, 6), ROUTED, 3, salt="v0", request_id="a")
        pick_layers(server.url, made.experts_TLK, MODEL, num_tokens=6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense_layers", [0, 1, 2])
def test_routes_without_those_of_the_prompt_are_an_error_however_long_it_is(kind: str, dense_layers: int) -> None:
    """SGLang sends numbers without a shape: those of half of the tokens in all layers are as many as those of all
    tokens in half of the layers.
    """
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=8, first_dense_layers=dense_layers)
    model = ModelConfig(num_layers=2 + dense_layers, moe=moe)
    for length in range(2, 12):
        with FakeServer(kind=kind, dense_layers=dense_layers, faults=[(GENERATE[kind], "no_prefix")]) as server:
            api = api_of(server)
            with pytest.raises(ServerError, match="routes"):
                made = api.generate(range(5, 5 + length), ROUTED, 1, salt="v0", request_id="a")
                pick_layers(server.url, made.experts_TLK, model, num_tokens=length + 4)
            whole = api.generate(range(5, 5 + length), ROUTED, 1, salt="v0", request_id="b")
            assert len(pick_layers(server.url, whole.experts_TLK, model, num_tokens=length + 4)) == length + 4


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("vllm", "float32", "dtype float32; wanted uint8, uint16 or int32"),
        ("vllm", "int64", "dtype int64; wanted uint8, uint16 or int32"),
        ("vllm", "bool", "dtype bool; wanted uint8, uint16 or int32"),
        # SGLang's numbers come without their dtype.
        ("sglang", "float32", "routes name experts 0 to 1088421888, and a layer has 8"),
        ("sglang", "float64", "routes of 4 layers with 2 experts a token; the model has 3 layers"),
        ("sglang", "float16", "which are not 2 experts of 7 tokens|routes of 1 layers"),
    ],
)
def test_routes_that_are_no_indices_are_an_error(kind: str, dtype: str, message: str) -> None:
    sampling = replace(ROUTED, max_new_tokens=6)
    with FakeServer(kind=kind, routes_dtype=dtype) as server, pytest.raises(ServerError, match=message):
        made = api_of(server).generate((5, 6), sampling, 3, salt="v0", request_id="a")
        pick_layers(server.url, made.experts_TLK, MODEL, num_tokens=7)


def test_after_two_updates_within_a_completion_the_rows_before_the_last_one_are_recomputed() -> None:
    """A prompt of 4, and tokens of versions 1, 2 and 3; the token before each update enters the model after it."""
    experts_TLK = np.arange(12 * 2 * 2, dtype=np.int32).reshape(12, 2, 2)
    versions = (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5), VersionSpan(3, 5, 9))
    found = without_recomputed("url", experts_TLK, versions, 4, may_miss=True)
    assert (found[: 4 + 5 - 1] == -1).all() and np.array_equal(found[8:], experts_TLK[8:])
    with pytest.raises(ServerError, match=r"weights came after 5 tokens.*routes of 8 tokens again"):
        without_recomputed("url", experts_TLK, versions, 4, may_miss=False)


@pytest.mark.parametrize("left_out", [0, -1])
def test_rows_that_a_server_left_out_are_marked_where_they_may_be_missing(left_out: int) -> None:
    """Zeros are no route of a token with two experts; a whole answer without routes has to be generated again."""
    given_TLK = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[0, 1], [2, 3]]], dtype=np.int32)
    given_TLK[1] = left_out
    with pytest.raises(ServerError):
        pick_layers("url", given_TLK, MODEL, num_tokens=3)
    picked = pick_layers("url", given_TLK, MODEL, num_tokens=3, may_miss=True)
    assert picked.tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]], [[0, 1], [2, 3]]]
    given_TLK[0, 1] = left_out
    with pytest.raises(ServerError):
        pick_layers("url", given_TLK, MODEL, num_tokens=3, may_miss=True)
    with pytest.raises(ServerError):
        pick_layers("url", np.full_like(given_TLK, left_out), MODEL, num_tokens=3, may_miss=True)


@pytest.mark.parametrize(
    ("cut", "mode"),
    [
        (Cut(), "processed_logprobs"),
        (Cut(temperature=0.7), "processed_logprobs"),
        (Cut(top_p=0.9), "raw_logprobs"),
        (Cut(top_k=5, temperature=0.7), None),
    ],
)
def test_the_mode_of_logprobs_is_the_one_before_the_cut_at_the_temperature(cut: Cut, mode: str | None) -> None:
    assert logprobs_mode(cut) == mode


def test_an_adapter_is_loaded_asked_for_by_its_name_and_forgotten(server: FakeServer) -> None:
    api, field = api_of(server), {"vllm": "model", "sglang": "lora_path"}[server.kind]
    api.load_adapter("policy-1", "/folder")
    assert list(server.adapters) == ["policy-1"]
    api.generate((5,), SAMPLING, 1, salt="v0", request_id="a", adapter="policy-1")
    api.prompt_logprobs((5, 6), adapter="policy-1")
    api.prompt_logprobs((5, 6))
    without = {"vllm": "policy", "sglang": None}[server.kind]
    asked = [body.get(field) for body in server.bodies(GENERATE[server.kind])]
    assert asked == ["policy-1", "policy-1", without]
    with pytest.raises(ServerError, match="policy-1 has already been loaded"):
        api.load_adapter("policy-1", "/folder")
    api.unload_adapter("policy-1")
    with pytest.raises(ServerError, match="The model policy-1 does not exist"):
        api.prompt_logprobs((5, 6), adapter="policy-1")
