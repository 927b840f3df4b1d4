"""The engine whose completions inference servers make: which server is asked, what is tried again, and new weights."""

import itertools
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Condition

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import ServedConfig
from mcore_rl.errors import EngineError
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import from_first_of_model, on_every_rank, on_rank_zero
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.routers import routed_layers
from mcore_rl.rl.engines.base import Capabilities, Sampling, StopStrings, check_request
from mcore_rl.rl.engines.served_routes import pick_layers, without_recomputed
from mcore_rl.rl.engines.server_api import ServedCompletion, ServerApi, ServerError
from mcore_rl.rl.engines.server_fleet import ServerFleet
from mcore_rl.rl.engines.weight_push import WeightPush
from mcore_rl.rl.types import BYTE_EXPERTS, Completion, Group, Prompt, VersionSpan

MOST_MERGE_LOSS = 0.1
"""Part of low-rank adapters that rounding may lose of merged weights before a warning."""
SHARE = 1.25
"""Requests in progress on a server, as a multiple of the mean, beyond which a prompt goes to the one with fewest."""


@dataclass(slots=True)
class _State:
    """State that the threads of an engine share, under one lock."""

    lock: Condition = field(default_factory=Condition)
    living: tuple[str, ...] = ()
    """Servers with the present weights."""
    lost: dict[str, str] = field(default_factory=dict)
    """Servers that failed since the last update, with the reason."""
    running: Counter[str] = field(default_factory=Counter)
    """Requests in progress, by server."""
    open_requests: dict[str, str] = field(default_factory=dict)
    """Names of requests in progress, with their servers."""
    num_retries: int = 0
    is_updating: bool = False
    is_closed: bool = False


