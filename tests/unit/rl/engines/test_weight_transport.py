"""What the transports of weights give to servers: files with checksums, and broadcasts in a group of one push."""

import random
import re
import resource
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from mcore_rl.errors import EngineError
from mcore_rl.model.hf_stream import Bucket
from mcore_rl.rl.engines import weight_push
from mcore_rl.rl.engines.delta import Differences, difference, num_bytes
from mcore_rl.rl.engines.server_api import HttpClient
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.engines.weight_push import (
    BroadcastTransport,
    FileTransport,
    Sender,
    Sizes,
    Stopwatch,
    new_folder,
    write_tensors,
)
from tests.fake_server import FakeServer, TableAnswers, file_engine

Update = Callable[[str], Mapping[str, Any]]
WORKERS = {"http://a:1": 1, "http://b:2": 2}
"""Two servers, of one and of two workers."""


def buckets() -> list[Bucket]:
    generator = torch.Generator().manual_seed(1)
    return [
        Bucket(
            f"model.layers.{layer}.",
            {
                "weight": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
                "bias": torch.randn(7, generator=generator),
            },
        )
        for layer in range(3)
    ]


class Worker:
    """A worker of a server, which does what `vllm_worker.BroadcastEngine` does."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.received: list[dict[str, Tensor]] = []
        self.ranks: list[int] = []

    def load(self, update: Mapping[str, Any]) -> None:
        if group := update.get("group"):
            assert group["backend"] == "gloo"
            rank = group["rank"] + self.index
            self.ranks.append(rank)
            limit = timedelta(seconds=group["timeout_s"])
            store = PrefixStore(group["key"], TCPStore(group["host"], group["port"], is_master=False, timeout=limit))
            self.group = ProcessGroupGloo(store, rank, group["size"], limit)
        tensors = {}
        for name, dtype, shape in zip(update["names"], update["dtypes"], update["shapes"], strict=True):
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensors[name].view(-1).view(torch.uint8), 0).wait()
        self.received.append(tensors)


def test_a_broadcast_reaches_every_worker_of_every_server() -> None:
    workers = {url: [Worker(index) for index in range(count)] for url, count in WORKERS.items()}
    transport = BroadcastTransport("127.0.0.1", WORKERS, torch.device("cpu"), timeout_s=60)

    def load(update: Update) -> None:
        with ThreadPoolExecutor(3) as pool:
            asked: list[Future[None]] = [
                pool.submit(worker.load, update(url)) for url, group in workers.items() for worker in group
            ]
            for one in asked:
                one.result()

    for bucket in buckets():
        transport.send(bucket, load)
    transport.close()
    everyone = [worker for group in workers.values() for worker in group]
    # Rank 0 is the trainer's; a server's workers have consecutive ones, and join once.
    assert [worker.ranks for worker in everyone] == [[1], [2], [3]]
    for worker in everyone:
        for tensors, bucket in zip(worker.received, buckets(), strict=True):
            assert tensors.keys() == bucket.tensors.keys()
            assert all(torch.equal(tensors[name], bucket.tensors[name]) for name in tensors)


@pytest.mark.full
def test_a_broadcast_to_a_worker_that_is_gone_ends() -> None:
    transport = BroadcastTransport("127.0.0.1", {"http://a:1": 1}, torch.device("cpu"), timeout_s=1)
    with pytest.raises(EngineError, match=r"did not end .* one of their workers is gone"):
        transport.send(buckets()[0], lambda update: None)
    transport.close()


class Stream:
    """Buckets that this rank gathers whole."""

    def __init__(self) -> None:
        self.owners = {bucket.name: {0} for bucket in buckets()}

    def __iter__(self) -> Iterator[Bucket]:
        for bucket in buckets():
            yield bucket
            bucket.tensors.clear()


class Reader:
    """A server that reads files as vLLM's worker does."""

    url = "http://a:1"

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.folders: list[Path] = []

    def load(self, update: Mapping[str, Any]) -> None:
        ((path, crc32),) = [(Path(file["path"]), file["crc32"]) for file in update["files"]]
        assert crc32 == f"{zlib.crc32(path.read_bytes()):08x}" and path.stat().st_mode & 0o444 == 0o444
        self.tensors[f"{path.parent.name}."] = load_file(path)
        self.folders.append(path.parent)


