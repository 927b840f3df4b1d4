"""Push of weights or low-rank adapters to servers, verified by the probe; they receive by `mcore_rl/vllm_worker.py`."""

import itertools
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import adapters_in, adapters_off, merge_loss
from mcore_rl.model.build import gathered, local_shards
from mcore_rl.model.hf_stream import Bucket, WeightStream
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.probe import (
    DTYPES,
    PACKED,
    PROMPT_TOKENS,
    SEQUENCE_TOKENS,
    Probe,
    ProbeDifference,
    ProbeLimit,
    ProbeReference,
    difference_of,
)
from mcore_rl.rl.engines.server_api import ServedCompletion, ServerApi, ServerError, logprobs_remedy
from mcore_rl.storage.checksums import crc32_of

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """Outcome of a push, the same on all ranks."""

    version: int
    living: tuple[str, ...]
    """Addresses of the servers that answer requests and have the weights, as verified by the probe."""
    failed: Mapping[str, str]
    """Failed servers: reason by address. Their weights are unknown, whatever they report: such a server gets requests
    again only after a later push, which sends all weights, has succeeded."""
    differences: Mapping[str, ProbeDifference]
    """Difference that the probe measured, for each server that it reached."""
    probe: float
    """Largest difference of a living server, in the statistic of `limit`; 0 if no server is living."""
    limit: ProbeLimit
    num_unreached_experts: int
    """Number of experts that too few tokens of the probe reach, so that it cannot verify their weights."""
    num_bytes: int
    """Size of all weights in bytes."""
    largest_bucket_bytes: int
    merge_loss: float | None = None
    """Fraction of the low-rank adapters that is lost to rounding of the merged weights; None if nothing was merged."""
    adapter: str | None = None
    """Name of the adapters on the servers; None if the servers have whole weights."""
    seconds: Mapping[str, float]
    """Seconds by phase: trainer (the trainer's logprobs of the probe), pause, gather, load, finish, probe."""


