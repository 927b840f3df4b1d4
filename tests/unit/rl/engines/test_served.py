"""The served engine on one rank: the contract, the native engine's completions, and what it does when servers fail."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.optim import LoraConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import add_adapters
from mcore_rl.rl.engines.base import Capabilities, Sampling
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.engines.server_api import HttpClient, Owner, ServerApi
from mcore_rl.rl.engines.server_process import SILENT_S, ServerFleet, known_servers, register, registration
from mcore_rl.rl.engines.sglang_api import SglangApi
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion
from tests.fake_server import GENERATE, HANG_S, FakeServer, TableAnswers
from tests.generating import engine_on, loaded, prompt_of, ragged_prompts, spelled
from tests.hf_models import VOCAB, oracle
from tests.sections import engine_config
from tests.served_model import ModelAnswers
from tests.unit.rl.engines import contract

APIS = {"vllm": VllmApi, "sglang": SglangApi}
OWNER = Owner("0123abcd", "/runs/a")
EIGHT = Sampling(max_new_tokens=8, cut=Cut(temperature=0.7))


@dataclass
class Served:
    """An engine on two fake servers, whose models begin with other weights than the policy's."""

    engine: ServedEngine
    servers: list[FakeServer]
    chunks: list[nn.Module]
    tensors: dict[str, Tensor]
    fleet: ServerFleet

    def completion(self, tokens: Sequence[int], sampling: Sampling = EIGHT, seed: int = 0) -> Completion:
        return contract.one(self.engine, tuple(tokens), sampling, seed)

    def asked(self, path: str) -> list[int]:
        return [server.paths().count(path) for server in self.servers]


@contextmanager
def served(
    mesh: Mesh,
    folder: Path,
    kind: str = "vllm",
    *,
    may_miss_routes: bool = False,
    adapters: LoraConfig | None = None,
    owner: Owner = OWNER,
    **fields: object,
) -> Iterator[Served]:
    theirs = oracle("qwen3_moe")
    model = theirs.ours
    chunks = loaded(model, theirs.tensors, mesh)
    before = {name: torch.zeros_like(tensor) for name, tensor in theirs.tensors.items()}
    if adapters is not None:
        add_adapters(chunks, adapters, model, seed=1)
        before = theirs.tensors
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                FakeServer(
                    ModelAnswers(loaded(model, before, mesh), mesh, model, before),
                    kind,
                    logprobs_mode="processed_logprobs",
                )
            )
            for _ in range(2)
        ]
        settings = {"kind": kind, "urls": tuple(server.url for server in servers), "request_timeout_s": 90.0}
        config = engine_config(**(settings | {"start_timeout_s": 0.5, "requests": 8} | fields))

        def api_at(url: str) -> ServerApi:
            return APIS[kind](
                HttpClient(url),
                vocab_size=model.vocab_size,
                experts_per_token=model.moe.top_k,
                request_timeout_s=config.request_timeout_s,
                update_timeout_s=90.0,
                owner=owner,
            )

        fleet = ServerFleet(config, api_at, folder, None)
        engine = ServedEngine(
            api_at,
            fleet,
            chunks,
            mesh,
            model,
            spelled,
            config,
            sampling=EIGHT,
            capabilities=Capabilities(max_tokens=64, routes=True, seeded=True),
            may_miss_routes=may_miss_routes,
            adapters=adapters,
        )
        try:
            engine.update_weights(0)
            yield Served(engine, servers, chunks, theirs.tensors, fleet)
        finally:
            engine.close()


