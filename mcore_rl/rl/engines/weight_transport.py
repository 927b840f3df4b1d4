"""Transports of weights to servers, bucket by bucket. `ServerApi.load` gets the description of a bucket.

The server side of both transports is `mcore_rl/vllm_worker.py`.
"""

import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mcore_rl.errors import EngineError
from mcore_rl.model.hf_stream import Bucket
from mcore_rl.storage.checksums import crc32_of

Load = Callable[[Callable[[str], Mapping[str, Any]]], None]
"""Function that makes all living servers load a bucket at the same time; its argument returns the description of the
bucket for the server at an address."""


class FileTransport:
    """Writes each bucket to its own folder, which is deleted once the servers have read it."""

    def __init__(self, folder: Path) -> None:
        """Create the transport in `folder`: shared memory of this node, or a disk that all servers' nodes mount there.

        Raises:
            EngineError: if the folder is not writable.
        """
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
    """Broadcasts each tensor to all workers of all servers, with NCCL between GPUs and gloo between CPUs.

    Each push creates a new group of the living servers, because all members would hang on a dead member. If a member
    dies during a push, all its servers have failed, because the weights that they received are unknown.
    """

    def __init__(self, host: str, workers: Mapping[str, int], device: torch.device, timeout_s: float) -> None:
        """Prepare a push.

        Args:
            host: Address of this node that the servers can reach.
            workers: Number of workers of each server, by the server's address.
            device: Device of the weights, which determines the backend.
            timeout_s: Time limit of a broadcast, in seconds.
        """
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
