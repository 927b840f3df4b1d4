"""Weights from the trainer to its servers, proved to have arrived: one push, after a change of the weights."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import ServedConfig
from mcore_rl.errors import EngineError
from mcore_rl.model.adapters import adapters_in, merge_loss
from mcore_rl.model.hf_stream import iter_hf_weights
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.probe import Probe, ProbeReference
from mcore_rl.rl.engines.probe_difference import ProbeDifference, ProbeLimit
from mcore_rl.rl.engines.server_api import ServerApi, ServerError
from mcore_rl.rl.engines.weight_transport import BroadcastTransport, FileTransport

SHARED_MEMORY = Path("/dev/shm")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of servers that round weights in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """Outcome of a push, the same on all ranks."""

    version: int
    living: tuple[str, ...]
    """Addresses of the servers that have the weights, which the probe has shown, and that answer requests."""
    failed: Mapping[str, str]
    """Reason by address of the others. Nobody knows their weights, whatever they say of themselves: such a server takes
    requests again only when a later push to it, which sends all weights, has succeeded."""
    differences: Mapping[str, ProbeDifference]
    """Difference that the probe has found on each server that it reached."""
    probe: float
    """Largest difference of a living server, in the statistic of `limit`; 0 without one."""
    limit: ProbeLimit
    num_unreached_experts: int
    """Experts whose weights the probe cannot see, as too few of its tokens reach them."""
    num_bytes: int
    """Bytes of all weights."""
    largest_bucket_bytes: int
    merge_loss: float | None
    """Part of low-rank adapters that rounding the merged weights loses; None: the policy has none."""
    seconds: Mapping[str, float]
    """Seconds by phase: trainer (its logprobs of the probe), pause, gather, load, finish, probe."""


class WeightPush:
    """Gives servers the weights that the modules have now. Made and called on all ranks of the world.

    The order of calls is that of vLLM's RL routes, and SGLang's of the same meaning. A server is paused first, as one
    that decodes during an update dies. Its requests go on afterwards; their keys and values are computed again, so that
    each span of a completion is of one version of the weights alone. Every server is probed at last. A server that
    fails anywhere is left alone from there on, and the others go on.
    """

    def __init__(
        self,
        servers: Sequence[ServerApi],
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        engine: ServedConfig,
    ) -> None:
        """Prepare pushes.

        Args:
            servers: All servers that get the weights; rank 0 of the world alone speaks to them.
            chunks: This rank's chunks of the policy.
            mesh: The mesh that they are cut by.
            model: The model's config.
            engine: The engine's config.
        """
        self._servers, self._chunks, self._mesh = list(servers), list(chunks), mesh
        self._model, self._engine = model, engine
        self._probe = Probe(chunks, mesh, model, engine.dtype)
        self._device = next(chunks[0].parameters()).device
        own, served = next(chunks[0].parameters()).dtype, DTYPES.get(engine.dtype, torch.float32)
        self._dtype = served if own == torch.float32 else own
        """Type in which servers have weights at best."""
        self._tolerance = None if engine.probe_tolerance == "auto" else engine.probe_tolerance

    def push(self, version: int) -> PushReport:
        """Collective over the world: send all weights, as they are now, to all servers, and probe these.

        Never raises for a server that fails; the report names it.
        """
        watch = _Stopwatch()
        ours = self._probe.reference(self._tolerance)
        has_adapters = any(True for _ in adapters_in(self._chunks))
        lost = merge_loss(self._chunks, self._dtype) if has_adapters else None
        watch.lap("trainer")
        sender = _Sender(self._servers) if self._mesh.world.rank == 0 else None
        num_bytes = largest = 0
        if sender is not None:
            sender.everywhere("pause", lambda server: server.pause())
            sender.everywhere("start of the update", lambda server: server.start_update())
        watch.lap("pause")
        transport: FileTransport | BroadcastTransport | None = None
        try:
            # All ranks take all buckets, whatever the servers do: the others would wait for this one.
            for bucket in iter_hf_weights(self._chunks, self._mesh, self._model):
                watch.lap("gather")
                num_bytes, largest = num_bytes + bucket.num_bytes, max(largest, bucket.num_bytes)
                if sender is not None and sender.living:
                    try:
                        transport = transport or self._transport(sender)
                        transport.send(bucket, partial(self._load, sender, bucket.name))
                    except EngineError as error:
                        sender.fail_all(str(error))
                watch.lap("load")
        finally:
            if transport is not None:
                transport.close()
        differences: dict[str, ProbeDifference] = {}
        if sender is not None:
            sender.everywhere("end of the update", lambda server: server.finish_update(version))
            sender.everywhere("reset of the caches", lambda server: server.reset_caches())
            sender.everywhere("resume", lambda server: server.resume())
            watch.lap("finish")
            sender.everywhere("probe", lambda server: self._compare(server, ours, differences))
            watch.lap("probe")
            sender.close()
        report = None
        if sender is not None:
            living = tuple(server.url for server in sender.living)
            report = PushReport(
                version=version,
                living=living,
                failed=sender.failed,
                differences=differences,
                probe=max((ours.limit.of(differences[url]) for url in living), default=0.0),
                limit=ours.limit,
                num_unreached_experts=self._probe.num_unreached,
                num_bytes=num_bytes,
                largest_bucket_bytes=largest,
                merge_loss=lost,
                seconds=watch.seconds,
            )
        box = [report]
        dist.broadcast_object_list(box, src=0, group=self._mesh.world.group, device=torch.device("cpu"))
        assert box[0] is not None
        return box[0]

    def _transport(self, sender: "_Sender") -> FileTransport | BroadcastTransport:
        """Return the transport to the servers that live now."""
        engine = self._engine
        if not engine.broadcasts:
            folder = Path(engine.transport_dir) if engine.transport_dir else SHARED_MEMORY
            return FileTransport(folder)
        workers = sender.everywhere("number of workers", lambda server: server.world_size())
        if not sender.living:
            raise EngineError("no server tells the number of its workers")
        host = _address_towards(sender.living[0].url)
        return BroadcastTransport(host, workers, self._device, engine.update_timeout_s)

    @staticmethod
    def _load(sender: "_Sender", bucket: str, update_of: Callable[[str], Mapping[str, Any]]) -> None:
        """Let each living server load a bucket, which `update_of` describes to the server with an address."""
        sender.everywhere(f"update of {bucket}", lambda server: server.load(update_of(server.url)))

    def _compare(
        self, server: ServerApi, ours: ProbeReference, differences: dict[str, ProbeDifference]
    ) -> None:
        """Probe one server; ServerError when it does not have the trainer's weights."""
        theirs = [server.prompt_logprobs(tokens) for tokens in self._probe.sequences]
        difference = differences[server.url] = ours.difference(theirs)
        if excess := ours.limit.excess(difference):
            raise ServerError(
                f"{server.url} does not have the trainer's weights although its update succeeded: {excess}"
            )


class _Sender:
    """The servers that have not failed in a push yet, asked all at the same time."""

    def __init__(self, servers: Sequence[ServerApi]) -> None:
        self.living = list(servers)
        self.failed: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(max(1, len(servers)), "weight push")

    def everywhere(self, phase: str, ask: Callable[[ServerApi], Any]) -> dict[str, Any]:
        """Ask every living server, and return the answers by address of those that live after it."""
        asked = [(server, self._pool.submit(ask, server)) for server in self.living]
        answers = {}
        for server, answer in asked:
            try:
                answers[server.url] = answer.result()
            except ServerError as error:
                self.failed[server.url] = f"{phase}: {error}"
        self.living = [server for server in self.living if server.url not in self.failed]
        return answers

    def fail_all(self, reason: str) -> None:
        """Give up on all servers."""
        self.failed |= {server.url: reason for server in self.living}
        self.living = []

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Stopwatch:
    """Seconds of the phases, each of which may come several times."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._since_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the seconds since the last call as those of `phase`."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._since_s  # type: ignore[assignment]  # typed for whole counts
        self._since_s = now_s


def _address_towards(url: str) -> str:
    """Return this node's address on the way to a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])