@pytest.mark.matrix("vllm")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_completions_are_the_native_engines_and_keep_the_contract(kind: str, one_rank: Mesh, tmp_path: Path) -> None:
    """Tokens, logprobs and routes; each server gets the same weights in an update, and prompts are spread."""
    with served(one_rank, tmp_path, kind) as ours:
        native = engine_on(ours.chunks, one_rank, oracle("qwen3_moe").ours)
        prompts, seeds_PG = ragged_prompts(6, VOCAB), [[1, 2]] * 6
        sampling = replace(EIGHT, with_routes=True, vocab_size=VOCAB - 3, stop_tokens=frozenset(range(9)))
        wanted, found = (engine.generate(prompts, sampling, seeds_PG) for engine in (native, ours.engine))
        for want, group in zip(wanted, found, strict=True):
            for one, other in zip(want.completions, group.completions, strict=True):
                assert (other.tokens_T, other.text, other.finish) == (one.tokens_T, one.text, one.finish)
                assert other.logprobs_T == pytest.approx(one.logprobs_T, abs=2e-5)  # of other batches
                assert other.versions == one.versions
                assert one.experts_TLK is not None and other.experts_TLK is not None
                assert torch.equal(other.experts_TLK, one.experts_TLK)
        assert min(len(server.rollouts()) for server in ours.servers) > 2
        contract.check_all(ours.engine, VOCAB)


def test_a_request_that_fails_is_made_by_the_other_server_with_the_same_seed(one_rank: Mesh, tmp_path: Path) -> None:
    few = replace(EIGHT, max_new_tokens=3)
    with served(one_rank, tmp_path) as ours:
        wanted = ours.completion((1, 2, 3), few, seed=5)
        for fault in ("status_500", "close", "cut_short", "null_logprob"):
            for server in ours.servers:
                server.faults = [(GENERATE["vllm"], fault)] * (server is ours.servers[0])
            prompts, seeds = [prompt_of((1, 2, 3), str(name)) for name in range(4)], [[5]] * 4
            for group in ours.engine.generate(prompts, few, seeds):
                assert group.completions[0].tokens_T == wanted.tokens_T
        ours.servers[0].__exit__()
        events: list[str] = []
        ours.engine.listen(events.append)
        groups = ours.engine.generate(prompts, few, seeds)
        (event,) = events
        assert event.startswith(f"{ours.servers[0].url} is lost, 1 are left: ") and "refused" in event
        assert [group.completions[0].tokens_T for group in groups] == [wanted.tokens_T] * 4
        ours.engine.update_weights(1)
        assert ours.fleet.lines == [] and "is left out" in " ".join(ours.engine.take_lines())
        ours.servers[1].__exit__()
        with pytest.raises(EngineError, match="no server is left that has the present weights"):
            ours.engine.generate(prompts, few, seeds)


@pytest.mark.full
def test_servers_that_all_fail_end_with_the_reasons(one_rank: Mesh, tmp_path: Path) -> None:
    with served(one_rank, tmp_path) as ours:
        for server in ours.servers:
            server.faults = [(GENERATE["vllm"], "always status_500")]
        with pytest.raises(EngineError, match=r"rl\.engine\.attempts=3 attempts.*status 500.*status 500"):
            ours.completion((1, 2))
        assert sum(len(server.rollouts()) for server in ours.servers) == 3


@pytest.mark.full
def test_a_refusal_and_an_id_that_would_end_a_server_are_not_sent_again(one_rank: Mesh, tmp_path: Path) -> None:
    with served(one_rank, tmp_path) as ours:
        before = sum(ours.asked(GENERATE["vllm"]))
        for token in (VOCAB, -1):
            with pytest.raises(EngineError, match=rf"has the id {token}, and the model has the ids 0 to {VOCAB - 1}"):
                ours.completion((1, token))
        assert sum(ours.asked(GENERATE["vllm"])) == before
        for server in ours.servers:
            server.faults = [(GENERATE["vllm"], "refused")]
        with pytest.raises(EngineError, match=r"status 400.*It was refused"):
            ours.completion((1, 2))
        assert sum(ours.asked(GENERATE["vllm"])) == before + 1


