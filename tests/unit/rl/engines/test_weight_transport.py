"""Servers receive weights bit for bit: by files with checksums, and by the broadcasts and slots of a push."""

import json
import platform
import random
import re
import resource
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
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
    SlotTransport,
    Stopwatch,
    new_folder,
    portable,
    write_tensors,
)
from tests.fake_server import FakeServer, TableAnswers, worker_engine


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


class Server:
    """A server whose workers receive by their own code, and keep all that they are given."""

    def __init__(self, engine: str, num_workers: int = 1, url: str = "http://127.0.0.1:1") -> None:
        self.url, self.engines = url, [worker_engine(engine) for _ in range(num_workers)]
        for rank, one in enumerate(self.engines):
            one.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=num_workers, rank=rank)
        self.updates: list[dict[str, Any]] = []
        self.received: list[list[dict[str, Tensor]]] = []
        """Tensors of each bucket by each worker."""

    def world_size(self) -> int:
        return len(self.engines)

    def load(self, update: Mapping[str, Any]) -> None:
        self.updates.append(json.loads(json.dumps(update)))
        described = SimpleNamespace(**self.updates[-1])
        with ThreadPoolExecutor(len(self.engines)) as pool:
            self.received.append(list(pool.map(lambda one: dict(one._tensors(described)), self.engines)))

    def assert_received(self) -> None:
        """Every worker has every bucket, bit for bit."""
        for of_workers, bucket in zip(self.received, buckets(), strict=True):
            for tensors in of_workers:
                assert tensors.keys() == bucket.tensors.keys()
                for name, tensor in bucket.tensors.items():
                    assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def sender_to(*servers: Server) -> Sender:
    return Sender(servers)  # type: ignore[arg-type]


def test_a_broadcast_reaches_every_worker_of_every_server() -> None:
    servers = Server("BroadcastEngine"), Server("BroadcastEngine", 2, "http://127.0.0.1:2")
    transport = BroadcastTransport(torch.device("cpu"), timeout_s=60)
    for bucket in buckets():
        transport.send(bucket, sender_to(*servers))
    transport.close()
    # Rank 0 is the trainer's; a server's workers have consecutive ones, and join once.
    assert [[one._source.rank() for one in server.engines] for server in servers] == [[1], [2, 3]]
    for server in servers:
        server.assert_received()


@pytest.mark.full
def test_a_broadcast_to_a_worker_that_is_gone_ends() -> None:
    class Gone(Server):
        def load(self, update: Mapping[str, Any]) -> None: ...

    transport, sender = BroadcastTransport(torch.device("cpu"), timeout_s=1), sender_to(server := Gone("SlotEngine"))
    transport.send(buckets()[0], sender)
    assert re.search(r"did not end .* one of their workers is gone", sender.failed[server.url])
    transport.close()


def test_slots_give_every_worker_copies_which_the_next_bucket_does_not_change(one_rank: Mesh) -> None:
    servers = Server("SlotEngine"), Server("SlotEngine", 2, "http://127.0.0.1:2")
    transport = SlotTransport(Stream(), one_rank, torch.device("cpu"))  # type: ignore[arg-type]
    for bucket in Stream():
        transport.send(bucket, sender_to(*servers))
    for server in servers:
        server.assert_received()
        assert [bool(update["source"]) for update in server.updates] == [True, False, False]
    odd = {
        "a": torch.randn(3).to(torch.float8_e4m3fn),
        "b": torch.randn(2),
        "c": torch.empty(0, 4),
        "d": torch.randn(1),
    }
    transport.send(Bucket("odd", dict(odd)), sender_to(servers[0]))
    for name, tensor in servers[0].received[-1][0].items():
        assert tensor.dtype == odd[name].dtype and tensor.shape == odd[name].shape
        assert torch.equal(tensor.float(), odd[name].float()), "offsets need not be multiples of an element"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": {"GPU-other": []}}, "this worker is on {node}, and the trainer shares memory of GPU-other"),
        ({"source": {}}, "no source has been named since the last update"),
        ({"shapes": [[3, 5], [8]]}, "2 tensors have 62 bytes, and the slot has 58"),
        ({"shapes": [[3, 5]]}, "argument 2 is longer"),
        ({"names": ["weight"]}, "argument 2 is longer"),
        ({"dtypes": ["bfloat17", "float32"]}, "bfloat17"),
        ("freed", "No such file"),
    ],
    ids=str,
)
def test_a_worker_refuses_a_slot_that_is_not_its_own_or_gone_and_tensors_that_are_not_in_it(
    change: dict[str, Any] | str, message: str, one_rank: Mesh
) -> None:
    transport = SlotTransport(Stream(), one_rank, torch.device("cpu"))  # type: ignore[arg-type]
    transport.send(buckets()[0], sender_to(sound := Server("SlotEngine")))
    sound.engines[0].end_update()
    update, worker = sound.updates[0], Server("SlotEngine")
    if isinstance(change, str):
        transport.close()
    else:
        update |= change
    with pytest.raises((ValueError, AttributeError, RuntimeError), match=message.format(node=platform.node())):
        worker.load(update)
    assert worker.received == []


def test_a_worker_opens_the_memory_of_its_own_gpu_of_all_that_the_trainer_shares(monkeypatch: Any) -> None:
    """The calls, as no GPU is here: the eight fields that torch has of its memory, which travel as JSON."""
    uuids = "0b5e-1", "0b5e-2"
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    opened: list[tuple[Any, ...]] = []

    def new_shared(*fields: Any) -> None:
        opened.append(fields)
        raise RuntimeError("no GPU is here")

    monkeypatch.setattr("torch.UntypedStorage._new_shared_cuda", new_shared)
    # On the trainer's side the GPUs have other numbers.
    handles = {
        uuid: (7 - i, b"\x02c\xff" + bytes([i]), 58, 512, b"/torch_1", i, b"\x00e", True)
        for i, uuid in enumerate(uuids)
    }
    source = {uuid: portable(handle) for uuid, handle in handles.items()}
    for index, uuid in enumerate(uuids):
        server = Server("SlotEngine")
        server.engines[0].device = f"cuda:{index}"
        with pytest.raises(RuntimeError, match="no GPU is here"):
            server.load({"names": [], "dtypes": [], "shapes": [], "source": source})
        _, memory, size, start, _, offset, event, waits = handles[uuid]
        assert opened[-1] == (index, memory, size, start, b"/none", offset, event, waits)


class Stream:
    """Buckets that this rank gathers whole."""

    def __init__(self) -> None:
        self.owners = {bucket.name: {0} for bucket in buckets()}
        self.largest_bytes = 58

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
def servers(one_rank: Mesh) -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(Stored()) as one, FakeServer(Stored()) as other:
        yield one, other


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
    firsts = [kept[0].split()[0] for kept in by_difference.engine.bases._kept.values()]
    assert firsts == [runs[0].differences._first] * 5


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
    bases = worker_engine().bases
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


def test_a_bucket_of_which_more_than_half_would_be_sent_goes_whole(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    run = Run(*servers, folder=tmp_path)
    run.push()
    run.randomize(9)
    assert run.push() == (ALL_BYTES, {})
    run.assert_arrived(*servers)


@pytest.mark.full
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