class WeightPush:
    """Sends the modules' current weights to servers. Created and called on all ranks of the world. A server is paused
    first, because one that decodes during an update crashes. Its requests then continue with keys and values
    recomputed, so that each span of a completion depends on one version. A server that fails in a phase is left out of
    later phases.
    """

    def __init__(
        self,
        servers: Sequence[ServerApi],
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        engine: ServedConfig,
        sampling: Sampling,
    ) -> None:
        """Take the servers, to which only rank 0 speaks, this rank's chunks, and the sampling of the rollouts."""
        self._servers, self._chunks, self._mesh = list(servers), list(chunks), mesh
        self._model, self._engine = model, engine
        self._sampling = replace(sampling, max_new_tokens=SEQUENCE_TOKENS - PROMPT_TOKENS)
        self._probe = Probe(chunks, mesh, model, engine.dtype)
        self._device = next(chunks[0].parameters()).device
        own, served = next(chunks[0].parameters()).dtype, DTYPES.get(engine.dtype, torch.float32)
        self._dtype = served if own == torch.float32 else own
        """Most precise type in which servers have the weights."""
        self._weights: WeightStream | None = None
        """The weights in buckets, planned before the first push for all pushes."""
        self._tolerance = None if engine.probe_tolerance == "auto" else engine.probe_tolerance
        self.make_room: Callable[[], None] = lambda: None
        """Called on all ranks between the trainer's pass over the probe and the first call of a server."""

    def push(self, version: int) -> PushReport:
        """Collective over the world: send all weights to all servers and probe them; the report lists failed ones."""
        watch = Stopwatch()
        self._weights = self._weights or WeightStream(self._chunks, self._mesh, self._model)
        ours = self._probe.reference(self._tolerance)
        has_adapters = any(True for _ in adapters_in(self._chunks))
        lost = merge_loss(self._chunks, self._dtype) if has_adapters else None
        self.make_room()
        watch.lap("trainer")
        sender = Sender(self._servers) if self._mesh.world.rank == 0 else None
        num_bytes = largest = 0
        if sender is not None:
            sender.everywhere("pause", lambda server: server.pause())
            sender.everywhere("start of the update", lambda server: server.start_update())
        watch.lap("pause")
        transport: FileTransport | BroadcastTransport | None = None
        try:
            # Every rank iterates over all buckets, even if servers fail: all other ranks would otherwise hang.
            for bucket in self._weights:
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
            sender.undo()
            watch.lap("finish")
            sender.everywhere("probe", lambda server: self._compare(server, ours, differences))
        sizes = {"num_bytes": num_bytes, "largest_bucket_bytes": largest}
        return self._report(sender, ours, differences, watch, version=version, merge_loss=lost, **sizes)

    def _report(
        self,
        sender: "Sender | None",
        ours: ProbeReference,
        differences: Mapping[str, ProbeDifference],
        watch: "Stopwatch",
        **fields: Any,
    ) -> PushReport:
        """Collective over the world: return the report, with rank 0's `fields`, after a check that the logprobs of what
        servers sample are those at the sampling temperature, before the cut, as training needs.
        """
        ask, cut = partial(self._complete, adapter=fields.get("adapter")), self._sampling.cut
        served = on_rank_zero(lambda: sender.everywhere("completions", ask) if sender else {})
        texts = [(index % PACKED, one.tokens_T) for index, one in enumerate(chain(*served.values()))]
        sequences = [(*self._probe.sequences[index][:PROMPT_TOKENS], *tokens_T) for index, tokens_T in texts]
        trained_NC = self._probe.logprobs(sequences, self._sampling)[:, PROMPT_TOKENS - 1 :]

        def report() -> PushReport:
            assert sender is not None
            # A temperature below 1 magnifies what rounding does to logits.
            limit = replace(ours.limit, limit=ours.limit.limit / min(1.0, cut.temperature))
            for (url, ones), trained_PC in zip(served.items(), trained_NC.split(PACKED), strict=False):
                if excess := limit.excess(difference_of(trained_PC, [one.logprobs_T for one in ones])):
                    sender.failed[url] = (
                        f"{url} has the trainer's weights, but its logprobs are not those at the sampling temperature, "
                        f"before top_k, top_p and min_p ({cut}), of the tokenizer's ids: {excess}. "
                        + logprobs_remedy(self._engine.kind, self._sampling, self._model.vocab_size)
                    )
            sender.close()
            watch.lap("probe")
            living = tuple(server.url for server in sender.living if server.url not in sender.failed)
            return PushReport(
                living=living,
                failed=sender.failed,
                differences=differences,
                probe=max((ours.limit.of(differences[url]) for url in living), default=0.0),
                limit=ours.limit,
                num_unreached_experts=self._probe.num_unreached,
                seconds=watch.seconds,
                **fields,
            )

        return on_rank_zero(report)

    def _complete(self, server: ServerApi, adapter: str | None) -> list[ServedCompletion]:
        """Return a server's completions of PACKED prompts of the probe to SEQUENCE_TOKENS tokens, as in rollouts."""
        sampling, salt = self._sampling, secrets.token_hex(8)

        def complete(index: int) -> ServedCompletion:
            prompt_T, name = self._probe.sequences[index][:PROMPT_TOKENS], f"probe-{salt}-{index}"
            return server.generate(prompt_T, sampling, index, salt=salt, request_id=name, adapter=adapter)

        with ThreadPoolExecutor(PACKED) as pool:
            return list(pool.map(complete, range(PACKED)))

    def _transport(self, sender: "Sender") -> "FileTransport | BroadcastTransport":
        engine = self._engine
        if not engine.broadcasts:
            return FileTransport(transport_folder(engine))
        workers = sender.everywhere("number of workers", lambda server: server.world_size())
        if not sender.living:
            raise EngineError("no server tells the number of its workers")
        host = _address_towards(sender.living[0].url)
        return BroadcastTransport(host, workers, self._device, engine.update_timeout_s)

    @staticmethod
    def _load(sender: "Sender", bucket: str, update_of: Callable[[str], Mapping[str, Any]]) -> None:
        sender.everywhere(f"update of {bucket}", lambda server: server.load(update_of(server.url)))

    def _compare(self, server: ServerApi, ours: ProbeReference, differences: dict[str, ProbeDifference]) -> None:
        theirs = [server.prompt_logprobs(tokens) for tokens in self._probe.sequences]
        difference = differences[server.url] = ours.difference(theirs)
        if excess := ours.limit.excess(difference):
            raise ServerError(
                f"{server.url} does not have the trainer's weights although its update succeeded: {excess}"
            )


