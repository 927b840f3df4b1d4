"""What the transports of weights give to servers: files with checksums, and broadcasts in a group of one push."""

import resource
from collections.abc import Callable, Mapping
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
from mcore_rl.rl.engines.weight_push import BroadcastTransport, FileTransport
from mcore_rl.storage.checksums import crc32_of

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


def test_a_broadcast_to_a_worker_that_is_gone_ends() -> None:
    transport = BroadcastTransport("127.0.0.1", {"http://a:1": 1}, torch.device("cpu"), timeout_s=1)
    with pytest.raises(EngineError, match=r"did not end .* one of their workers is gone"):
        transport.send(buckets()[0], lambda update: None)
    transport.close()


def test_a_file_has_the_bucket_and_its_checksum_and_is_deleted_when_it_was_read(tmp_path: Path) -> None:
    transport = FileTransport(tmp_path)
    folders = []
    for bucket in buckets():
        tensors = dict(bucket.tensors)

        def load(update: Update, tensors: dict[str, Tensor] = tensors) -> None:
            body = update("http://a:1")
            path = Path(body["path"])
            assert body == update("http://b:2") == {"path": str(path), "crc32": crc32_of(path)}
            found = load_file(path)
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in found)
            folders.append(path.parent)

        transport.send(bucket, load)
        # One layer is in memory as a file then, and not as tensors too.
        assert bucket.tensors == {} and not folders[-1].exists()
    assert len(set(folders)) == 3
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rl.engine.transport_dir=.*missing.*Name a folder"):
        FileTransport(tmp_path / "missing")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    transport = FileTransport(tmp_path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
    try:
        with pytest.raises(EngineError, match=r"a bucket of 58 bytes cannot be written \(.*File too large.*\)\. Free"):
            transport.send(buckets()[0], lambda update: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    transport.close()
    assert list(tmp_path.iterdir()) == []