@pytest.mark.full
def test_our_stop_strings_cut_what_a_server_without_a_tokenizer_sampled_after_them(
    one_rank: Mesh, tmp_path: Path
) -> None:
    with served(one_rank, tmp_path) as ours:
        whole = ours.completion((1, 2), replace(EIGHT, with_routes=True), 3)
        string = f" {whole.tokens_T[3]} "
        stopping = replace(EIGHT, with_routes=True, stop_strings=(string,))
        cut = ours.completion((1, 2), stopping, 3)
        native = engine_on(ours.chunks, one_rank, oracle("qwen3_moe").ours)
        wanted = contract.one(native, (1, 2), stopping, 3)
        assert (cut.tokens_T, cut.finish, cut.text) == (wanted.tokens_T, "stop", wanted.text)
        assert cut.text.endswith(string), "a stop string stays in the text that is scored"
        assert cut.versions == wanted.versions and len(cut.tokens_T) < len(whole.tokens_T)
        assert cut.experts_TLK is not None and wanted.experts_TLK is not None
        assert torch.equal(cut.experts_TLK, wanted.experts_TLK)


@pytest.mark.full
def test_a_server_without_the_weights_gets_no_request_until_an_update_has_proved_them(
    one_rank: Mesh, tmp_path: Path
) -> None:
    """The probe finds a tensor that was left old although every answer was 200."""
    with served(one_rank, tmp_path) as ours:
        bad = ours.servers[1]
        assert isinstance(bad.answers, ModelAnswers)
        bad.answers.forgets = "model.layers.0.self_attn.o_proj.weight"
        with torch.no_grad():
            for parameter in ours.chunks[0].parameters():
                parameter.mul_(1.05)
        ours.engine.update_weights(1)
        assert "does not have the trainer's weights" in " ".join(ours.engine.take_lines())
        before = len(bad.bodies(GENERATE["vllm"]))
        prompts = [prompt_of((1, 2, 3), str(name)) for name in range(8)]
        groups = ours.engine.generate(prompts, EIGHT, [[1]] * 8)
        assert {group.completions[0].policy_version for group in groups} == {1}
        assert len(bad.bodies(GENERATE["vllm"])) == before
        bad.answers.forgets = None
        ours.engine.update_weights(2)
        ours.engine.generate(prompts, EIGHT, [[1]] * 8)
        metrics = {metric.name: metric.value for metric in ours.engine.take_metrics()}
        assert metrics["servers/living"] == 2 and metrics["servers/probe_nats"] < 2e-4


@pytest.mark.full
def test_too_few_servers_with_the_weights_end_the_run(one_rank: Mesh, tmp_path: Path) -> None:
    with served(one_rank, tmp_path, min_servers=2) as ours:
        ours.servers[0].faults = [("/finish_weight_update", "status_500")]
        with pytest.raises(EngineError, match=r"1 servers have the weights of version 1.*min_servers=2.*status 500"):
            ours.engine.update_weights(1)


@pytest.mark.full
def test_an_answer_during_an_update_counts_only_of_a_server_that_the_probe_has_proved(
    one_rank: Mesh, tmp_path: Path
) -> None:
    with served(one_rank, tmp_path) as ours:
        prompt, found = prompt_of((1, 2, 3)), list[Completion]()
        asked = threading.Event()
        for server in ours.servers:
            server.before_answer = lambda _: asked.set()
            server.pause()  # as a pause before the update would
        thread = threading.Thread(
            target=lambda: found.extend(ours.engine.request_group(0, prompt, EIGHT, [4]).completions)
        )
        thread.start()
        assert asked.wait(10)
        first = next(server for server in ours.servers if server.running)
        assert isinstance(first.answers, ModelAnswers)
        with torch.no_grad():
            for parameter in ours.chunks[0].parameters():
                parameter.mul_(1.05)
        first.answers.forgets = "model.layers.0.self_attn.o_proj.weight"
        ours.engine.update_weights(1)
        thread.join(20)
        wanted = ours.completion((1, 2, 3), EIGHT, 4)
        assert found[0].tokens_T == wanted.tokens_T and found[0].logprobs_T == pytest.approx(wanted.logprobs_T)
        assert found[0].policy_version == 1