def transport_folder(engine: ServedConfig) -> Path:
    """Return the folder for weights on their way to servers."""
    return Path(engine.transport_dir) if engine.transport_dir else SHARED_MEMORY


class Sender:
    """Calls all servers that have not failed in this push, at the same time."""

    def __init__(self, servers: Sequence[ServerApi]) -> None:
        self._servers, self.living = list(servers), list(servers)
        self.failed: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(max(1, len(servers)), "weight push")

    def everywhere(self, phase: str, ask: Callable[[ServerApi], Any]) -> dict[str, Any]:
        """Call `ask` for every living server. Returns the answers by address, without servers that failed."""
        asked = [(server, self._pool.submit(ask, server)) for server in self.living]
        answers = {}
        for server, answer in asked:
            try:
                answers[server.url] = answer.result()
            except ServerError as error:
                self.failed[server.url] = f"{phase}: {error}"
        self.living = [server for server in self.living if server.url not in self.failed]
        return answers

    def undo(self) -> None:
        """Undo failed servers' updates, as far as they answer: half an update would break or refuse the next one."""
        for undone in [self._pool.submit(server.undo_update) for server in self._servers if server.url in self.failed]:
            with suppress(ServerError):
                undone.result()

    def fail_all(self, reason: str) -> None:
        """Mark all living servers as failed."""
        self.failed |= {server.url: reason for server in self.living}
        self.living = []

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class Stopwatch:
    """Seconds spent in each phase; a phase may occur several times."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._since_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the seconds since the last call to `phase`."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._since_s  # type: ignore[assignment]  # typed for whole counts
        self._since_s = now_s


def _address_towards(url: str) -> str:
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


SEEN = 0.1
"""Fraction of the probe's limit above which adapters must change at least a digit of a server's logprobs."""


class ServedAdapters:
    """Folder of adapters on their way to servers, and the names of loaded adapters; on rank 0, for the whole run."""

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, which must be visible to trainer and servers; it is deleted with this object."""
        self._folder = tempfile.TemporaryDirectory(prefix="mcore_rl_adapters_", dir=parent)
        self.path = Path(self._folder.name)
        # A server may run as another user.
        self.path.chmod(0o755)
        self.names: dict[str, str] = {}
        """Name of the loaded adapter, by the server's address."""


