"""Servers on the GPUs of the ranks (rl.engine.share_gpus). Servers and trainer take turns with the memory:

    generate     the servers have it, beside the policy's weights
    drain        all groups are back; requests that are still open are aborted
    sleep        the servers release weights, keys and values; free memory proves it
    train        passes, updates and checkpoints have the memory
    reference    the trainer's logprobs of the probe
    leave        gradients and optimizer state are in main memory, the allocator's rest is freed; free memory proves it
    wake weights, push, wake keys and values, probe: then generate

The order is that of one thread on all ranks: a server is awake only between `wake` and `rest`.
"""

import platform as machine
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.megatron.agree import from_every_rank, on_every_rank, on_rank_zero, world_max
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.metrics import Metric
from mcore_rl.planning.memory import GIB, SERVER_REST_BYTES, SharedServer, memory_by_stage, shared_server
from mcore_rl.planning.training import training_of
from mcore_rl.rl.engines.base import Decode
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.engines.server_api import Owner, ServerApi, ServerError, server_apis
from mcore_rl.rl.engines.server_process import ServerFleet, ServerProcess, server_command, servers_folder, write_status

EVERYWHERE = "0.0.0.0"
FREED, FREED_S = 0.9, 10.0
"""Fraction of a server's memory that a sleep must free, and the seconds within which it must: some servers answer
before they have freed it."""
HEADROOM_BYTES = GIB
DRAIN_S, LOOK_S = 30.0, 0.05