@pytest.mark.full
@pytest.mark.parametrize("may_miss_routes", [True, False])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_that_newer_weights_computed_again_are_not_those_of_the_tokens_before_them(
    kind: str, may_miss_routes: bool, one_rank: Mesh, tmp_path: Path
) -> None:
    """SGLang returns the newer weights' routes for tokens that older weights sampled, vLLM keeps the older ones'."""
    sampling = replace(EIGHT, with_routes=True)
    num_prompt, num_old = 24, 4
    prompt, found = prompt_of(range(1, num_prompt + 1)), list[Completion]()
    asked = threading.Event()
    with served(one_rank, tmp_path, kind, may_miss_routes=may_miss_routes) as ours:
        native = engine_on(ours.chunks, one_rank, oracle("qwen3_moe").ours)

        def routes_of(tokens: Sequence[int]) -> Tensor:
            once = replace(sampling, max_new_tokens=1)
            (completion,) = native.generate([prompt_of(tokens)], once, [[0]])[0].completions
            assert completion.experts_TLK is not None
            return completion.experts_TLK.long()

        for server in ours.servers:
            server.before_answer, server.tokens_before_pause = lambda _: asked.set(), num_old
            server.pause()  # as a pause before the update would
        thread = threading.Thread(
            target=lambda: found.extend(ours.engine.request_group(0, prompt, sampling, [4]).completions)
        )
        thread.start()
        assert asked.wait(10)
        before_TLK = routes_of(prompt.tokens_T)
        older = contract.one(native, prompt.tokens_T, replace(sampling, max_new_tokens=num_old), 4).experts_TLK
        assert older is not None and older.shape[0] == num_prompt + num_old - 1
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in ours.chunks[0].parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        ours.engine.update_weights(1)
        for server in ours.servers:
            server.tokens_before_pause = 0
        thread.join(20)
        (completion,) = found
        assert completion.experts_TLK is not None
        now_TLK = routes_of((*prompt.tokens_T, *completion.tokens_T)[:-1])
        assert (before_TLK != now_TLK[:num_prompt]).float().mean() > 0.2
        experts_TLK, num_recomputed = completion.experts_TLK.long(), num_prompt + num_old - 1
        if may_miss_routes or kind == "vllm":
            assert [(span.version, span.start, span.end) for span in completion.versions] == [(0, 0, 4), (1, 4, 8)]
            former_TLK = older.long() if kind == "vllm" else torch.tensor(-1).expand_as(older)
            assert torch.equal(experts_TLK[:num_recomputed], former_TLK)
            assert torch.equal(experts_TLK[num_recomputed:], now_TLK[num_recomputed:])
        else:
            # It was generated again, all of it with the newer weights.
            assert [(span.version, span.start, span.end) for span in completion.versions] == [(1, 0, 8)]
            assert torch.equal(experts_TLK, now_TLK)
            bodies = [body for server in ours.servers for body in server.bodies(GENERATE[kind])]
            ids = [body.get("token_ids") or body.get("input_ids") for body in bodies]
            assert ids.count(list(prompt.tokens_T)) == 2


@pytest.mark.full
@pytest.mark.parametrize(("kind", "field"), [("vllm", "cache_salt"), ("sglang", "extra_key")])
def test_what_another_run_has_left_in_a_servers_caches_is_not_read(
    kind: str, field: str, one_rank: Mesh, tmp_path: Path
) -> None:
    """A resumed run has other weights of a version too, and a reset does not reach every tier of a cache."""

    def salts(ours: Served) -> set[str]:
        found = {body[field] for server in ours.servers for body in server.rollouts()}
        for server in ours.servers:
            server.calls.clear()
        return found

    of_runs = []
    for run in range(2):
        with served(one_rank, tmp_path / str(run), kind) as ours:
            of_versions = []
            for version in range(2):
                if version:
                    ours.engine.update_weights(version)
                for token in (1, 2, 3):
                    ours.completion((token, 2, 3))
                (salt,) = salts(ours)
                of_versions.append(salt)
            of_runs.append(of_versions)
    assert len({salt for of_versions in of_runs for salt in of_versions}) == 4
    assert [salt[-2:] for salt in of_runs[0]] == ["v0", "v1"]