class AdapterPush(WeightPush):
    """Sends the modules' current adapters to servers, in place of weights, under a new name each time, because a prefix
    cache distinguishes adapters only by name. The first push, while they add nothing, verifies the servers' base model.
    """

    def __init__(
        self,
        *of_policy: *tuple[Sequence[ServerApi], Sequence[nn.Module], Mesh, ModelConfig, ServedConfig, Sampling],
        lora: LoraConfig,
        served: ServedAdapters | None,
    ) -> None:
        """Take the arguments of `WeightPush`, the section `lora`, and the served adapters (None except on rank 0)."""
        super().__init__(*of_policy)
        self._lora, self._served = lora, served

    def push(self, version: int) -> PushReport:
        """Collective over the world: send the adapters to all servers and probe them; the report lists failed ones."""
        watch = Stopwatch()
        ours = self._probe.reference(self._tolerance)
        with adapters_off(self._chunks):
            base_NT = self._probe.logprobs()
        watch.lap("trainer")
        shards = [shard for shard in local_shards(self._chunks) if ".adapter." in shard.key]
        tensors = gathered(shards, self._mesh)
        self.make_room()
        watch.lap("gather")
        sender, differences, fields = None, dict[str, ProbeDifference](), dict[str, Any]()
        if self._served is not None:
            sender = Sender(self._servers)
            fields = self._sent(sender, self._served, version, tensors, ours, base_NT, differences, watch)
        return self._report(sender, ours, differences, watch, version=version, **fields)

    def _sent(
        self,
        sender: Sender,
        served: ServedAdapters,
        version: int,
        tensors: dict[str, Tensor],
        ours: ProbeReference,
        base_NT: Tensor,
        differences: dict[str, ProbeDifference],
        watch: Stopwatch,
    ) -> dict[str, Any]:
        """Send the adapters to the servers and probe them, on rank 0. Returns fields of the report."""
        name = f"policy-{version:06d}-{secrets.token_hex(4)}"
        folder, num_bytes = served.path / name, 0
        is_seen = ours.limit.of(difference_of(ours.logprobs_NT, base_NT)) > SEEN * ours.limit.limit
        from mcore_rl.convert.peft import write_served_adapter  # only runs whose servers load adapters

        try:
            num_bytes = write_served_adapter(folder, tensors, self._lora, self._model)
        except (OSError, SafetensorError) as error:
            sender.fail_all(
                f"{folder}: the adapters cannot be written ({error}). Free space there, or name another folder: "
                "rl.engine.transport_dir"
            )
        watch.lap("gather")
        sender.everywhere("pause", lambda server: server.pause())
        watch.lap("pause")
        sender.everywhere("load of the adapters", lambda server: server.load_adapter(name, str(folder)))
        watch.lap("load")
        sender.everywhere("resume", lambda server: server.resume())
        sender.undo()
        watch.lap("finish")
        sender.everywhere(
            "probe", lambda server: self._compare_adapted(server, name, ours, differences, is_seen=is_seen)
        )
        sender.everywhere("unloading", lambda server: _unload(server, served.names.get(server.url)))
        # The adapters of a failed server are unknown: it is restarted, or keeps a name that no request uses.
        served.names = dict.fromkeys([server.url for server in sender.living], name)
        for former in served.path.iterdir():
            if former.name != name:
                shutil.rmtree(former)
        return {"num_bytes": num_bytes, "largest_bucket_bytes": num_bytes, "adapter": name}

    def _compare_adapted(
        self,
        server: ServerApi,
        name: str,
        ours: ProbeReference,
        differences: dict[str, ProbeDifference],
        *,
        is_seen: bool,
    ) -> None:
        theirs = [server.prompt_logprobs(tokens, adapter=name) for tokens in self._probe.sequences]
        difference = differences[server.url] = ours.difference(theirs)
        if excess := ours.limit.excess(difference):
            raise ServerError(
                f"{server.url} does not have the trainer's weights although it has loaded the adapters {name}: it has "
                f"another base, or leaves some of them out: {excess}"
            )
        # If an adapter matches no module, the server answers with the base model and status 200.
        if is_seen and theirs == [server.prompt_logprobs(tokens) for tokens in self._probe.sequences]:
            raise ServerError(
                f"{server.url} answers under the name {name} as its base, to the last digit, though the adapters "
                "change these logprobs: they are bound to nothing there"
            )


def _unload(server: ServerApi, former: str | None) -> None:
    # A server that was restarted at the same address no longer has it.
    with suppress(ServerError):
        if former is not None:
            server.unload_adapter(former)


