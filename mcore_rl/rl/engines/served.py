"""Rollout engine on inference servers: choice of the server, retries, and weight updates."""

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Condition, Thread
from typing import Self

import numpy as np
import torch
from torch import nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError, EngineError, StoppedError
from mcore_rl.megatron.agree import from_every_rank, from_first_of_model, on_every_rank, on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.engines.base import Capabilities, Decode, Engine, Sampling, StopStrings, check_request, sampling_of
from mcore_rl.rl.engines.server_api import (
    Owner,
    ServedCompletion,
    ServerApi,
    ServerError,
    TakenError,
    pick_layers,
    server_apis,
    without_recomputed,
)
from mcore_rl.rl.engines.server_process import (
    ServerFleet,
    known_servers,
    served_length,
    server_command,
    servers_folder,
    start_server_of,
)
from mcore_rl.rl.engines.weight_push import AdapterPush, ServedAdapters, WeightPush, transport_folder
from mcore_rl.rl.types import BYTE_EXPERTS, Completion, Group, Prompt, VersionSpan

MOST_MERGE_LOSS = 0.1
"""Fraction of low-rank adapters that may be lost to rounding of the merged weights before a warning is given."""
STOP_LOOK_S = 0.2
"""Seconds between two looks at whether the run is to stop, and then between two cuts of all calls."""
LOOK_S, MOST_SILENT = 5.0, 2
"""Seconds between two looks at servers with requests in progress, and the number of looks at a silent one after which
its requests are asked of others."""
MOST_WAITING = 0.1
"""Fraction of the requests on servers above which fewer are asked at a time."""
SHARE = 1.25
"""Limit on a server's requests in progress, as a multiple of the mean; beyond it a prompt goes to the least busy
server."""


@dataclass(slots=True)
class _State:
    """State shared by the threads of an engine, protected by a lock."""

    lock: Condition = field(default_factory=Condition)
    living: tuple[str, ...] = ()
    """Servers with the current weights."""
    lost: dict[str, str] = field(default_factory=dict)
    """Servers that have failed since the last update, with the reason."""
    running: Counter[str] = field(default_factory=Counter)
    """Number of requests in progress, by server."""
    open_requests: dict[str, str] = field(default_factory=dict)
    """Server of each request in progress, by the request's name."""
    most_requests: int = 1
    """Number of requests that may be in progress."""
    num_retries: int = 0
    is_updating: bool = False
    is_stopped: bool = False
    """Whether all waits are to end with StoppedError."""
    is_closed: bool = False