@pytest.mark.full
def test_a_server_that_was_started_anew_at_its_address_is_not_believed(one_rank: Mesh, tmp_path: Path) -> None:
    with served(one_rank, tmp_path) as ours:
        ours.servers[0].version = "default"
        prompts = [prompt_of((1, 2, 3), str(name)) for name in range(6)]
        groups = ours.engine.generate(prompts, EIGHT, [[1]] * 6)
        assert {group.completions[0].policy_version for group in groups} == {0}
        assert ours.engine._state.living == (ours.servers[1].url,)


@pytest.mark.full
def test_adapters_are_asked_for_by_name_and_a_server_that_was_started_anew_lacks_them(
    one_rank: Mesh, tmp_path: Path
) -> None:
    fields = {"lora": "adapter", "transport_dir": str(tmp_path)}
    with served(one_rank, tmp_path, adapters=LoraConfig(rank=4), **fields) as ours:
        base = ours.completion((3, 4))
        with torch.no_grad():
            for param in (param for param in ours.chunks[0].parameters() if param.requires_grad):
                param.copy_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        ours.engine.update_weights(1)
        found = ours.completion((3, 4))
        native = engine_on(ours.chunks, one_rank, oracle("qwen3_moe").ours)
        wanted = contract.one(native, (3, 4), EIGHT, 0)
        assert found.tokens_T == wanted.tokens_T != base.tokens_T
        assert found.logprobs_T == pytest.approx(wanted.logprobs_T, abs=1e-4)
        assert (base.policy_version, found.policy_version) == (0, 1)
        asked = next(index for index, count in enumerate(ours.asked(GENERATE["vllm"])) if count)
        for server in ours.servers:
            (name,) = server.adapters
            assert name.startswith("policy-000001-")
        lines: list[str] = []
        ours.engine.listen(lines.append)
        for _ in range(8):  # until that server is asked
            ours.servers[asked].adapters.clear()
            assert ours.completion((3, 4)).logprobs_T == pytest.approx(wanted.logprobs_T, abs=1e-4)
        assert len(lines) <= 1
        ours.servers[1 - asked].adapters.clear()
        ours.servers[asked].adapters.clear()
        with pytest.raises(EngineError, match="does not exist"):
            ours.completion((3, 4))


@pytest.mark.full
def test_close_ends_requests_in_progress(one_rank: Mesh, tmp_path: Path) -> None:
    with served(one_rank, tmp_path) as ours:
        errors = list[EngineError]()

        def ask() -> None:
            try:
                ours.engine.request_group(0, prompt_of((1, 2)), EIGHT, [1, 2])
            except EngineError as error:
                errors.append(error)

        for server in ours.servers:
            server.delay_s = HANG_S
        thread = threading.Thread(target=ask)
        thread.start()
        while sum(server.running.total() for server in ours.servers) < 2:
            time.sleep(0.01)
        ours.engine.close()
        thread.join(HANG_S / 2)
        assert not thread.is_alive() and "closed" in str(errors[0])
        with pytest.raises(EngineError, match="closed"):
            ours.engine.request_group(0, prompt_of((1, 2)), EIGHT, [1])


@pytest.mark.parametrize(("kind", "version"), [("vllm", "0.31.9"), ("vllm", "0.34.0+cpu"), ("sglang", "0.5.24")])
def test_versions_that_were_not_tried_are_refused(kind: str, version: str) -> None:
    with FakeServer(TableAnswers(), kind, software=version) as server:
        api = VllmApi(HttpClient(server.url), vocab_size=8, request_timeout_s=5, update_timeout_s=5)
        if kind == "sglang":
            api = SglangApi(
                HttpClient(server.url), vocab_size=8, experts_per_token=2, request_timeout_s=5, update_timeout_s=5
            )  # type: ignore[assignment]
        newer = "" if version == "0.31.9" else ", newer than the table of its protocol .*"
        with pytest.raises(
            EngineError, match=rf"is {kind} {version.replace('+', '.')}{newer}; tried are versions from"
        ):
            api.refuse_untried()


