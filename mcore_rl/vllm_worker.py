"""Loaded inside vLLM's workers: three weight-transfer backends for vLLM's public registry, on CPUs and GPUs.

It imports nothing of this package, and needs vLLM and what that needs alone. The folder above has to be on PYTHONPATH:

    --worker-extension-cls mcore_rl.vllm_worker.Extension --weight-transfer-config '{"backend": "mcore_files"}'
"""

import base64
import json
import math
import platform
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

BLOCK_BYTES = 1 << 20


@dataclass
class FileUpdate(base.WeightTransferUpdateInfo):
    """One bucket in files that this worker can read."""

    files: list[dict[str, str]] = field(default_factory=list)
    """Path of each file, and its CRC-32 in eight hexadecimal digits (`crc32`); also the `name` and `version` of one
    that `take_files` has kept."""


@dataclass
class SourceUpdate(base.WeightTransferUpdateInfo):
    """One bucket that comes from a source which stays open during an update."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    """Names of torch's types, such as "bfloat16"."""
    shapes: list[list[int]] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    """A group to join: backend, host, port, rank (of the server's first worker), size, timeout_s. Or handles of memory,
    with bytes in base64, by the GPU's UUID or the machine's name. Empty: the source of the bucket before."""


class ReloadEngine(base.WeightTransferEngine[base.WeightTransferInitInfo, Any]):
    """Loads buckets of whole modules between `start_weight_update` and `finish_weight_update`."""

    init_info_cls = base.WeightTransferInitInfo
    _kernels: Sequence[tuple[Any, Any]] = ()
    """Quantization methods and their kernels for experts, from before the update."""

    def init_transfer_engine(self, init_info: base.WeightTransferInitInfo) -> None:
        """Do nothing: an update describes itself."""

    def start_weight_update(self) -> None:
        """Let every layer take new weights in the format of checkpoints."""
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        self._kernels = [
            (method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None
        ]
        if self.device.type == "cpu":
            # vLLM 0.32 and 0.33 pack experts for the CPU's kernel only while a layer has no kernel yet
            # (unquantized_fused_moe_method.py): otherwise new experts would be read as if they were packed.
            for method, _ in self._kernels:
                method.moe_kernel = None
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; the base class would wait for an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Any) -> None:
        """Load one bucket."""
        with torch.device(self.device):
            self.model.load_weights(self._tensors(update_info))

    def finish_weight_update(self) -> None:
        """Put the new weights in use."""
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        self.end_update()

    def end_update(self) -> None:
        """Give layers that got no weights, which are still packed as their old kernel wants them, this kernel back."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    def shutdown(self) -> None:
        """Do nothing: files and groups are of one update."""

    def _tensors(self, update_info: Any) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


class FileEngine(ReloadEngine):
    """Reads buckets from safetensors files, in shared memory or on a shared disk."""

    update_info_cls = FileUpdate

    @cached_property
    def bases(self) -> "Bases":
        """Files whose bytes this worker keeps."""
        return Bases()

    def _tensors(self, update_info: FileUpdate) -> Iterator[tuple[str, Tensor]]:
        for one in update_info.files:
            tensors = self.bases.tensors(one) if "version" in one else read_tensors(one["path"], one["crc32"])
            for name, tensor in tensors:
                # Never what is kept itself, which a module might hold, or change.
                yield name, tensor.to(self.device, copy="version" in one)


class Bases:
    """Bytes of the last version of files, in main memory: differences are never applied to what a GPU holds, which
    kernels have repacked. A version is two words; those with another first word are of no use any more.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def take(self, file: Mapping[str, str]) -> str:
        """Keep the bytes of a file, which are itself, or a difference to the version `base`. Returns why it is refused:
        what is kept is as before then. Returns "" if it is kept, also if it was already.
        """
        name, version, base = file["name"], file["version"], file["base"]
        first = version.split()[0]
        self._kept = {other: kept for other, kept in self._kept.items() if kept[0].split()[0] == first}
        has, old = self._kept.get(name, ("", {}))
        if has == version:
            return ""
        if base and base != has:
            return f"the version here is {has or 'none'}, and the difference is to {base}"
        try:
            # Copies: a file's tensors may be its pages, and it is deleted.
            read = {tensor: data.clone() for tensor, data in read_tensors(file["path"], file["crc32"])}
            new = changed(old, read) if base else read
        except (OSError, ValueError, KeyError, zlib.error) as error:
            return repr(error)
        # Only now, as every CRC-32 was right: a second call would find the version, and do nothing.
        self._kept[name] = version, new
        return ""

    def tensors(self, file: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of a file that was taken. Raises ValueError if the version kept here is another."""
        version, tensors = self._kept.get(file["name"], ("none", {}))
        if version != file["version"]:
            raise ValueError(f"the version of {file['name']} here is {version}, and {file['version']} is to be loaded")
        return iter(tensors.items())


def read_tensors(path: str, crc: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file. Raises ValueError if it has another CRC-32."""
    if (found := checksum(Path(path))) != crc:
        raise ValueError(
            f"{path} has the CRC-32 {found}, the trainer wrote {crc}: it is damaged, or another file here than there."
        )
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # safetensors' files are no dicts
            yield name, file.get_tensor(name)


def changed(old: Mapping[str, Tensor], differences: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new tensors, from old ones and differences as `mcore_rl.rl.engines.delta.difference` makes them. Raises
    ValueError if the CRC-32 of a result is not the trainer's.
    """

    def new(name: str) -> Tensor:
        tensor, data = old[name], differences[name].numpy().tobytes()
        planes = np.frombuffer(zlib.decompress(data[4:]), np.uint8).reshape(tensor.element_size(), -1)
        changes_N = torch.from_numpy(np.array(planes.T, order="C")).view(-1)
        bytes_N = tensor.view(-1).view(torch.uint8) ^ changes_N
        if struct.pack("<I", zlib.crc32(bytes_N.numpy().data)) != data[:4]:
            raise ValueError(f"{name} does not have the trainer's CRC-32 with its difference")
        return bytes_N.view(tensor.dtype).view(tensor.shape)

    with ThreadPoolExecutor() as pool:
        return dict(zip(differences, pool.map(new, differences), strict=True))


class SlotEngine(ReloadEngine):
    """Receives buckets from a source that is open during an update: memory, a slot, to which the trainer's rank on this
    worker's device writes each of them.
    """

    update_info_cls = SourceUpdate
    _source: Any = None

    def end_update(self) -> None:
        """Close the source."""
        self._source = None
        super().end_update()

    def _tensors(self, update_info: SourceUpdate) -> Iterator[tuple[str, Tensor]]:
        if update_info.source:
            self._source = self._open(update_info.source)
        if self._source is None:
            raise ValueError("no source has been named since the last update: the first bucket names it")
        dtypes = [getattr(torch, dtype) for dtype in update_info.dtypes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        parts = zip(update_info.names, self._received(sizes), dtypes, update_info.shapes, strict=True)
        for name, bytes_N, dtype, shape in parts:
            yield name, bytes_N.view(dtype).view(shape)

    def _open(self, source: dict[str, Any]) -> Any:
        device = torch.device(self.device)
        is_cpu = device.type == "cpu"
        own = platform.node() if is_cpu else str(torch.cuda.get_device_properties(device).uuid)
        if own not in source:
            raise ValueError(f"this worker is on {own}, and the trainer shares memory of {', '.join(source)}")
        handle = [base64.b64decode(value) if isinstance(value, str) else value for value in source[own]]
        if not is_cpu:
            # Without the name of torch's file that counts readers: the trainer counts for workers, which may be killed.
            handle[0], handle[4] = device.index, b"/none"
        new = torch.UntypedStorage._new_shared_filename_cpu if is_cpu else torch.UntypedStorage._new_shared_cuda
        return torch.empty(0, dtype=torch.uint8, device=device).set_(new(*handle))

    def _received(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield the bytes of tensors of these sizes in bytes."""
        if sum(sizes) > len(self._source):
            raise ValueError(f"{len(sizes)} tensors have {sum(sizes)} bytes, and the slot has {len(self._source)}")
        # Copies: a module keeps tensors until it has all, and the slot has the next bucket after the answer.
        return (part_N.clone() for part_N in self._source[: sum(sizes)].split(sizes))


class BroadcastEngine(SlotEngine):
    """Receives buckets over a process group of the trainer's sending rank and all workers of all servers."""

    def _open(self, source: dict[str, Any]) -> Any:
        config = self.parallel_config
        return join(source, source["rank"] + config.data_parallel_index * config.world_size + config.rank)

    def _received(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        for size in sizes:
            bytes_N = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._source.broadcast(bytes_N, 0).wait()
            yield bytes_N


def checksum(file: Path) -> str:
    """Return the CRC-32 of a file in eight hexadecimal digits."""
    crc = 0
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def join(group: dict[str, Any], rank: int) -> Any:
    """Collective over the group: return it; torch's world, which is vLLM's own, is not touched."""
    limit = timedelta(seconds=float(group["timeout_s"]))
    store = PrefixStore(str(group["key"]), TCPStore(group["host"], int(group["port"]), is_master=False, timeout=limit))
    if group["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, int(group["size"]), options)
    return dist.ProcessGroupGloo(store, rank, int(group["size"]), limit)


WeightTransferEngineFactory.register_engine("mcore_files", FileEngine)
WeightTransferEngineFactory.register_engine("mcore_broadcast", BroadcastEngine)
WeightTransferEngineFactory.register_engine("mcore_slots", SlotEngine)


class Extension:
    """Base class that vLLM adds to its workers: importing this module registers the backends there."""

    def take_files(self, files: str) -> dict[str, str]:
        """Keep the bytes of files, a list in JSON as `Bases.take` has them. Returns why some are refused, by name."""
        worker: Any = self
        reasons = {file["name"]: worker.weight_transfer_engine.bases.take(file) for file in json.loads(files)}
        return {name: why for name, why in reasons.items() if why}

    def abort_update(self) -> None:
        """End an update that was left open or failed, also where none was.

        vLLM ends the session itself after an error, but modules with a part of their weights keep it: the next update
        would count them as whole too early, and use uninitialized memory. Weights are then old, new or both.
        """
        worker: Any = self
        worker._weight_update_active = False
        engine = worker.weight_transfer_engine
        if engine is None:
            return
        for module in engine.model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()
        engine.end_update()
        engine.reset_weight_update_target()