def sent(parent: Path, reader: Reader) -> tuple[Sizes, Sender]:
    sender: Any = Sender([reader])  # type: ignore[list-item]
    folder = new_folder(parent)
    sizes = FileTransport(str(folder), Stream()).send(sender, Stopwatch())  # type: ignore[arg-type]
    assert list(parent.iterdir()) == []
    return sizes, sender


@pytest.mark.usefixtures("one_rank")
def test_a_file_has_the_bucket_and_its_checksum_and_is_deleted_when_it_was_read(tmp_path: Path) -> None:
    reader = Reader()
    sizes, sender = sent(tmp_path, reader)
    assert sender.living == [reader] and sizes == Sizes(num_bytes=3 * 58, largest_bucket_bytes=58)
    assert [*reader.tensors] == [bucket.name for bucket in buckets()], "in order, where one rank writes"
    for bucket in buckets():
        found = reader.tensors[bucket.name]
        assert found.keys() == bucket.tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in bucket.tensors.items())


def test_files_of_weights_are_those_of_the_formats_own_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).T, "b": torch.tensor(2.0).bfloat16(), "c": torch.empty(0, 4)}
    tensors["d"] = torch.randn(700_000).to(torch.float8_e4m3fn)
    path = tmp_path / "x.safetensors"
    crc32 = write_tensors(path, dict(tensors))
    found = load_file(path)
    assert crc32 == f"{zlib.crc32(path.read_bytes()):08x}" and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rl.engine.transport_dir=.*missing.*Name a folder"):
        new_folder(tmp_path / "missing")


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_is_named_and_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    unlimited, reader = resource.getrlimit(resource.RLIMIT_FSIZE), Reader()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
    try:
        _, sender = sent(tmp_path, reader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert sender.living == [] and reader.tensors == {}
    assert re.search(
        r"rank 0 cannot write its part of a bucket, 58 bytes \(.*File too large.*\)\. Free", sender.failed[reader.url]
    )


@pytest.mark.usefixtures("one_rank")
def test_an_error_in_the_thread_that_loads_is_raised_and_nobody_waits_for_it(tmp_path: Path) -> None:
    class Broken(Reader):
        def load(self, update: Mapping[str, Any]) -> None:
            raise KeyError("a mistake of the program")

    with pytest.raises(KeyError, match="a mistake of the program"):
        sent(tmp_path, Broken())


class Stored(TableAnswers):
    """The tensors that updates have brought."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def load(self, update: Mapping[str, Any]) -> None:
        of_files = (load_file(file["path"]) for file in update.get("files", ()))
        for found in (update.get("tensors", {}), *of_files):
            self.tensors |= {name: tensor.clone() for name, tensor in found.items()}


class Run:
    """A trainer whose fp32 weights of std 0.02 take steps of about `lr`, as Adam's are, each in its own direction, and
    whose servers get them in bf16.
    """

    def __init__(self, *servers: FakeServer, folder: Path, lr: float = 1e-6, is_delta: bool = True) -> None:
        times = {"request_timeout_s": 60.0, "update_timeout_s": 60.0}
        self.apis = [VllmApi(HttpClient(server.url), vocab_size=64, owner=None, **times) for server in servers]
        self.folder, self.lr, self.differences = folder, lr, Differences() if is_delta else None
        self.randomize(1)
        generator = torch.Generator().manual_seed(2)
        self.directions = {name: adam_like(tensor, generator) for name, tensor in self.masters.items()}

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.masters = {f"model.layers.{i}.w": 0.02 * torch.randn(96, 64, generator=generator) for i in range(4)}
        self.masters["model.norm.weight"] = 1 + 0.02 * torch.randn(64, generator=generator)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in self.masters.items()}

    def push(self) -> tuple[int, dict[str, str]]:
        """Take a step and push. Returns the bytes that were sent, and the servers that failed."""
        for name, tensor in self.masters.items():
            tensor += self.lr * self.directions[name]
        found = [Bucket(f"{name.removesuffix('w')}", {name: tensor}) for name, tensor in self.weights.items()]

        class Weights:
            owners = {bucket.name: {0} for bucket in found}  # noqa: RUF012

            def __iter__(self) -> Iterator[Bucket]:
                return iter(found)

        sender = Sender(self.apis)
        sender.everywhere("pause", lambda server: server.pause())
        sender.everywhere("start", lambda server: server.start_update())
        transport = FileTransport(str(new_folder(self.folder)), Weights(), self.differences)  # type: ignore[arg-type]
        sizes = transport.send(sender, Stopwatch())
        sender.everywhere("finish", lambda server: server.finish_update(1))
        sender.everywhere("resume", lambda server: server.resume())
        sender.undo()
        sender.close()
        assert list(self.folder.iterdir()) == []
        return sizes.num_bytes, sender.failed

    def assert_arrived(self, *servers: FakeServer) -> None:
        for server in servers:
            found: dict[str, Tensor] = server.answers.tensors  # type: ignore[attr-defined]
            assert found.keys() == self.weights.keys()
            for name, tensor in self.weights.items():
                assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def adam_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    signs, sizes = torch.randn(tensor.shape, generator=generator).sign(), torch.randn(tensor.shape, generator=generator)
    return signs * sizes.abs().clamp(0, 1.5)


ALL_BYTES = 4 * 96 * 64 * 2 + 64 * 4


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(Stored()) as one, FakeServer(Stored()) as other:
        yield one, other


@pytest.mark.usefixtures("one_rank")
def test_differences_bring_the_same_bits_as_whole_weights(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    by_difference, whole = servers
    runs = Run(by_difference, folder=tmp_path), Run(whole, folder=tmp_path, is_delta=False)
    sent = []
    for _ in range(4):
        sizes, failed = zip(*(run.push() for run in runs), strict=True)
        assert failed == ({}, {})
        runs[0].assert_arrived(by_difference, whole)
        sent.append(sizes)
    assert sent[0] == (ALL_BYTES, ALL_BYTES), "the first push is whole"
    for changed, all_bytes in sent[1:]:
        assert changed < ALL_BYTES / 6 and all_bytes == ALL_BYTES
    # Differences to what came in another run are of no use any more.
    assert [kept[0].split()[0] for kept in by_difference.engine.bases._kept.values()] == [
        runs[0].differences._first
    ] * 5


@pytest.mark.usefixtures("one_rank")
def test_a_push_whose_answers_are_lost_applies_each_difference_once(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    run = Run(*servers, folder=tmp_path)
    run.push()
    for _ in range(2):
        servers[0].faults = [("/collective_rpc", "close"), ("/collective_rpc", "none"), ("/collective_rpc", "close")]
        size, failed = run.push()
        assert failed == {} and size < ALL_BYTES / 6 and servers[0].faults == []
        run.assert_arrived(*servers)


def test_a_worker_applies_a_difference_once_and_to_its_version_alone(tmp_path: Path) -> None:
    bases = file_engine().bases
    old, new = {"w": torch.randn(4, 6).bfloat16()}, {"w": torch.randn(4, 6).bfloat16()}

    def file(version: str, base: str) -> dict[str, str]:
        path = tmp_path / f"{version}{base}"
        crc32 = write_tensors(path, difference(old, new) if base else dict(old))
        return {"path": str(path), "crc32": crc32, "name": "x 0", "version": version, "base": base}

    whole, changes, later = file("run 1", ""), file("run 2", "run 1"), file("run 4", "run 3")
    assert "version here is none" in bases.take(changes)
    for _ in range(2):
        assert bases.take(whole) == ""
        assert torch.equal(dict(bases.tensors(whole))["w"], old["w"])
    assert "version here is run 1, and the difference is to run 3" in bases.take(later)
    for _ in range(2):
        assert bases.take(changes) == ""
        assert torch.equal(dict(bases.tensors(changes))["w"], new["w"])
    with pytest.raises(ValueError, match="here is run 2, and run 1 is to be loaded"):
        bases.tensors(whole)
    # Of another run: what is kept is dropped, also of files that do not come again.
    assert bases.take({**file("other 1", ""), "name": "y 0"}) == "" and [*bases._kept] == ["y 0"]


@pytest.mark.usefixtures("one_rank")
def test_a_server_that_was_restarted_gets_all_bytes_in_the_same_push(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    run = Run(*servers, folder=tmp_path)
    run.push()
    run.push()
    servers[1].engine = None
    size, failed = run.push()
    assert failed == {} and ALL_BYTES < size < 1.2 * ALL_BYTES, "differences, and then all"
    run.assert_arrived(*servers)
    size, failed = run.push()
    assert failed == {} and size < ALL_BYTES / 6
    run.assert_arrived(*servers)
    # Each bucket is loaded once, also by the server that had it at once.
    assert [server.paths().count("/update_weights") for server in servers] == [20, 20]


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_is_resumed_sends_all_bytes_first(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    run = Run(*servers, folder=tmp_path)
    run.push()
    resumed = Run(*servers, folder=tmp_path)
    resumed.randomize(5)
    assert resumed.push() == (ALL_BYTES, {})
    resumed.assert_arrived(*servers)
    # The first run knows nothing of it: what it sends is refused, and then comes whole.
    size, failed = run.push()
    assert failed == {} and size > ALL_BYTES
    run.assert_arrived(*servers)


def flip(data: bytearray | Tensor, place: int) -> None:
    data[place] ^= 1


@pytest.mark.usefixtures("one_rank")
def test_a_damaged_difference_or_base_is_refused_and_the_bytes_come_whole(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writes = Run(*servers, folder=tmp_path), weight_push.write_tensors
    run.push()
    damaged: list[Path] = []

    def write(path: Path, tensors: dict[str, Tensor]) -> str:
        is_difference = all(tensor.dtype == torch.uint8 for tensor in tensors.values())
        crc32 = writes(path, tensors)
        if is_difference and not damaged:
            data = bytearray(path.read_bytes())
            flip(data, len(data) // 2)
            path.write_bytes(data)
            damaged.append(path)
        return crc32

    monkeypatch.setattr(weight_push, "write_tensors", write)
    size, failed = run.push()
    assert failed == {} and len(damaged) == 1 and ALL_BYTES / 4 < size < ALL_BYTES / 2, "one bucket came whole"
    run.assert_arrived(*servers)
    # A file that is sound, and a damaged base: the result has not the CRC-32 of the new bytes.
    _, tensors = servers[0].engine.bases._kept["model.layers.2. 0"]
    flip(tensors["model.layers.2.w"].view(-1).view(torch.uint8), 77)
    size, failed = run.push()
    assert failed == {} and ALL_BYTES / 4 < size < ALL_BYTES / 2
    run.assert_arrived(*servers)


@pytest.mark.usefixtures("one_rank")
def test_a_file_that_is_damaged_also_when_it_is_whole_fails_the_server(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writes = Run(servers[0], folder=tmp_path), weight_push.write_tensors
    monkeypatch.setattr(weight_push, "write_tensors", lambda path, content: writes(path, content)[::-1])
    _, failed = run.push()
    assert re.search(r"cannot keep /.*/0.safetensors: ValueError.*has the CRC-32", failed[servers[0].url])
    monkeypatch.undo()
    assert run.push()[1] == {}
    run.assert_arrived(servers[0])


@pytest.mark.usefixtures("one_rank")
def test_a_bucket_of_which_more_than_half_would_be_sent_goes_whole(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    run = Run(*servers, folder=tmp_path)
    run.push()
    run.randomize(9)
    assert run.push() == (ALL_BYTES, {})
    run.assert_arrived(*servers)


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_fifty_pushes_with_faults_of_all_kinds_end_with_the_trainers_bits(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    run, chance = Run(*servers, folder=tmp_path), random.Random(1)
    for _ in range(50):
        one = servers[chance.randrange(2)]
        match chance.randrange(6) if one.engine is not None else 0:
            case 1:
                one.faults = [("/collective_rpc", "none")] * chance.randrange(5) + [("/collective_rpc", "close")]
            case 2:
                one.engine = None
            case 3:
                kept = chance.choice([*one.engine.bases._kept.values()])
                flip(next(iter(kept[1].values())).view(-1).view(torch.uint8), chance.randrange(64))
            case 4:
                one.engine.bases._kept.pop(chance.choice([*one.engine.bases._kept]))
            case 5:
                run.differences = Differences()
        assert run.push()[1] == {}
        run.assert_arrived(*servers)


@pytest.mark.parametrize(
    ("lr", "num_steps", "changed", "most"),
    [(1e-6, 1, 0.032, 0.05), (1e-6, 8, 0.16, 0.14), (1e-5, 1, 0.19, 0.16), (1e-5, 8, 0.64, 0.32)],
)
def test_after_steps_of_adam_few_bytes_are_different(lr: float, num_steps: int, changed: float, most: float) -> None:
    """Weights of std 0.02 in bf16; the fractions of values that change are of an independent measurement."""
    generator = torch.Generator().manual_seed(1)
    master = 0.02 * torch.randn(1024, 1024, generator=generator)
    old, new = master.bfloat16(), (master + num_steps * lr * adam_like(master, generator)).bfloat16()
    found = (old.view(torch.int16) != new.view(torch.int16)).double().mean()
    assert found == pytest.approx(changed, rel=0.05)
    assert num_bytes(difference({"w": old}, {"w": new})) < most * new.nbytes
