"""Push of weights or low-rank adapters to servers, verified by the probe; they receive by `mcore_rl/vllm_worker.py`."""

import base64
import errno
import itertools
import json
import os
import platform as machine
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl.rollout import ServedConfig, VllmConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.agree import gathered_on, give_next_word, give_word, on_rank_zero, wait_for_word, world_max
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import adapters_in, adapters_off, merge_loss
from mcore_rl.model.build import gathered, local_shards
from mcore_rl.model.hf_stream import Bucket, WeightStream
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.delta import Differences, num_bytes
from mcore_rl.rl.engines.fp8_blocks import Fp8Stream
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
from mcore_rl.storage.checksums import as_hex, crc32

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
    """Bytes that were sent: of all weights, or of what has changed in them (rl.engine.delta)."""
    largest_bucket_bytes: int
    merge_loss: float | None = None
    """Fraction of the low-rank adapters that is lost to rounding of the merged weights; None if nothing was merged."""
    adapter: str | None = None
    """Name of the adapters on the servers; None if the servers have whole weights."""
    seconds: Mapping[str, float]
    """Seconds by phase: trainer (the trainer's logprobs of the probe), pause, transfer, finish, probe; and within them
    gather, write (files only; of the slowest rank) and load, which run at the same time, and paused."""


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
        self._probe = Probe(chunks, mesh, model, engine.dtype, in_fp8=engine.in_fp8)
        self._device = next(chunks[0].parameters()).device
        own, served = next(chunks[0].parameters()).dtype, DTYPES.get(engine.dtype, torch.float32)
        self._dtype = served if own == torch.float32 else own
        """Most precise type in which servers have the weights."""
        self._weights: WeightStream | None = None
        """The weights in buckets, planned before the first push for all pushes."""
        self._differences = Differences() if isinstance(engine, VllmConfig) and engine.delta else None
        self._tolerance = None if engine.probe_tolerance == "auto" else engine.probe_tolerance
        self.make_room: Callable[[], None] = lambda: None
        """Called on all ranks between the trainer's pass over the probe and the first call of a server."""

    def push(self, version: int) -> PushReport:
        """Collective over the world: send all weights to all servers and probe them; the report lists failed ones."""
        watch = Stopwatch()
        sender = Sender(self._servers) if self._mesh.world.rank == 0 else None
        folder = self._new_folder(sender) if self._engine.way == "files" else None
        if self._weights is None and (folder is not None or self._engine.way != "files"):
            # Otherwise ranks of other machines would write where no server reads.
            all_write = folder is not None and not world_max(not Path(folder).is_dir())
            stream = Fp8Stream if self._engine.in_fp8 else WeightStream
            self._weights = stream(self._chunks, self._mesh, self._model, to_rank=None if all_write else 0)
        ours = self._probe.reference(self._tolerance)
        has_adapters = any(True for _ in adapters_in(self._chunks))
        lost = merge_loss(self._chunks, self._dtype) if has_adapters else None
        self.make_room()
        watch.lap("trainer")
        paused_s = time.perf_counter()
        if sender is not None:
            sender.everywhere("pause", lambda server: server.pause())
            sender.everywhere("start of the update", lambda server: server.start_update())
        watch.lap("pause")
        sizes, end = Sizes(), ("end of the update", lambda server: server.finish_update(version))
        with ExitStack() as until_the_end:
            if self._weights is not None and folder is not None:
                sizes = FileTransport(folder, self._weights, self._differences).send(sender, watch)
            elif self._weights is not None and self._engine.way != "files":
                sizes = self._send(sender, self._weights, watch, until_the_end)
            on_rank_zero(lambda: sender.everywhere(*end) if sender else None)
        if self._engine.share_gpus:
            torch.cuda.empty_cache()
            world_max(0)  # on all ranks, before keys and values take this memory
        differences: dict[str, ProbeDifference] = {}
        if sender is not None:
            sender.everywhere("reset of the caches", lambda server: server.reset_caches())
            sender.everywhere("resume", lambda server: server.resume())
            sender.undo()
            watch.lap("finish")
            watch.seconds["paused"] += time.perf_counter() - paused_s  # type: ignore[assignment]
            sender.everywhere("probe", lambda server: self._compare(server, ours, differences))
        report = self._report(sender, ours, differences, watch, version=version, merge_loss=lost, **asdict(sizes))
        if report.failed and self._differences is not None:
            self._differences = Differences()  # the next push is whole
        return report

    def _new_folder(self, sender: "Sender | None") -> str | None:
        """Collective over the world: return a new folder for the buckets of a push, which rank 0 has made where servers
        see it; None if it cannot be made, of which all servers have failed.
        """

        def make() -> str | None:
            assert sender is not None
            try:
                return str(new_folder(transport_folder(self._engine)))
            except EngineError as error:
                sender.fail_all(str(error))
                return None

        return on_rank_zero(make)

    def _send(
        self, sender: "Sender | None", weights: WeightStream, watch: "Stopwatch", until_the_end: ExitStack
    ) -> "Sizes":
        """Collective over the world: send all weights from rank 0, bucket by bucket; `until_the_end` closes the way."""
        transport = (
            SlotTransport(weights, self._mesh, self._device)
            if self._engine.way == "ipc"
            else BroadcastTransport(self._device, self._engine.update_timeout_s)
        )
        until_the_end.callback(transport.close)
        num_bytes = largest = 0
        # Every rank iterates over all buckets, even if servers fail: all other ranks would otherwise hang.
        for bucket in weights:
            watch.lap("gather")
            num_bytes, largest = num_bytes + bucket.num_bytes, max(largest, bucket.num_bytes)
            transport.send(bucket, sender)
            watch.lap("load")
        return Sizes(num_bytes, largest)

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

    def load(self, bucket: str, update_of: Callable[[str], Mapping[str, Any]]) -> None:
        """Let all living servers load a bucket, by its description for the server at an address."""
        self.everywhere(f"update of {bucket}", lambda server: server.load(update_of(server.url)))

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
        differences: dict[str, ProbeDifference] = {}
        ours = self._probe.reference(self._tolerance)
        with adapters_off(self._chunks):
            base_NT = self._probe.logprobs()
        watch.lap("trainer")
        shards = [shard for shard in local_shards(self._chunks) if ".adapter." in shard.key]
        tensors = gathered(shards, self._mesh)
        self.make_room()
        watch.lap("gather")
        if self._served is None:
            return self._report(None, ours, differences, watch, version=version)
        served, sender = self._served, Sender(self._servers)
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
        watch.seconds["paused"] = watch.seconds["pause"] + watch.seconds["load"] + watch.seconds["finish"]
        sender.everywhere(
            "probe", lambda server: self._compare_adapted(server, name, ours, differences, is_seen=is_seen)
        )

        def unload(server: ServerApi) -> None:
            # A server that was restarted at the same address no longer has it.
            with suppress(ServerError):
                if former := served.names.get(server.url):
                    server.unload_adapter(former)

        sender.everywhere("unloading", unload)
        # The adapters of a failed server are unknown: it is restarted, or keeps a name that no request uses.
        served.names = dict.fromkeys([server.url for server in sender.living], name)
        for former in served.path.iterdir():
            if former.name != name:
                shutil.rmtree(former)
        sizes = {"num_bytes": num_bytes, "largest_bucket_bytes": num_bytes}
        return self._report(sender, ours, differences, watch, version=version, adapter=name, **sizes)

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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes of the weights that were sent."""

    num_bytes: int = 0
    largest_bucket_bytes: int = 0


def new_folder(parent: Path) -> Path:
    """Create a folder that other users can read. Raises EngineError if `parent` is not writable."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="mcore_rl_weights_", dir=parent))
    except OSError as error:
        raise EngineError(
            f"rl.engine.transport_dir={parent}: buckets of weights cannot be written there ({error.strerror}). "
            "Name a folder that this user can write."
        ) from None
    # A server may run as another user.
    folder.chmod(0o755)
    return folder


