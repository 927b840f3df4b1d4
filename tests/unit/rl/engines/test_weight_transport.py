"""What the transports of weights give to servers: files with checksums, and broadcasts in a group of one push."""

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
from mcore_rl.rl.engines.weight_push import (
    BroadcastTransport,
    FileTransport,
    Sender,
    Sizes,
    Stopwatch,
    new_folder,
    write_tensors,
)

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