Load = Callable[[Callable[[str], Mapping[str, Any]]], None]
"""Function that makes all living servers load a bucket at the same time; its argument returns the description of the
bucket for the server at an address."""


class FileTransport:
    """Writes each bucket to its own folder, which is deleted once the servers have read it."""

    def __init__(self, folder: Path) -> None:
        """Use a folder that the servers see at the same path. Raises EngineError if it is not writable."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="mcore_rl_weights_", dir=folder))
        except OSError as error:
            raise EngineError(
                f"rl.engine.transport_dir={folder}: buckets of weights cannot be written there ({error.strerror}). "
                "Name a folder that this user can write."
            ) from None
        # A server may run as another user.
        self._folder.chmod(0o755)

    def close(self) -> None:
        """Delete all remaining files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, bucket: Bucket, load: Load) -> None:
        """Write a bucket, let the servers load it, and delete it. Raises EngineError if it cannot be written."""
        folder = self._folder / bucket.name.strip(".")
        path = folder / "model.safetensors"
        try:
            folder.mkdir()
            save_file(bucket.tensors, path)
            path.chmod(0o644)
            update = {"path": str(path), "crc32": crc32_of(path)}
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{path}: a bucket of {bucket.num_bytes} bytes cannot be written ({error}). Free space there, or name "
                "another folder: rl.engine.transport_dir."
            ) from None
        # The servers read the file, so the tensors need not stay in this process's memory.
        bucket.tensors.clear()
        load(lambda _: update)
        shutil.rmtree(folder)


class BroadcastTransport:
    """Broadcasts each tensor to all workers of all servers, with NCCL between GPUs and gloo between CPUs. Each push
    creates a new group, as a dead member hangs it; if a member dies during a push, all servers of the push have failed.
    """

    def __init__(self, host: str, workers: Mapping[str, int], device: torch.device, timeout_s: float) -> None:
        """Prepare a push from `host`, as servers reach it, to workers, counted by server; `device` sets the backend."""
        self._device, self._timeout_s = device, timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._key = secrets.token_hex(8)
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        common = {
            "backend": self._backend,
            "host": host,
            "port": self._store.port,
            "key": self._key,
            "size": 1 + sum(workers.values()),
            "timeout_s": timeout_s,
        }
        ranks = itertools.accumulate(workers.values(), initial=1)
        self._groups = {url: common | {"rank": rank} for url, rank in zip(workers, ranks, strict=False)}
        self._size = 1 + sum(workers.values())
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, "weights")

    def close(self) -> None:
        """Leave the group."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._backend == "nccl" and self._group is not None:
            # Otherwise a broadcast left unfinished by a dead member would keep the device busy.
            self._group.abort()
        self._group = None

    def send(self, bucket: Bucket, load: Load) -> None:
        """Broadcast the tensors of a bucket while the servers receive them. Raises EngineError if that fails."""
        description = {
            "names": list(bucket.tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors.values()],
        }
        first = self._group is None
        sending = self._thread.submit(self._broadcast, bucket)
        load(lambda url: description | ({"group": self._groups[url]} if first else {}))
        try:
            sending.result(self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise EngineError(
                f"the broadcast of {bucket.name} to the servers did not end ({str(error)[:300]}): one of their workers "
                "is gone or cannot be reached. See the servers' logs."
            ) from None

    def _broadcast(self, bucket: Bucket) -> None:
        """Collective over the group: send the tensors as bytes, because not every backend supports every type."""
        if self._group is None:
            self._group = self._join()
        for tensor in bucket.tensors.values():
            self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _join(self) -> Any:
        """Collective over the group: create it, separate from the training world."""
        store, size = PrefixStore(self._key, self._store), self._size
        limit = timedelta(seconds=self._timeout_s)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            torch.cuda.set_device(self._device)
            return dist.ProcessGroupNCCL(store, 0, size, options)
        return dist.ProcessGroupGloo(store, 0, size, limit)