AHEAD = 2
"""Number of files that a rank writes before the servers have loaded the first of them."""
STOP, WHOLE = "stop", "whole"
"""Words to a file's writer: nothing more is to be written; a server refuses the difference, and wants the bytes."""


class FileTransport:
    """Sends buckets as files. Every rank writes the tensors that it gathers, while it gathers the next; rank 0, in a
    thread, lets all servers load a bucket in one call, in any order, when all of its files are there, and deletes it.
    A rank that cannot write says so in place of the file: then all servers have failed, and nothing more is written.
    """

    def __init__(self, folder: str, weights: WeightStream, differences: Differences | None = None) -> None:
        """Take a folder that ranks and servers see at the same path, the stream of all ranks, and this rank's bytes of
        the last push if servers get the differences to them.
        """
        self._folder, self._weights, self._rank = Path(folder), weights, dist.get_rank()
        self._differences = differences
        self._seconds = {part: defaultdict[int, float](float) for part in ("gather", "write", "load")}
        """Seconds of each part, by rank; on rank 0."""
        self._unloaded: deque[str] = deque()
        """This rank's buckets that servers have not loaded yet, oldest first."""
        self._is_stopped = self._is_over = False

    def send(self, sender: Sender | None, watch: Stopwatch) -> Sizes:
        """Collective over the world: send all buckets. Returns the sizes on rank 0."""
        try:
            with ThreadPoolExecutor(1, "weight writer") as writer, ThreadPoolExecutor(1, "weight loader") as loader:
                sizes = self._send(writer, loader.submit(self._load_all, sender) if sender is not None else None)
        finally:
            if sender is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        watch.lap("transfer")
        for part, of_ranks in self._seconds.items():
            watch.seconds[part] += max(of_ranks.values(), default=0)  # type: ignore[assignment]  # typed for whole counts
        return sizes

    def _send(self, writer: ThreadPoolExecutor, loading: Future[Sizes] | None) -> Sizes:
        writing, began_s = writer.submit(lambda: None), time.perf_counter()
        try:
            for bucket in self._weights:
                gather_s = time.perf_counter() - began_s
                writing.result()
                if bucket.tensors:
                    writing = writer.submit(self._write, bucket.name, dict(bucket.tensors), gather_s)
                began_s = time.perf_counter()
            writing.result()
            while self._unloaded:
                self._wait_for_load()
            return loading.result() if loading is not None else Sizes()
        except BaseException:
            self._is_over = True  # the threads end too
            raise

    def _write(self, bucket: str, tensors: dict[str, Tensor], gather_s: float) -> None:
        """Write this rank's part of a bucket when there is room for it."""
        while len(self._unloaded) >= AHEAD:
            self._wait_for_load()
        self._put(bucket, tensors, gather_s)
        self._unloaded.append(bucket)

    def _put(self, bucket: str, tensors: dict[str, Tensor], gather_s: float = 0.0) -> None:
        """Write this rank's part of a bucket, or, without tensors, what servers refused; describe it to rank 0."""
        size, began_s = num_bytes(tensors), time.perf_counter()
        path = self._folder / bucket.strip(".") / f"{self._rank}.safetensors"
        part: dict[str, Any] = {"bucket": bucket, "rank": self._rank, "gather_s": gather_s, "num_bytes": size}
        try:
            if not self._is_stopped:
                path.parent.mkdir(exist_ok=True)
                if self._differences is not None:
                    versions, tensors = self._differences.file_of(self._folder.name, bucket, tensors)
                    part |= versions | {"name": f"{bucket} {self._rank}", "num_bytes": num_bytes(tensors)}
                part |= {"path": str(path), "crc32": write_tensors(path, tensors)}
        except OSError as error:
            part["error"] = (
                f"{path}: rank {self._rank} cannot write its part of a bucket, {size} bytes ({error}). Free space "
                "there, or name another folder: rl.engine.transport_dir."
            )
        part["write_s"] = time.perf_counter() - began_s
        give_next_word(self._folder.name, json.dumps(part))

    def _wait_for_load(self) -> None:
        """Wait until the oldest bucket is loaded, or write it anew."""
        bucket = self._unloaded.popleft()
        word = wait_for_word(f"{self._folder.name}/{bucket}/{self._rank}", lambda: self._is_over)
        self._is_stopped |= word == STOP
        if word == WHOLE:
            self._put(bucket, {})
            self._unloaded.appendleft(bucket)

    def _load_all(self, sender: Sender) -> Sizes:
        """Let the servers load every bucket when its files are there, on rank 0."""
        missing = {bucket: set(ranks) for bucket, ranks in self._weights.owners.items()}
        sizes: Counter[str] = Counter()
        parts: dict[str, dict[int, dict[str, Any]]] = {bucket: {} for bucket in missing}
        try:
            for number in itertools.count(1):
                if not missing:
                    break
                word = wait_for_word(f"{self._folder.name}/{number}", lambda: self._is_over)
                if self._is_over:
                    break
                part = json.loads(word)
                bucket, rank = part["bucket"], part["rank"]
                parts[bucket][rank] = part
                missing[bucket].discard(rank)
                sizes[bucket] += part["num_bytes"]
                for name in ("gather", "write"):
                    self._seconds[name][rank] += part[f"{name}_s"]
                if "error" in part:
                    sender.fail_all(part["error"])
                if missing[bucket]:
                    continue
                missing[bucket] = refused = self._load(sender, bucket, parts[bucket])
                if not refused:
                    del missing[bucket]
                    shutil.rmtree(self._folder / bucket.strip("."), ignore_errors=True)
                word = WHOLE if refused else "" if sender.living else STOP
                for rank in refused or parts[bucket]:
                    give_word(f"{self._folder.name}/{bucket}/{rank}", word)
        except BaseException:
            self._is_over = True  # nobody on this rank waits for this thread
            raise
        return Sizes(sizes.total(), max(sizes.values(), default=0))

    def _load(self, sender: Sender, bucket: str, parts: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Let the servers load a bucket by the files of its ranks. Returns the ranks whose differences a server
        refuses; nothing is loaded then.
        """
        began_s, of_file = time.perf_counter(), ("path", "crc32", "name", "version", "base")
        files = [{key: part[key] for key in of_file if key in part} for part in parts.values() if "path" in part]
        names: set[str] = set()
        if self._differences is not None and sender.living:
            names = set(chain(*sender.everywhere(f"files of {bucket}", lambda server: server.take(files)).values()))
        if not names and sender.living:
            sender.load(bucket, lambda url: {"files": files})
        self._seconds["load"][0] += time.perf_counter() - began_s
        return {rank for rank, part in parts.items() if part.get("name") in names}


BLOCK_BYTES = 1 << 20
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
DTYPE_NAMES[torch.uint8] = "U8"
"""Names of types in safetensors files."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file, and empty `tensors`. Returns its CRC-32 in hexadecimal, of the bytes that were to be
    written: one pass, while a look at the written file would not see what was damaged before.
    """
    entries, position = {}, 0
    for name, tensor in tensors.items():
        span = [position, position := position + tensor.nbytes]
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    crc = crc32(header)
    with path.open("wb", buffering=0) as file:
        file.write(header)
        for name in list(tensors):
            data = tensors.pop(name).cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]  # in the processor's cache for both
                crc = crc32(block, crc)
                if file.write(block) != len(block):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path.chmod(0o644)
    return as_hex(crc)


def described(bucket: Bucket, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bucket as `vllm_worker.SourceUpdate`."""
    return {
        "names": list(bucket.tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.tensors.values()],
        "source": source,
    }


class BroadcastTransport:
    """Broadcasts each tensor to all workers of all servers, with NCCL between GPUs and gloo between CPUs. Each push
    creates a new group, as a dead member hangs it; if a member dies during a push, all servers of the push have failed.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        """Prepare a push; `device` sets the backend."""
        self._device, self._limit, self._key = device, timedelta(seconds=timeout_s), secrets.token_hex(8)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, "weights")

    def close(self) -> None:
        """Leave the group."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._backend == "nccl" and self._group is not None:
            # Otherwise a broadcast left unfinished by a dead member would keep the device busy.
            self._group.abort()
        self._group = None

    def send(self, bucket: Bucket, sender: Sender | None) -> None:
        """Broadcast the tensors of rank 0's bucket while the servers receive them. If that fails, all of them have."""
        groups = {} if sender is None or self._group is not None else self._groups(sender)
        if sender is None or not sender.living:
            return
        sending = self._thread.submit(self._broadcast, bucket)
        sender.load(bucket.name, lambda url: described(bucket, groups.get(url, {})))
        try:
            sending.result(self._limit.total_seconds())
        except (RuntimeError, TimeoutError) as error:
            sender.fail_all(
                f"the broadcast of {bucket.name} to the servers did not end ({str(error)[:300]}): one of their workers "
                "is gone or cannot be reached. See the servers' logs."
            )

    def _groups(self, sender: Sender) -> dict[str, dict[str, Any]]:
        """Open a store for a new group. Returns what each server's workers need to join it."""
        workers = sender.everywhere("number of workers", lambda server: server.world_size())
        if not sender.living:
            return {}
        parts, self._size = urlsplit(sender.living[0].url), 1 + sum(workers.values())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
            host = str(way.getsockname()[0])
        self._store = TCPStore(host, 0, is_master=True, timeout=self._limit, wait_for_workers=False)
        common = {
            "backend": self._backend,
            "host": host,
            "port": self._store.port,
            "key": self._key,
            "size": self._size,
            "timeout_s": self._limit.total_seconds(),
        }
        ranks = itertools.accumulate(workers.values(), initial=1)
        return {url: common | {"rank": rank} for url, rank in zip(workers, ranks, strict=False)}

    def _broadcast(self, bucket: Bucket) -> None:
        """Collective over the group: send the tensors as bytes, because not every backend supports every type."""
        if self._group is None:
            # A group of its own, separate from the training world.
            store, limit = PrefixStore(self._key, self._store), self._limit
            if self._backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                torch.cuda.set_device(self._device)
                self._group = dist.ProcessGroupNCCL(store, 0, self._size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, 0, self._size, limit)
        for tensor in bucket.tensors.values():
            self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class SlotTransport:
    """Copies buckets to a slot, memory of each rank's device that the server's worker there opens: by CUDA IPC, which
    has not run yet, or on CPUs as torch's named shared memory.
    """

    def __init__(self, weights: WeightStream, mesh: Mesh, device: torch.device) -> None:
        """Collective over the world: allocate this rank's slot, for the largest bucket."""
        self._group, size = mesh.world.group, world_max(weights.largest_bytes)
        self._pool: Any = None
        if device.type == "cpu":
            storage = torch.UntypedStorage._new_using_filename_cpu(size)
            self._slot_B = torch.empty(0, dtype=torch.uint8).set_(storage)
            key, self._handle = machine.node(), storage._share_filename_cpu_()
        else:
            settings = torch._C._accelerator_getAllocatorSettings()
            # No part of other memory, which a server would get with it; and containers export no expandable segments.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool, device):
                self._slot_B = torch.empty(size, dtype=torch.uint8, device=device)
            torch._C._accelerator_setAllocatorSettings(settings)
            key = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = self._slot_B.untyped_storage()._share_cuda_()
        self._source: dict[str, Any] | None = {key: portable(self._handle)}
        """The slot's handle by the name of its device, until servers have it."""

    def send(self, bucket: Bucket, sender: Sender | None) -> None:
        """Collective over the world: copy the bucket of rank 0 to all slots, and let the servers load it."""
        if bucket.tensors:
            parts = [tensor.view(-1).view(torch.uint8) for tensor in bucket.tensors.values()]
            torch.cat(parts, out=self._slot_B[: bucket.num_bytes])
        dist.broadcast(self._slot_B[: world_max(bucket.num_bytes)], 0, group=self._group)
        if self._slot_B.is_cuda:
            torch.cuda.synchronize(self._slot_B.device)
        # Rank 0 has this only when the slots of all ranks are written.
        handles = {key: handle for source in gathered_on(0, self._source) for key, handle in (source or {}).items()}
        self._source, update = None, described(bucket, handles)
        # No rank writes the next bucket before the servers have copied this one.
        on_rank_zero(lambda: sender.load(bucket.name, lambda url: update) if sender else None)

    def close(self) -> None:
        """Free the slot."""
        if self._pool is not None:
            # Torch keeps memory until its reader is counted out, and a worker that was killed would never be.
            torch.UntypedStorage._release_ipc_counter_cuda(*self._handle[4:6])
        del self._slot_B, self._pool


def portable(handle: Sequence[Any]) -> list[Any]:
    """Return the fields of a handle of torch's for JSON, with bytes in base64."""
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in handle]