class SharedServers:
    """The servers on the GPUs of this run's ranks. The first of each `tensor_parallel` neighbouring ranks of a machine
    starts one and ends it; rank 0 makes all calls of sleep and updates. Methods are collective over the world.
    """

    def __init__(self, config: RlRunConfig, platform: Platform) -> None:
        """Prepare; nothing is started yet. Raises ConfigError if a server's ranks are not all on one machine."""
        assert config.served is not None
        names = from_every_rank(machine.node())
        size, local = config.served.tensor_parallel, names.count(machine.node())
        if any(names.count(name) % size for name in names):
            raise ConfigError(
                f"rl.engine.tensor_parallel={size} with rl.engine.share_gpus=true: a server takes the GPUs of {size} "
                f"neighbouring ranks, and a machine has {local} ranks. Set it to a divisor."
            )
        self.folder, self._is_one_machine = servers_folder(config.run_dir), local == platform.world_size
        engine = config.served
        if not self._is_one_machine and engine.transport_dir is None and engine.way == "files":
            engine = engine.model_copy(update={"transport_dir": str(self.folder / "weights")})
        self.engine, self._platform = engine, platform
        self._config = config.model_copy(update={"rl": config.rl.model_copy(update={"engine": engine})})
        self.salt = on_rank_zero(lambda: secrets.token_hex(4))
        self._make_api = server_apis(engine, config.model, Owner(self.salt, str(self.folder.parent.resolve())))
        self.apis: dict[str, ServerApi] = {}
        """APIs by address, the only ones: each knows what it has put to sleep."""
        self.refuse_stop: Callable[[], None] = lambda: None
        """Function that raises StoppedError if the run is to stop."""
        self.lines: list[str] = []
        self._urls_of_ranks: list[str | None] = [None] * platform.world_size
        """Address of the server that each rank has started; None if it has none that answers."""
        self._fleet: ServerFleet | None = None
        self._training = training_of(config, platform.world_size)
        planned = shared_server(self._training)
        assert planned is not None
        self.planned: SharedServer = planned
        self._cache_bytes = 0

    def api_at(self, url: str) -> ServerApi:
        """Return the API of a server."""
        return self.apis.setdefault(url, self._make_api(url))

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers that answer, the same on all ranks."""
        return [url for url in self._urls_of_ranks if url is not None]

    def start(self, *, has_models: bool = False) -> None:
        """Start all servers, wait until they answer, and put them to sleep. Unless the trainer `has_models`, room is
        left for those that are on the GPUs while the servers generate. Raises ConfigError if there is none for keys and
        values, and EngineError if a server does not start.
        """
        if (free := _free_bytes(self._platform.device)) is not None:
            free, planned = -world_max(-free), self.planned
            stages = memory_by_stage(self._training)
            resident_bytes = 0 if has_models else max(stage.routes + stage.rollout_models for stage in stages)
            self._cache_bytes = free - resident_bytes - planned.generate - HEADROOM_BYTES
            if self._cache_bytes < planned.sample:
                raise ConfigError(
                    f"rl.engine.share_gpus=true: of {free / GIB:.1f} GiB that are free on a GPU, the policy keeps "
                    f"{resident_bytes / GIB:.1f} and a server takes {planned.generate / GIB:.1f}, which leaves "
                    f"{self._cache_bytes / GIB:.1f} for keys and values, and those of the longest sample take "
                    f"{planned.sample / GIB:.1f}. Raise rl.engine.tensor_parallel or mesh.ep."
                )
        if self._platform.local_rank % self.engine.tensor_parallel == 0:
            one = self.engine.model_copy(update={"count": 1, "min_servers": 1})
            self._fleet = ServerFleet(one, self.api_at, self.folder, self._process)
            self._fleet.refuse_stop = lambda: self.refuse_stop()
        if self._platform.rank == 0 and self.engine.transport_dir is not None:
            Path(self.engine.transport_dir).mkdir(parents=True, exist_ok=True)
        self.ready({})

    def ready(self, lost: Mapping[str, str]) -> list[str]:
        """Start servers anew that were `lost` or have ended. Returns the addresses of all, which sleep. Raises
        EngineError if one does not start the first time; later it is left out.
        """
        fleet, rank, is_first = self._fleet, self._platform.rank, not self.urls

        def ready() -> str | None:
            if fleet is None:
                return None
            fleet.start_anew({url: reason for url, reason in lost.items() if url == self._urls_of_ranks[rank]})
            try:
                return fleet.ready()[0]
            except EngineError as error:
                self.refuse_stop()
                if is_first:
                    raise
                fleet.close()
                fleet.lines.append(f"a server is left out: {error}")
                return None

        found = on_every_rank(ready)
        of_ranks = from_every_rank((found, [] if fleet is None else fleet.lines))
        self._urls_of_ranks = [url for url, _ in of_ranks]
        self.lines += [line for _, lines in of_ranks for line in lines]
        if fleet is not None:
            fleet.lines.clear()
        self.sleep(on_rank_zero(lambda: {url: "" for url in self.urls if not self.api_at(url).is_asleep}))
        return self.urls

    def sleep(self, awake: Mapping[str, str]) -> None:
        """Put the servers `awake` to sleep, or end them where the value is a reason why they are lost, and wait until
        the memory of this rank's GPU is free. Raises EngineError if it is not.
        """
        platform, before = self._platform, _free_bytes(self._platform.device)
        own = self._urls_of_ranks[platform.rank - platform.local_rank % self.engine.tensor_parallel]

        def sleep() -> dict[str, str]:
            def one(url: str) -> str:
                try:
                    self.api_at(url).sleep(keeps_weights=self.planned.keeps_weights)
                except ServerError as error:
                    return str(error)
                return ""

            sound = [url for url, reason in awake.items() if not reason]
            with ThreadPoolExecutor(max(1, len(sound))) as pool:
                reasons = dict(zip(sound, pool.map(one, sound), strict=True))
            return {url: reason for url, reason in {**awake, **reasons}.items() if reason}

        lost = on_rank_zero(sleep)
        self.lines += [f"{url} ends, and is started again before the next rollout: {why}" for url, why in lost.items()]

        def proved() -> None:
            if self._fleet is not None and self._urls_of_ranks[platform.rank] in lost:
                self._fleet.close()
            deadline = time.monotonic() + FREED_S
            wanted = FREED * (self.planned.weights + self._cache_bytes)
            # One that has ended may have freed its memory before.
            is_read = before is not None and own in awake and own not in lost
            while is_read and (freed := (_free_bytes(platform.device) or 0) - (before or 0)) < wanted:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"a server that sleeps freed {freed / GIB:.1f} GiB of its GPU within {FREED_S:g} s, and it has "
                        f"{wanted / FREED / GIB:.1f} of weights, keys and values: it was started without "
                        "--enable-sleep-mode (vLLM) or --enable-memory-saver (SGLang), or is another version. See its "
                        f"log in {self.folder}."
                    )
                time.sleep(LOOK_S)

        on_every_rank(proved)

    def make_room(self) -> None:
        """Free what the trainer's allocator keeps, before a server gets memory. Raises EngineError if the GPU of a rank
        has too little for the server's weights with a push or, after it, with keys and values.
        """
        gathered, planned = max(stage.pushed for stage in memory_by_stage(self._training)), self.planned
        pushed = gathered + planned.push - SERVER_REST_BYTES + HEADROOM_BYTES
        wanted = max(pushed, planned.weights + self._cache_bytes)

        def room() -> None:
            if self._platform.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            if (free := _free_bytes(self._platform.device)) is not None and free < wanted:
                raise EngineError(
                    f"{free / GIB:.1f} GiB of the GPU of rank {self._platform.rank} are free, and a server takes "
                    f"{pushed / GIB:.1f} in a push and then {planned.weights / GIB:.1f} of weights and "
                    f"{self._cache_bytes / GIB:.1f} of keys and values: the trainer's memory is still there, or a "
                    f"sleeping server keeps more than {SERVER_REST_BYTES / GIB:g}. Set the stores of all models to "
                    '"host", or raise rl.engine.tensor_parallel.'
                )

        on_every_rank(room)

    def close(self) -> None:
        """End this rank's server."""
        if self._fleet is not None:
            self._fleet.close()

    def _process(self, _: int) -> ServerProcess:
        first, on_gpu = self._platform.local_rank, self._platform.is_cuda
        name = f"server_{self._platform.rank // self.engine.tensor_parallel}"
        shared: tuple[str, ...] = ()
        if on_gpu:
            # Arguments that let a server sleep, and give it the memory that the trainer leaves.
            total = self._platform.device_bytes
            assert total is not None
            share = f"{(self.planned.generate + self._cache_bytes) / total:.3f}"
            if self.engine.kind == "vllm":
                cache_bytes = ("--kv-cache-memory-bytes", str(self._cache_bytes))
                shared = ("--enable-sleep-mode", *cache_bytes, "--gpu-memory-utilization", share)
            else:
                keeps = ("--enable-weights-cpu-backup",) if self.planned.keeps_weights else ()
                shared = ("--enable-memory-saver", *keeps, "--mem-fraction-static", share)
        command = partial(
            server_command,
            self._config,
            self.folder / name,
            host="127.0.0.1" if self._is_one_machine else EVERYWHERE,
            on_gpu=on_gpu,
            shared=shared,
        )
        return ServerProcess(
            command,
            self.folder / f"{name}.log",
            devices=range(first, first + self.engine.tensor_parallel) if on_gpu else (),
            host="127.0.0.1" if self._is_one_machine else machine.node(),
        )


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU; None on a CPU, where they prove nothing."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