class ServedEngine:
    """Completions by servers. One rank of each replica of the trained model, its first, asks for all of the replica's;
    all ranks take part in `generate` and `update_weights`.
    """

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
        capabilities: Capabilities,
        refusal: Callable[[Sampling], str | None],
        imposes_routes: bool = True,
        may_miss_routes: bool = False,
    ) -> None:
        """Make the engine; `update_weights` has to come before the first request.

        Args:
            api_at: Returns the API of the server at an address.
            fleet: The servers, on rank 0 of the world; None on the others.
            chunks: The policy's modules, whose weights the servers get.
            mesh: Groups of ranks.
            model: The model.
            decode: Turns token ids into text.
            config: The engine's section of the config.
            capabilities: Abilities of the servers.
            refusal: Returns why the servers' logprobs would be wrong under a sampling; None: they are right.
            imposes_routes: Whether routes will be imposed (R3), not only compared with the trainer's.
            may_miss_routes: Whether the servers may leave out the routes of some tokens of a completion.
        """
        self.decode, self.policy_version, self.capabilities = decode, 0, capabilities
        self._api_at, self._fleet, self._chunks = api_at, fleet, list(chunks)
        self._mesh, self._model, self._config, self._refusal = mesh, model, config, refusal
        self._imposes_routes, self._may_miss_routes = imposes_routes, may_miss_routes
        self._layers = list(routed_layers(chunks))
        # Another run, and this one after a resume, may have other weights of a version: a tier of a server's cache that
        # a reset does not reach has their keys, values and routes.
        self._salt = ""
        self._state = _State()
        self._pool = ThreadPoolExecutor(config.requests, "server_request") if self.asks else None
        self._names = (f"{mesh.world.rank}-{number}" for number in itertools.count())
        self._push: tuple[list[str], WeightPush] | None = None
        self._message: Callable[[str], None] | None = None
        """Called at once with a line for the log, by any thread, when a server is lost; None: nobody listens."""
        self._metrics: list[Metric] = []
        self._lines: list[str] = []
        self._num_unreached = 0

    @property
    def asks(self) -> bool:
        """Whether this rank asks for the groups of its replica: the first one of the model."""
        return self._mesh.tp.rank == 0 and self._mesh.pp.rank == 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Collective over the world: return a group for each prompt of this replica, with a completion for each seed.

        Completions carry the routes of this pipeline stage's layers, which are the ones that this rank trains.

        Raises:
            EngineError: on all ranks alike, where a request of any replica cannot be served.
        """

        def ask() -> list[Group]:
            futures_PG = [
                self._submit(prompt, sampling, seeds_G)
                for prompt, seeds_G in zip(prompts, seeds_PG, strict=True)
            ]
            return [_group(*pair) for pair in zip(prompts, futures_PG, strict=True)]

        def checked() -> list[Group] | None:
            self._check(prompts, sampling, seeds_PG)
            return ask() if self.asks else None

        groups = from_first_of_model(on_every_rank(checked), self._mesh)
        return [self.of_this_stage(group) for group in groups or ()]

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the group of prompt `index`, on the rank that asks; its completions carry the routes of all layers.

        Not collective; threads may call it at the same time, also while `update_weights` or `generate` runs.

        Raises:
            EngineError: no server made a completion, or the engine is closed.
        """
        self._check([prompt], sampling, [seeds_G])
        return _group(prompt, self._submit(prompt, sampling, seeds_G))

    def of_this_stage(self, group: Group) -> Group:
        """Return a group whose completions carry the routes of this pipeline stage's layers alone."""
        moe_layers = [layer for layer, has_router in enumerate(self._model.moe_layers) if has_router]
        if self._layers == moe_layers or all(one.experts_TLK is None for one in group.completions):
            return group
        columns = torch.tensor([moe_layers.index(layer) for layer in self._layers])
        return replace(
            group,
            completions=tuple(
                one
                if one.experts_TLK is None
                else replace(one, experts_TLK=one.experts_TLK.index_select(1, columns))
                for one in group.completions
            ),
        )

    def update_weights(self, policy_version: int) -> None:
        """Collective over the world: give all servers the weights as they are now, and prove it by a probe.

        Completions in progress go on under the new weights. Servers that fail are left out, and started anew where the
        run started them; one that answers again gets the weights with the next update.

        Raises:
            EngineError: on all ranks, where fewer than rl.engine.min_servers have the weights.
        """
        state, start_s = self._state, time.perf_counter()
        with state.lock:
            state.is_updating = True
        self._salt = self._salt or on_rank_zero(lambda: secrets.token_hex(4))
        lost = self._lost_anywhere()
        fleet = self._fleet

        def ready() -> list[str]:
            assert fleet is not None
            fleet.start_anew(lost)
            return fleet.ready()

        report = self._push_to(on_rank_zero(ready)).push(policy_version)
        if fleet is not None:
            fleet.start_anew(dict(report.failed))
            fleet.write_status(report.living, policy_version)
            self._lines += fleet.lines
            fleet.lines.clear()
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
            self.policy_version = policy_version
            num_retries, state.num_retries = state.num_retries, 0
            state.lock.notify_all()
        self._metrics += [
            Metric("servers/living", len(report.living)),
            Metric("servers/retried_requests", num_retries),
            Metric("servers/update_s", time.perf_counter() - start_s),
            Metric("servers/update_bytes", report.num_bytes),
            Metric("servers/probe_nats", report.probe),
        ]
        if report.merge_loss is not None:
            self._metrics.append(Metric("lora/merge_loss", report.merge_loss))

    def describe(self) -> list[str]:
        """Return no line: the servers that answer are among those of `take_lines`."""
        return []

    def listen(self, message: Callable[[str], None], /) -> None:
        """Call `message` with a line for the log when a server is lost."""
        self._message = message

    def take_metrics(self) -> list[Metric]:
        """Return the metrics of updates since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def take_lines(self) -> list[str]:
        """Return what happened to servers since the last call, on rank 0."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """End requests in progress, which then raise EngineError, and the servers that the run started."""
        state = self._state
        with state.lock:
            state.is_closed = True
            open_requests = dict(state.open_requests)
            state.lock.notify_all()
        if self._fleet is not None:
            self._fleet.close()
        for name, url in open_requests.items():
            with suppress(ServerError):
                self._api_at(url).abort(name)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> None:
        """Raise EngineError for what a server would answer wrongly, or end by."""
        check_request(prompts, sampling, seeds_PG, self.capabilities)
        if reason := self._refusal(sampling):
            raise EngineError(reason)
        for prompt in prompts:
            beyond = [token for token in prompt.tokens_T if not 0 <= token < self._model.vocab_size]
            if beyond:
                raise EngineError(
                    f"prompt {prompt.problem.problem_id} has the id {beyond[0]}, and the model has the ids 0 to "
                    f"{self._model.vocab_size - 1}: a server would end by it. Use the model's tokenizer."
                )

    def _submit(
        self, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]
    ) -> "list[Future[Completion]]":
        """Ask for the completions of one prompt, all of the same server, which then computes the prompt once."""
        assert self._pool is not None, "only the first rank of a model asks"
        try:
            server = self._server_for(prompt, len(seeds_G))
            return [self._pool.submit(self._complete, prompt, sampling, seed, server) for seed in seeds_G]
        except RuntimeError:
            raise EngineError("the engine is closed, so that no completion can be asked for") from None

    def _server_for(self, prompt: Prompt, num_requests: int) -> str:
        """Return the server of a prompt: the same for the same problem, whose beginning it may know, unless that one
        has much more to do than the others.
        """
        state = self._state
        with state.lock:
            if not state.living:
                raise EngineError(_no_server(state.lost))
            preferred = state.living[zlib.crc32(prompt.problem.problem_id.encode()) % len(state.living)]
            total = sum(state.running[url] for url in state.living) + num_requests
            if state.running[preferred] + num_requests > SHARE * total / len(state.living) + num_requests / 2:
                preferred = min(state.living, key=lambda url: state.running[url])
            state.running[preferred] += num_requests
            return preferred

    def _complete(self, prompt: Prompt, sampling: Sampling, seed: int, server: str) -> Completion:
        """Return one completion, of `server` or, where that fails, of another one with the same seed."""
        state, reasons = self._state, dict[str, str]()
        for _ in range(self._config.attempts):
            name = next(self._names)
            try:
                with self._in_progress(name, server):
                    version = self.policy_version
                    served = self._api_at(server).generate(
                        prompt.tokens_T, sampling, seed, salt=f"{self._salt}v{version}", request_id=name
                    )
                completion = self._completion(prompt, sampling, served, server)
            except ServerError as error:
                if error.is_refusal:
                    raise EngineError(f"{error}. It was refused, so that it is not tried again.") from None
                reasons[server] = str(error)
                is_living = self._api_at(server).is_healthy()
                if is_living and error.status is None:
                    with suppress(ServerError):
                        self._api_at(server).abort(name)  # it may compute on for nobody
            else:
                # What a server answers while weights are on their way counts once the probe has shown them.
                is_living = self._is_living_after_update(server)
                if is_living and completion.policy_version >= version:
                    return completion
                # A server that was started anew at the same address has the weights that it starts with.
                is_living = False
                reasons[server] = f"its weights are not those of version {version}"
            with state.lock:
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
            if state.is_closed:
                state.running[server] -= 1
                raise EngineError("the engine is closed")
            state.open_requests[name] = server
        try:
            yield
        finally:
            with state.lock:
                del state.open_requests[name]
                state.running[server] -= 1

    def _is_living_after_update(self, server: str) -> bool:
        state = self._state
        with state.lock:
            state.lock.wait_for(lambda: not state.is_updating or state.is_closed)
            return server in state.living

    def _completion(
        self, prompt: Prompt, sampling: Sampling, served: ServedCompletion, server: str
    ) -> Completion:
        """Return the record of a server's answer, cut where one of our stop rules ends it."""
        num_prompt = len(prompt.tokens_T)
        experts_TLK = None
        if sampling.with_routes:
            num_tokens = num_prompt + len(served.tokens_T) - 1
            picked = pick_layers(
                server,
                served.experts_TLK,
                self._model,
                num_tokens=num_tokens,
                may_miss=self._may_miss_routes,
            )
            if self._imposes_routes:
                picked = without_recomputed(
                    server, picked, served.versions, num_prompt, may_miss=self._may_miss_routes
                )
            few = self._model.moe.num_experts <= BYTE_EXPERTS and picked.min() >= 0
            experts_TLK = torch.from_numpy(picked.astype(np.uint8 if few else np.int16))
        tokens_T, is_stopped = served.tokens_T, served.finish == "stop"
        if sampling.stop_strings:
            # Servers without a tokenizer know no strings: what they sampled after one is thrown away.
            strings = StopStrings(sampling.stop_strings, self.decode)
            for end in range(1, len(tokens_T) + 1):
                if strings.end(tokens_T[:end]):
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
        of_ranks: list[dict[str, str]] = [{} for _ in range(self._mesh.world.size)]
        dist.all_gather_object(of_ranks, lost)
        return {url: reason for found in of_ranks for url, reason in found.items()}

    def _push_to(self, urls: list[str]) -> WeightPush:
        """Return the push to these servers; its probe is kept while they are the same."""
        if self._push is None or self._push[0] != urls:
            apis = [self._api_at(url) for url in urls]
            self._push = urls, WeightPush(apis, self._chunks, self._mesh, self._model, self._config)
        return self._push[1]


def _group(prompt: Prompt, futures_G: "Sequence[Future[Completion]]") -> Group:
    """Wait for the completions of a prompt, and return them in order."""
    try:
        return Group(prompt=prompt, completions=tuple(future.result() for future in futures_G))
    except CancelledError:
        raise EngineError("the engine was closed while completions were in progress") from None


def _no_server(lost: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{url}: {reason}" for url, reason in lost.items())
    return f"no server is left that has the present weights: {reasons or 'none has got any yet'}"