@pytest.mark.full
def test_requests_of_a_server_whose_engine_hangs_go_to_another_one_in_seconds(
    one_rank: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other process keeps the connections open, and would until rl.engine.request_timeout_s."""
    monkeypatch.setattr("mcore_rl.rl.engines.served.LOOK_S", 0.05)
    monkeypatch.setattr("mcore_rl.rl.engines.server_api.HEALTH_S", 3.0)
    with served(one_rank, tmp_path, request_timeout_s=HANG_S) as ours:
        wanted = ours.completion((1, 2, 3), seed=5)
        ours.servers[0].hangs = True
        events: list[str] = []
        ours.engine.listen(events.append)
        start_s = time.monotonic()
        groups = ours.engine.generate([prompt_of((1, 2, 3), str(name)) for name in range(4)], EIGHT, [[5]] * 4)
        assert time.monotonic() - start_s < HANG_S / 2
        assert [group.completions[0].tokens_T for group in groups] == [wanted.tokens_T] * 4
        assert len(events) == 1 and events[0].startswith(f"{ours.servers[0].url} is lost")


@pytest.mark.parametrize("kind", APIS)
def test_requests_in_progress_follow_the_queues_that_servers_report(kind: str, one_rank: Mesh, tmp_path: Path) -> None:
    """A server computes three requests at a time, so that both compute six of those in progress."""
    with served(one_rank, tmp_path, kind, requests=16) as ours:
        engine, state = ours.engine, ours.engine._state
        apis = [engine._api_at(server.url) for server in ours.servers]
        assert [api.queue() for api in apis] == [None, None]

        def follow(num_open: int) -> int:
            state.open_requests = {str(number): "" for number in range(num_open)}
            each = num_open // 2
            for server in ours.servers:
                server.queue = lambda _: (min(each, 3), max(0, each - 3))
            engine._follow([queue for api in apis if (queue := api.queue()) is not None])
            return state.most_requests

        assert apis[0].queue() is None
        assert follow(16) == 8 and apis[0].queue() == (3, 5)
        assert follow(12) == 8, "more are in progress than may be: the limit has had no effect yet"
        assert follow(8) == 4
        assert [follow(4) for _ in range(9)] == [5, 6, 7, 8, 10, 12, 15, 16, 16]
        for server in ours.servers:
            server.queue = lambda _: (10, 1)
        engine._follow([api.queue() for api in apis])  # type: ignore[misc]
        assert state.most_requests == 16, "a tenth or less waits"
        assert [follow(16), follow(8)] == [8, 4]
        for server in ours.servers:
            server.queue = lambda _: (0, 5)
        for _ in range(4):
            state.open_requests = {"0": ""}
            engine._follow([api.queue() for api in apis])  # type: ignore[misc]
            assert state.most_requests == 1, "never 0"
        state.open_requests = {}


def test_requests_beyond_the_limit_wait_and_all_are_answered(
    one_rank: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_rl.rl.engines.served.LOOK_S", 0.05)
    one_token = replace(EIGHT, max_new_tokens=1)
    prompts = [prompt_of((1, number), f"p{number}") for number in range(24)]

    def asked(ours: Served) -> int:
        """The largest number of requests in progress."""
        found: list[int] = []
        for server in ours.servers:
            server.before_answer = lambda _: found.append(len(ours.engine._state.open_requests))
        groups = ours.engine.generate(prompts, one_token, [[1]] * 24)
        assert len(groups) == 24
        return max(found)

    with served(one_rank, tmp_path, requests=8) as ours:
        ours.engine._state.most_requests = 2
        assert asked(ours) <= 2 and ours.engine._state.most_requests == 2, "no server says how many wait"
        for server in ours.servers:
            server.queue = lambda fake: (fake.num_open, 0)
            server.delay_s = 0.1
        asked(ours)
        deadline = time.monotonic() + 60
        while ours.engine._state.most_requests < 8:
            assert time.monotonic() < deadline
            asked(ours)


@pytest.mark.full
def test_a_server_that_another_run_takes_is_lost_at_its_next_answer(one_rank: Mesh, tmp_path: Path) -> None:
    others = Owner("44444444", "/runs/b").version(0)
    with served(one_rank, tmp_path) as ours:
        wanted = ours.completion((1, 2, 3), seed=5)
        ours.servers[0].version = others
        groups = ours.engine.generate([prompt_of((1, 2, 3), str(name)) for name in range(4)], EIGHT, [[5]] * 4)
        assert [group.completions[0].tokens_T for group in groups] == [wanted.tokens_T] * 4
        assert ours.engine._state.living == (ours.servers[1].url,)
        ours.servers[1].version = others
        with pytest.raises(EngineError, match=r"no server is left .* belongs to the run /runs/b"):
            ours.completion((1, 2, 3))
        with pytest.raises(EngineError, match=r"0 of 1 servers .* belongs to the run /runs/b"):
            ours.engine.update_weights(1)
        assert {server.version for server in ours.servers} == {others}, "and is not updated any more"


@pytest.mark.full
def test_a_server_joins_with_the_next_update_and_one_that_leaves_keeps_no_prompt_of_its_own(
    one_rank: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer is asked nothing before it has weights and the probe has proved them; whoever leaves is asked
    nothing more, and moves no prompt from one of the others to another.
    """
    monkeypatch.setattr("mcore_rl.rl.engines.served.LOOK_S", 0.05)
    folder, theirs = str(tmp_path / "joined"), oracle("qwen3_moe")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in theirs.tensors.items()}
    answers = ModelAnswers(loaded(theirs.ours, zeros, one_rank), one_rank, theirs.ours, zeros)
    lines: list[str] = []
    one_token = replace(EIGHT, max_new_tokens=1)
    with (
        served(one_rank, tmp_path, servers_dir=folder) as ours,
        FakeServer(answers, logprobs_mode="processed_logprobs") as late,
    ):
        ours.engine.listen(lines.append)
        servers = [*ours.servers, late]

        def placed() -> list[FakeServer]:
            """The server that each of some prompts is asked of, one prompt at a time."""
            found = []
            for number in range(18):
                before = [len(server.rollouts()) for server in servers]
                ours.engine.generate([prompt_of((1, number), f"p{number}")], one_token, [[number]])
                (asked,) = [one for one, count in zip(servers, before, strict=True) if len(one.rollouts()) > count]
                found.append(asked)
            return found

        register(folder, late.url)
        first = placed()
        assert late.calls == []
        ours.engine.update_weights(1)
        assert late.version.startswith("v1-") and late.rollouts() == []
        second = placed()
        assert 0 < second.count(late) < 18
        assert all(one is late or one is other for one, other in zip(second, first, strict=True))
        registration(folder, late.url).unlink()
        deadline = time.monotonic() + 30
        while not lines:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert lines == [f"{late.url} has left; 2 servers are there"]
        assert placed() == first


def test_an_entry_that_is_not_renewed_names_a_server_that_has_left(tmp_path: Path) -> None:
    engine = engine_config(kind="vllm", urls=("http://a:1",), servers_dir=str(tmp_path))
    register(str(tmp_path), "http://b:2")
    assert known_servers(engine) == ["http://a:1", "http://b:2"]
    long_ago_s = time.time() - SILENT_S - 1
    os.utime(registration(str(tmp_path), "http://b:2"), (long_ago_s, long_ago_s))
    assert known_servers(engine) == ["http://a:1"]
