"""Functions of ranks for tests of converted checkpoints; in this file, ranks do not import transformers."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model import hf_stream
from mcore_rl.model.build import build_model, local_shards
from mcore_rl.model.inputs import localize
from mcore_rl.storage.checkpoints.write import load_weights
from tests.parallel.parity import LogitsHead


def logits_of_checkpoints(
    mesh_config: MeshConfig, checkpoints: dict[str, tuple[ModelConfig, Path]], tokens_BS: Tensor
) -> dict[str, list[Tensor]]:
    """On a rank: return, by name, the logits of each sequence, where the rank has the last stage."""
    settings = PlatformConfig(layers="torch")
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, (model, path) in checkpoints.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        load_weights(chunks, mesh, model, path)
        for chunk in chunks:
            chunk.eval()
        sequences = [
            Microbatch(
                tokens_BS=tokens_S[None],
                labels_BS=tokens_S[None],
                loss_mask_BS=torch.ones(1, len(tokens_S)),
                position_ids_BS=torch.arange(len(tokens_S))[None],
            )
            for tokens_S in tokens_BS
        ]
        with torch.no_grad():
            microbatches = [localize(sequence, mesh.cp, platform.device) for sequence in sequences]
            outputs = run_pass(chunks, microbatches, LogitsHead(mesh), backward=False)
        found[name] = [entry["logits"] for entry in outputs]
    return found


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still exist, and the most that there were at a time."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage().data_ptr()) not in self._known:
                size = tensor.untyped_storage().nbytes()
                self.live += 0 if self._users[key] else size
                self.most = max(self.most, self.live)
                self._users[key] += 1
                weakref.finalize(tensor, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._users[key] -= 1
        self.live -= 0 if self._users[key] else size


@dataclass(frozen=True)
class Streamed:
    """What a rank saw of the weights that one rank gathered."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], str]]
    """Type, shape and SHA-256 of each tensor, on the gathering rank."""
    buckets: dict[str, int]
    """Bytes of each bucket."""
    most_bytes: int
    """Bytes of all tensors that existed for it at a time."""


def streamed_weights(
    mesh_config: MeshConfig, checkpoints: dict[str, tuple[ModelConfig, Path]], message_bytes: int
) -> dict[str, Streamed]:
    """On a rank: gather the weights of each model on rank 1, or the only one, in messages of few bytes."""
    hf_stream.MESSAGE_BYTES = message_bytes
    settings = PlatformConfig(layers="torch")
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, (model, path) in checkpoints.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        load_weights(chunks, mesh, model, path)
        live = LiveBytes(shard.data for shard in local_shards(chunks))
        tensors, buckets = {}, {}
        with live:
            for bucket in hf_stream.WeightStream(chunks, mesh, model, to_rank=min(1, mesh.world.size - 1)):
                if not buckets:
                    live.most = 0  # before the first bucket ranks exchange their lists of tensors
                buckets[bucket.name] = bucket.num_bytes
                tensors |= {tensor_name: described(tensor) for tensor_name, tensor in bucket.tensors.items()}
        found[name] = Streamed(tensors, buckets, live.most)
    return found


def described(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], str]:
    """Return type, shape and SHA-256 of a tensor in fp32."""
    return tensor.dtype, tuple(tensor.shape), sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def weight_bytes(mesh_config: MeshConfig, models: dict[str, ModelConfig]) -> dict[str, tuple[int, int]]:
    """On a rank: return, by model, its pipeline stage and the bytes of its weights."""
    settings = PlatformConfig(layers="torch")
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, model in models.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        storages = {
            shard.data.untyped_storage().data_ptr(): shard.data.untyped_storage().nbytes()
            for shard in local_shards(chunks)
        }
        found[name] = (mesh.pp.rank, sum(storages.values()))
    return found