class ServedEngine:
    """Generates completions on servers. Only the first rank of each replica of the policy sends requests."""

    def __init__(
        self,
        api_at: Callable[[str], ServerApi],
        fleet: ServerFleet | None,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        decode: Callable[[Sequence[int]], str],
        config: ServedConfig,
        *,
        sampling: Sampling,
        capabilities: Capabilities,
        imposes_routes: bool = True,
        may_miss_routes: bool = False,
        adapters: LoraConfig | None = None,
        salt: str = "",
    ) -> None:
        """Collective over the pipeline stages: create the engine. `fleet` is None on all ranks but 0. Each update
        compares logprobs with `sampling`. `imposes_routes`: routes are replayed (R3), not only compared with the
        trainer's; `may_miss_routes`: servers may leave out those of some tokens; `adapters`: the section `lora` if
        servers load adapters; `salt` is the same on all ranks, and no other start of a run has it ("": one of this
        rank's).
        """
        self.decode, self.policy_version, self.capabilities = decode, 0, capabilities
        self._make_api, self._fleet, self._chunks, self._sampling = api_at, fleet, list(chunks), sampling
        self._mesh, self._model, self._config = mesh, model, config
        self._imposes_routes, self._may_miss_routes = imposes_routes, may_miss_routes
        self._layers_of_stages = from_every_rank(routed_layers(chunks), mesh.pp.group)
        # A new salt for each start: another run, or this run before a resume, may have had different weights of the
        # same version, and a cache tier that a reset does not reach may still have their keys, values and routes.
        self._salt = salt or secrets.token_hex(4)
        self._apis: dict[str, ServerApi] = {}
        self._state = _State(most_requests=config.requests)
        if fleet is not None:
            fleet.api_at, fleet.refuse_stop = self._api_at, self._refuse_stop
        self._pool = ThreadPoolExecutor(config.requests, "server_request") if self.asks else None
        self._watch: Thread | None = None
        self._names = (f"{mesh.world.rank}-{number}" for number in itertools.count())
        self._push: tuple[list[str], WeightPush | AdapterPush] | None = None
        self._adapters = adapters
        self._served_adapters: ServedAdapters | None = None
        self._adapter: str | None = None
        """Name of the current adapters on the servers; None if the servers have whole weights."""
        self._message: Callable[[str], None] | None = None
        """Called at once with a log line, from any thread, when a server is lost; None if not registered."""
        self._metrics: list[Metric] = []
        self._lines: list[str] = []
        self._num_unreached = 0
        self.seconds: dict[str, float] = {}
        """Seconds of the last update by phase, as `PushReport` has them."""

    @classmethod
    def of_config(
        cls,
        config: RlRunConfig,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        decode: Decode,
        api_at: Callable[[str], ServerApi],
        fleet: ServerFleet | None = None,
        *,
        salt: str,
    ) -> Self:
        """Collective over the pipeline stages: create the engine of a config, with the other arguments of the class."""
        engine, tokenizer = config.served, config.data.tokenizer
        assert engine is not None
        vocab_size = config.model.vocab_size if tokenizer.kind == "none" else load_tokenizer(tokenizer).vocab_size
        return cls(
            api_at,
            fleet,
            chunks,
            mesh,
            config.model,
            decode,
            engine,
            sampling=sampling_of(config.rl.rollout, (), vocab_size=vocab_size, with_routes=False),
            capabilities=Capabilities(
                max_tokens=served_length(config.longest_sample, config.model, engine),
                routes=config.wants_engine_routes,
                seeded=False,
            ),
            imposes_routes=config.replay.kind == "r3",
            may_miss_routes=config.replay.missing != "error",
            adapters=config.lora if engine.lora == "adapter" else None,
            salt=salt,
        )

    @property
    def asks(self) -> bool:
        """Whether this rank, the replica's first, sends the requests of its replica."""
        return self._mesh.tp.rank == 0 and self._mesh.pp.rank == 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Collective over the world: return the groups of this replica's prompts, with the routes of this stage's
        layers. Raises EngineError on all ranks if a request of any replica cannot be served.
        """

        def asked() -> list[Group] | None:
            self._check(prompts, sampling, seeds_PG)
            if not self.asks:
                return None
            futures_PG = [
                self._submit(prompt, sampling, seeds_G) for prompt, seeds_G in zip(prompts, seeds_PG, strict=True)
            ]
            return [_group(*pair) for pair in zip(prompts, futures_PG, strict=True)]

        def of_stage(groups: list[Group] | None, stage: int) -> list[Group]:
            return [self.of_stage(group, stage) for group in groups or ()]

        return from_first_of_model(on_every_rank(asked), self._mesh, of_stage) or []

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the group of prompt `index` with all layers' routes, on the rank that sends requests. Not collective;
        safe in several threads, also during `update_weights` and `generate`. Raises EngineError if no server answers or
        the engine is closed.
        """
        self._check([prompt], sampling, [seeds_G])
        return _group(prompt, self._submit(prompt, sampling, seeds_G))

    def of_stage(self, group: Group, stage: int) -> Group:
        """Return the group with only the routes of a pipeline stage's layers."""
        moe_layers = [layer for layer, has_router in enumerate(self._model.moe_layers) if has_router]
        layers = self._layers_of_stages[stage]
        if list(layers) == moe_layers or all(completion.experts_TLK is None for completion in group.completions):
            return group
        columns = torch.tensor([moe_layers.index(layer) for layer in layers], dtype=torch.int64)
        return replace(
            group,
            completions=tuple(
                completion
                if completion.experts_TLK is None
                else replace(completion, experts_TLK=completion.experts_TLK.index_select(1, columns))
                for completion in group.completions
            ),
        )

    def update_weights(self, policy_version: int) -> None:
        """Collective over the world: send the current weights to all servers, and verify them with the probe.
        Completions in progress continue with them. A server that fails is left out until a later update. Raises
        EngineError on all ranks if fewer than rl.engine.min_servers servers have the weights.
        """
        state, start_s = self._state, time.perf_counter()
        with state.lock:
            state.is_updating = True
        report = self._push_to(self._ready(self._lost_anywhere())).push(policy_version)
        if len(report.living) < self._config.min_servers:
            on_rank_zero(self._refuse_stop)
        self._after_push(report.living, report.failed, policy_version)
        if report.num_unreached_experts != self._num_unreached:
            self._num_unreached = report.num_unreached_experts
            self._lines.append(
                f"too few tokens of the probe reach {self._num_unreached} experts, over all layers: what these alone "
                "lack is not seen"
            )
        if (report.merge_loss or 0.0) > MOST_MERGE_LOSS:
            self._lines.append(
                f"warning: rounding the merged weights of version {policy_version} loses {report.merge_loss:.0%} of "
                "the adapters: the servers sample with another policy than is trained. Small adapters grow; "
                'platform.precision="fp32" with rl.engine.dtype="fp32" loses none, and '
                "rl.loss.importance_sampling corrects for it"
            )
        if len(report.living) < self._config.min_servers:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in report.failed.items())
            raise EngineError(
                f"{len(report.living)} servers have the weights of version {policy_version}, and "
                f"rl.engine.min_servers={self._config.min_servers}: {reasons}. The weights in the last checkpoint are "
                "sound; see the servers' logs."
            )
        with state.lock:
            state.living, state.is_updating = report.living, False
            self.policy_version, self._adapter = policy_version, report.adapter
            num_retries, state.num_retries = state.num_retries, 0
            state.lock.notify_all()
        self._metrics += [
            Metric("servers/living", len(report.living)),
            Metric("servers/retried_requests", num_retries),
            Metric("servers/update_s", time.perf_counter() - start_s),
            Metric("servers/update_bytes", report.num_bytes),
            Metric("servers/probe_nats", report.probe),
            Metric("servers/gather_s", report.seconds.get("gather", 0.0)),
            Metric("servers/write_s", report.seconds.get("write", 0.0)),
            Metric("servers/load_s", report.seconds.get("load", 0.0)),
            Metric("servers/paused_s", report.seconds.get("paused", 0.0)),
        ]
        self.seconds = dict(report.seconds)
        if report.merge_loss is not None:
            self._metrics.append(Metric("lora/merge_loss", report.merge_loss))

    def _ready(self, lost: Mapping[str, str]) -> list[str]:
        """Collective over the world: start servers that were lost anew, and return the addresses of those to update."""
        fleet = self._fleet

        def ready() -> list[str]:
            assert fleet is not None
            fleet.start_anew(lost)
            try:
                return fleet.ready()
            except EngineError:
                self._refuse_stop()
                raise

        return on_rank_zero(ready)

    def _after_push(self, living: Sequence[str], failed: Mapping[str, str], version: int) -> None:
        """Collective over the world: replace servers that failed in a push, and record those that have the weights."""
        fleet = self._fleet
        if fleet is not None:
            fleet.start_anew(failed)
            fleet.write_status(living, version)
            self._lines += fleet.lines
            fleet.lines.clear()

    def end_waits_when(self, is_asked: Callable[[], bool]) -> None:
        """End all waits for servers soon after `is_asked` has become true: they raise StoppedError on all ranks."""

        def watch() -> None:
            state = self._state
            with state.lock:
                while not state.lock.wait_for(lambda: state.is_closed, STOP_LOOK_S):
                    state.is_stopped = state.is_stopped or is_asked()
                    if state.is_stopped:
                        state.lock.notify_all()
                        for api in self._apis.values():
                            api.cut()

        Thread(target=watch, name="server_stop", daemon=True).start()

    def _refuse_stop(self) -> None:
        if self._state.is_stopped:
            raise StoppedError("a wait for servers was ended")

    def _make_room(self) -> None:
        """Do nothing: servers have GPUs of their own."""

    def describe(self) -> list[str]:
        """Return no lines: events of the servers are in `take_lines`."""
        return []

    def listen(self, message: Callable[[str], None], /) -> None:
        """Register `message`, to be called with a log line when a server is lost."""
        self._message = message

    def take_metrics(self) -> list[Metric]:
        """Return the metrics of updates since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def take_lines(self) -> list[str]:
        """Return log lines on the servers' events since the last call, on rank 0."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """End the requests in progress, which raise EngineError, and the servers that the run started."""
        state = self._state
        with state.lock:
            state.is_closed = True
            state.lock.notify_all()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        # A server ends a request whose connection is closed; a thread that waits for an answer would delay the exit.
        for api in list(self._apis.values()):
            api.cut()
        if self._fleet is not None:
            self._fleet.close()
            self._fleet.release(state.living, self.policy_version)

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> None:
        """Raise EngineError for a request that a server would answer wrongly or crash on."""
        check_request(prompts, sampling, seeds_PG, self.capabilities)
        for prompt in prompts:
            beyond = [token for token in prompt.tokens_T if not 0 <= token < self._model.vocab_size]
            if beyond:
                raise EngineError(
                    f"prompt {prompt.problem.problem_id} has the id {beyond[0]}, and the model has the ids 0 to "
                    f"{self._model.vocab_size - 1}: a server would end by it. Use the model's tokenizer."
                )

    def _submit(self, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> "list[Future[Completion]]":
        """Request a prompt's completions, all from the same server, so that it computes the prompt once."""
        assert self._pool is not None, "only the first rank of a model asks"
        if self._watch is None:
            self._watch = Thread(target=self._watch_servers, name="server_watch", daemon=True)
            self._watch.start()
        try:
            server = self._server_for(prompt, len(seeds_G))
            return [self._pool.submit(self._complete, prompt, sampling, seed, server) for seed in seeds_G]
        except RuntimeError:
            raise EngineError("the engine is closed, so that no completion can be asked for") from None

    def _api_at(self, url: str) -> ServerApi:
        with self._state.lock:
            return self._apis.setdefault(url, self._make_api(url))

    def _watch_servers(self) -> None:
        """End requests of silent servers: a hung engine keeps them open, and another process may seem healthy."""
        state = self._state
        silent: Counter[str] = Counter()
        while True:
            with state.lock:
                if state.lock.wait_for(lambda: state.is_closed, LOOK_S):
                    return
            if self._config.servers_dir is not None:
                self._drop(set(known_servers(self._config)))
            with state.lock:
                # An update occupies the thread that answers.
                urls = set() if state.is_updating else set(state.open_requests.values())
            with ThreadPoolExecutor(max(1, len(urls))) as pool:
                healthy = dict(zip(urls, pool.map(lambda url: self._api_at(url).is_healthy(), urls), strict=True))
                queues = [*pool.map(lambda url: self._api_at(url).queue(), filter(healthy.get, urls))]
            self._follow([queue for queue in queues if queue is not None])
            silent = Counter({url: silent[url] + 1 for url in urls if not healthy[url]})
            for url in silent:
                if silent[url] >= MOST_SILENT:
                    self._api_at(url).cut()

    def _follow(self, queues: Sequence[tuple[int, int]]) -> None:
        """Let fewer requests be in progress if too many on servers wait, and more, up to rl.engine.requests, if none
        does. A queue has the requests of a server that are computed, and that wait; without any nothing changes.
        """
        state, waiting = self._state, sum(queue[1] for queue in queues)
        with state.lock:
            num_open, most = len(state.open_requests), state.most_requests
            # More than the limit are still in progress after it was lowered: it has not had its effect yet.
            if waiting > MOST_WAITING * sum(map(sum, queues)) and num_open <= most:
                state.most_requests = max(1, num_open // 2)
            elif queues and not waiting:
                state.most_requests = min(self._config.requests, most + max(1, most // 4))
                state.lock.notify_all()

    def _drop(self, known: Set[str]) -> None:
        """Send no further requests to servers that are not `known` any more; those in progress go on."""
        state = self._state
        with state.lock:
            left = [url for url in state.living if url not in known]
            state.living = tuple(url for url in state.living if url in known)
            state.lost |= dict.fromkeys(left, "it has left rl.engine.servers_dir")
        for url in left:
            if self._message is not None:
                self._message(f"{url} has left; {len(state.living)} servers are there")

    def _server_for(self, prompt: Prompt, num_requests: int) -> str:
        """Choose a problem's server, always the same for its prefix cache, unless that is much busier than the rest."""
        state = self._state
        with state.lock:
            if not state.living:
                raise EngineError(_no_server(state.lost))
            # The largest hash: a server that comes or goes moves no other server's prompts.
            name = prompt.problem.problem_id
            preferred = max(state.living, key=lambda url: blake2b(f"{name} {url}".encode(), digest_size=8).digest())
            total = sum(state.running[url] for url in state.living) + num_requests
            most = SHARE * total / len(state.living) + num_requests / 2
            if state.running[preferred] and state.running[preferred] + num_requests > most:
                preferred = min(state.living, key=lambda url: state.running[url])
            state.running[preferred] += num_requests
            return preferred

    def _complete(self, prompt: Prompt, sampling: Sampling, seed: int, server: str) -> Completion:
        """Return a completion from `server` or, if that fails, from another server with the same seed."""
        state = self._state
        reasons: dict[str, str] = {}
        for _ in range(self._config.attempts):
            name = next(self._names)
            try:
                with self._in_progress(name, server):
                    version, adapter = self.policy_version, self._adapter
                    served = self._api_at(server).generate(
                        prompt.tokens_T,
                        sampling,
                        seed,
                        salt=f"{self._salt}v{version}",
                        request_id=name,
                        adapter=adapter,
                    )
                if adapter is not None:
                    # The server reports the version of its base; the adapter's name identifies the policy's version.
                    served = replace(served, versions=(VersionSpan(version, 0, len(served.tokens_T)),))
                completion = self._completion(prompt, sampling, served, server)
            except ServerError as error:
                # A restarted server does not know the adapter that the request names.
                is_forgotten = adapter is not None and adapter in str(error)
                if error.is_refusal and not is_forgotten:
                    raise EngineError(f"{error}. It was refused, so that it is not tried again.") from None
                reasons[server] = str(error)
                is_other = is_forgotten or isinstance(error, TakenError)
                is_living = not is_other and self._api_at(server).is_healthy()
                if is_living and error.status is None:
                    with suppress(ServerError):
                        self._api_at(server).abort(name)  # it may still be computing the lost request
            else:
                # An answer given during an update counts only after the probe has verified the server's weights.
                is_living = self._is_living_after_update(server)
                if is_living and completion.policy_version >= version:
                    return completion
                # A server restarted at the same address has its initial weights, not this version.
                is_living = False
                reasons[server] = f"its weights are not those of version {version}"
            with state.lock:
                self._refuse_stop()
                if state.is_closed:
                    raise EngineError("the engine was closed while completions were in progress")
                state.num_retries += 1
                if is_lost := not is_living and server in state.living:
                    state.living = tuple(url for url in state.living if url != server)
                    state.lost[server] = reasons[server]
            if is_lost and self._message is not None:
                self._message(
                    f"{server} is lost, {len(state.living)} are left: {reasons[server]}. Its completions are asked of "
                    "the others"
                )
            with state.lock:
                if not state.living:
                    raise EngineError(_no_server(state.lost))
                others = [url for url in state.living if url not in reasons] or list(state.living)
                server = min(others, key=lambda url: state.running[url])
                state.running[server] += 1
        tried = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
        raise EngineError(
            f"no server answered prompt {prompt.problem.problem_id} in rl.engine.attempts={self._config.attempts} "
            f"attempts: {tried}"
        )

    @contextmanager
    def _in_progress(self, name: str, server: str) -> Iterator[None]:
        state = self._state
        with state.lock:
            state.lock.wait_for(
                lambda: len(state.open_requests) < state.most_requests or state.is_closed or state.is_stopped
            )
            if state.is_closed or state.is_stopped:
                state.running[server] -= 1
                self._refuse_stop()
                raise EngineError("the engine is closed")
            state.open_requests[name] = server
        try:
            yield
        finally:
            with state.lock:
                del state.open_requests[name]
                state.running[server] -= 1
                state.lock.notify_all()

    def _is_living_after_update(self, server: str) -> bool:
        state = self._state
        with state.lock:
            state.lock.wait_for(lambda: not state.is_updating or state.is_closed or state.is_stopped)
            return server in state.living

    def _completion(self, prompt: Prompt, sampling: Sampling, served: ServedCompletion, server: str) -> Completion:
        num_prompt = len(prompt.tokens_T)
        experts_TLK = None
        if sampling.with_routes:
            num_tokens = num_prompt + len(served.tokens_T) - 1
            picked = pick_layers(
                server, served.experts_TLK, self._model, num_tokens=num_tokens, may_miss=self._may_miss_routes
            )
            if self._imposes_routes and not self._api_at(server).KEEPS_ROUTES:
                picked = without_recomputed(server, picked, served.versions, num_prompt, may_miss=self._may_miss_routes)
            few = self._model.moe.num_experts <= BYTE_EXPERTS and picked.min() >= 0
            experts_TLK = torch.from_numpy(picked.astype(np.uint8 if few else np.int16, copy=False))
        tokens_T, is_stopped = served.tokens_T, served.finish == "stop"
        if sampling.stop_strings:
            # Servers without a tokenizer do not know stop strings: tokens sampled after a stop string are dropped.
            strings = StopStrings(sampling.stop_strings, self.decode)
            for end, token in enumerate(tokens_T, start=1):
                if strings.end(token):
                    tokens_T, is_stopped = tokens_T[:end], True
                    break
        end = len(tokens_T)
        return Completion(
            text=self.decode(tokens_T[:-1] if tokens_T[-1] in sampling.stop_tokens else tokens_T),
            tokens_T=tokens_T,
            logprobs_T=served.logprobs_T[:end],
            versions=tuple(
                VersionSpan(span.version, span.start, min(span.end, end))
                for span in served.versions
                if span.start < end
            ),
            finish="stop" if is_stopped else "length",
            experts_TLK=None if experts_TLK is None else experts_TLK[: num_prompt + end - 1],
        )

    def _lost_anywhere(self) -> dict[str, str]:
        """Collective over the world: return the servers that any rank has lost since the last update."""
        with self._state.lock:
            lost, self._state.lost = self._state.lost, {}
        return {url: reason for found in from_every_rank(lost) for url, reason in found.items()}

    def _push_to(self, urls: list[str]) -> WeightPush | AdapterPush:
        if self._push is None or self._push[0] != urls:
            apis = [self._api_at(url) for url in urls]
            of_policy = (apis, self._chunks, self._mesh, self._model, self._config, self._sampling)
            if self._adapters is None:
                push = WeightPush(*of_policy)
            else:
                if self._mesh.world.rank == 0 and self._served_adapters is None:
                    self._served_adapters = ServedAdapters(transport_folder(self._config))
                push = AdapterPush(*of_policy, lora=self._adapters, served=self._served_adapters)
            push.make_room = self._make_room
            self._push = urls, push
        return self._push[1]


def _group(prompt: Prompt, futures_G: "Sequence[Future[Completion]]") -> Group:
    try:
        return Group(prompt=prompt, completions=tuple(future.result() for future in futures_G))
    except CancelledError:
        raise EngineError("the engine was closed while completions were in progress") from None


def _no_server(lost: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{url}: {reason}" for url, reason in lost.items())
    return f"no server is left that has the present weights: {reasons or 'none has got any yet'}"


def served_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Return the engine that generates on servers. With rl.engine.count, rank 0 starts the servers. Raises ConfigError
    if they would share the GPUs of the ranks.
    """
    engine, folder = config.served, servers_folder(config.run_dir)
    assert engine is not None and not engine.share_gpus, "rl.engines.shared_gpus makes those"
    salt = on_rank_zero(lambda: secrets.token_hex(4))
    api_at = server_apis(engine, config.model, Owner(salt, str(folder.parent.resolve())))
    on_gpu = next(chunks[0].parameters()).is_cuda
    if engine.count and on_gpu and not engine.devices:
        raise ConfigError(
            f"rl.engine.count={engine.count} with an empty rl.engine.devices: the servers would take the GPUs that the "
            "ranks train on. Name others, as rl.engine.devices=[4,5], and let fewer ranks train; or start servers on "
            "another machine (mcore-rl serve) and name them in rl.engine.urls."
        )
    fleet = None
    if mesh.world.rank == 0:
        if engine.transport_dir is not None:
            Path(engine.transport_dir).mkdir(parents=True, exist_ok=True)
        start = (
            partial(start_server_of, engine, partial(server_command, config, folder, on_gpu=on_gpu), folder)
            if engine.count
            else None
        )
        fleet = ServerFleet(engine, api_at, folder, start)
    return ServedEngine.of_config(config, chunks, mesh, decode, api_at, fleet, salt=salt)