class SharedEngine(ServedEngine):
    """Generates on servers that sleep while the policy trains: `wake` gives memory and weights, `rest` takes memory."""

    servers: SharedServers
    _due = 0
    """Version of the weights with which the servers generate next."""
    _is_awake = False

    def update_weights(self, policy_version: int) -> None:
        """Let the servers get the current weights before the next rollout, not while the trainer needs the memory."""
        self._due = policy_version

    def wake(self) -> None:
        """Collective over the world: give the servers memory and the current weights, unless they are awake with them.
        Raises EngineError on all ranks if the memory is not there, or too few servers have the weights.
        """
        if self._is_awake and self._due == self.policy_version:
            return
        self.rest()
        super().update_weights(self._due)
        self._is_awake = True

    def rest(self) -> None:
        """Collective over the world: put the servers to sleep, unless they sleep already."""
        if not self._is_awake:
            return
        start_s = time.perf_counter()
        on_every_rank(self._drained)
        lost = self._lost_anywhere()
        with self._state.lock:
            self._state.living = ()
        self.servers.sleep({url: lost.get(url, "") for url in self.servers.urls})
        self._is_awake = False
        self._metrics.append(Metric("servers/sleep_s", time.perf_counter() - start_s))

    def take_lines(self) -> list[str]:
        """Return log lines on the servers' events since the last call, on rank 0."""
        self._lines += self.servers.lines
        self.servers.lines.clear()
        return super().take_lines()

    def close(self) -> None:
        """End the requests in progress, which then raise EngineError, and this rank's server."""
        super().close()
        self.servers.close()

    def _ready(self, lost: Mapping[str, str]) -> list[str]:
        return self.servers.ready(lost)

    def _make_room(self) -> None:
        self.servers.make_room()

    def _after_push(self, living: Sequence[str], failed: Mapping[str, str], version: int) -> None:
        # A server that failed would keep memory while the policy trains, and is ended by the next sleep.
        with self._state.lock:
            self._state.lost |= failed
        if self._mesh.world.rank == 0:
            write_status(self.servers.folder, self.servers.urls, living, version)

    def _drained(self) -> None:
        """Abort this rank's requests that are still open, and wait until they have ended."""
        state = self._state
        with state.lock:
            still_open = dict(state.open_requests)
        for name, url in still_open.items():
            with suppress(ServerError):
                self._api_at(url).abort(name)
        with state.lock:
            is_idle = state.lock.wait_for(lambda: not state.open_requests, DRAIN_S)
        if not is_idle:
            for url in set(still_open.values()):
                self._api_at(url).cut()


def shared_engine(
    servers: SharedServers, config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode
) -> SharedEngine:
    """Collective over the world: return the engine on servers that have been started."""
    rl = config.rl.model_copy(update={"engine": servers.engine})
    own = config.model_copy(update={"rl": rl})
    engine = SharedEngine.of_config(own, chunks, mesh, decode, servers.api_at, salt=servers.salt)
    engine.servers = servers
    engine._apis = servers.apis
    servers.refuse_stop = engine._refuse_stop
    return engine
