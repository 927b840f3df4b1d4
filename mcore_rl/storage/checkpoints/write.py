"""Writing a sharded state: all ranks plan together, each writes alone, and rank 0 finishes.

Megatron plans which rank writes which part of which tensor. Its `save` is not used beyond that: an error on rank 0
alone, such as a full disk under `common.pt` or `.metadata`, would leave the other ranks waiting in a collective.
"""

import queue
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from mcore_rl.config.changes import config_changes, listing
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.agree import on_every_rank, on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.patches.gpu_packages import writer_choice
from mcore_rl.metrics.attempts_file import NUMERICS
from mcore_rl.model.build import unwrap
from mcore_rl.storage import checkpoint
from mcore_rl.storage.archives import FileRange, recorded_crc32
from mcore_rl.storage.checkpoints.read import StoredCheckpoint, inspect, read
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.storage.files import checkpoint_errors_explained, flush_to_disk, room_at
from mcore_rl.storage.megatron_lm import SHARDING_METADATA, common_state

FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """The files that one rank wrote."""

    results: list[WriteResult]
    files: dict[str, int]
    """Number of bytes of each file, by name."""
    crc32: dict[str, str]
    """CRC-32 of each file in hexadecimal, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePlan:
    """This rank's part of a save, in host memory, with the writer for it."""

    path: Path
    writer: FileSystemWriterAsync
    metadata: Metadata | None
    """Metadata of the whole checkpoint; on rank 0 only."""
    buckets: list[Any]
    common: dict[str, Any] | None
    """State that is the same on all ranks; on rank 0 only."""

    def without_data(self) -> "SavePlan":
        """Return what `finish` needs when another process writes; the copies of tensors are dropped."""
        self.writer.write_buckets = None
        return replace(self, buckets=[], common=None)

    def write(self) -> WrittenFiles:
        """Write this rank's files; no communication, so that a forked process can. CheckpointError when it fails."""
        transforms = [self.writer.transforms] if hasattr(self.writer, "transforms") else []
        results: list[WriteResult] = []
        names = [name for _, name, _ in self.buckets]
        with checkpoint_errors_explained(self.path, "writing"):
            for bucket in self.buckets:
                results += _write_bucket(transforms, bucket, self.path)
            if self.common is not None:
                # To an open file: given a path, torch would put the file's name into the archive.
                with (self.path / checkpoint.COMMON).open("wb") as file:
                    torch.save(self.common, file)
                flush_to_disk(self.path / checkpoint.COMMON)
                names.append(checkpoint.COMMON)
            archives: dict[str, list[FileRange]] = {}
            for result in results:
                stored = result.storage_data
                place = FileRange(stored.relative_path, stored.offset, stored.length)
                archives.setdefault(place.file, []).append(place)
            return WrittenFiles(
                results=results,
                files={name: (self.path / name).stat().st_size for name in names},
                crc32={name: recorded_crc32(self.path / name, archives.get(name, ())) for name in names},
            )


class ShardPlanner:
    """Plans saves of one state of constant structure, and spreads them over the data-parallel ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._strategy = _PlanOnly(FORMAT.sharded_backend, FORMAT.sharded_backend_version, thread_count=1)
        self._shares = FullyParallelSaveStrategyWrapper(self._strategy, mesh.dp_cp.group, do_cache_distribution=True)
        self._is_checked = False

    def plan(self, state: dict[str, Any], path: Path) -> SavePlan:
        """Collective over the world: plan to write `state` to the existing empty folder `path`.

        Tensors on a GPU are copied to the host. Those on the CPU are not: a write that does not fork must end before
        they change.
        """
        # Whether shards make up each tensor depends on the structure alone, and the check gathers all ranks' shards.
        shards, common = save_preprocess(state, validate_access_integrity=not self._is_checked)
        self._is_checked = True
        self._shares.apply_saving_parallelization(shards)
        self._strategy.async_save(shards, path, **writer_choice())
        writer, metadata = self._strategy.planned()
        return SavePlan(
            path=path,
            writer=writer,
            metadata=metadata,
            buckets=FileSystemWriterAsync.preload_tensors(writer.write_buckets, non_blocking=True),
            common=common if dist.get_rank() == 0 else None,
        )


def finish(
    plan: SavePlan,
    written: WrittenFiles,
    mesh: Mesh,
    model: ModelConfig,
    step: int,
    *,
    program: str = "",
    settings: Mapping[str, Any] | None = None,
    inputs: Mapping[str, dict[str, str]] | None = None,
    base: Mapping[str, str] | None = None,
) -> checkpoint.Marker | None:
    """Collective over the world: rank 0 adds metadata and, last, the marker to the files of all ranks.

    `program`, `settings`, `inputs` and `base` are the marker's.

    Returns the marker on rank 0, None elsewhere. CheckpointError on all ranks when it fails.
    """
    gathered: list[Any] | None = [None] * mesh.world.size if mesh.world.rank == 0 else None
    dist.gather_object(written, gathered, dst=0)

    def complete() -> checkpoint.Marker:
        assert plan.metadata is not None and gathered is not None
        with checkpoint_errors_explained(plan.path, "finishing"):
            plan.writer.finish(plan.metadata, [of_rank.results for of_rank in gathered])
            save_config(FORMAT, str(plan.path))
            files = {name: size for of_rank in gathered for name, size in of_rank.files.items()}
            crc32 = {name: crc for of_rank in gathered for name, crc in of_rank.crc32.items()}
            for name in (checkpoint.METADATA, checkpoint.FORMAT_FILE):
                files[name] = (plan.path / name).stat().st_size
                crc32[name] = crc32_of(plan.path / name)
            marker = checkpoint.Marker(
                step=step,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=mesh.world.size,
                mesh=describe_mesh(mesh),
                model=model.model_dump(mode="json"),
                megatron=checkpoint.megatron_version(),
                files=dict(sorted(files.items())),
                crc32=dict(sorted(crc32.items())),
                program=program,
                settings=dict(settings or {}),
                inputs=dict(inputs or {}),
                base=dict(base or {}),
                numerics=NUMERICS,
            )
            # The names of all files before the marker: a crash must not leave a marker of files that are not there.
            flush_to_disk(plan.path)
            checkpoint.write_marker(plan.path, marker)
        return marker

    return on_rank_zero(complete)


def write_now(plan: SavePlan) -> WrittenFiles:
    """Collective over the world: write on every rank; the first failure is raised on all."""
    return on_every_rank(plan.write)


def describe_mesh(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the mesh's axes: two runs with the same sizes divide a model in the same way."""
    axes = {name: getattr(mesh, name).size for name in ("tp", "pp", "cp", "dp", "ep", "etp")}
    return axes | {"vpp": mesh.config.vpp}


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point at which it would start to write."""

    _planned: tuple[FileSystemWriterAsync, Metadata | None]

    def planned(self) -> tuple[FileSystemWriterAsync, Metadata | None]:
        """Return the writer of the last `async_save`, and the metadata on rank 0."""
        return self._planned

    def _get_save_and_finalize_callbacks(self, writer: Any, plan: Any, *_: Any) -> AsyncRequest:
        self._planned = writer, plan[1]
        return AsyncRequest(None, (), [])


def _write_bucket(transforms: list[Any], bucket: Any, path: Path) -> list[WriteResult]:
    """Write one file, which is on the disk when this returns."""
    # Megatron calls this function in a process of its own: it answers by a queue, and counts its work in another.
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running: queue.Queue[int] = queue.Queue()
    running.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, results, running, use_fsync=True)
    _, outcome = results.get()
    if isinstance(outcome, Exception):
        # Torch's archive writer raises an error of its own after the file's: the file's is the one that helps.
        reason: BaseException | None = outcome
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        if reason is not None:
            raise reason
        raise CheckpointError(f"writing {path / bucket[1]} failed: {outcome}. {room_at(path)}") from outcome
    written: list[WriteResult] = outcome
    return written


def sharding_metadata(mesh: Mesh) -> dict[str, Any]:
    """Return the `metadata` argument of Megatron's `sharded_state_dict`."""
    return SHARDING_METADATA | {"dp_cp_group": mesh.dp_cp.group}


def weights_state(chunks: Sequence[nn.Module], mesh: Mesh) -> dict[str, Any]:
    """Return the chunks' weights and buffers as shards, under the names that Megatron-LM gives chunks."""
    return {
        name: unwrap(chunk).sharded_state_dict(metadata=sharding_metadata(mesh))
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }


def trained_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a `weights_state` that a checkpoint of adapters has: adapters, and a scalar head."""

    def is_trained(leaf: Any) -> bool:
        return checkpoint.ADAPTER in leaf.key or leaf.key in (checkpoint.SCORE_WEIGHT, checkpoint.SCORE_SHIFT)

    found: dict[str, Any] = extract_matching_values(weights, is_trained)[0]
    return found


def without_absent_extras(state: dict[str, Any], stored: StoredCheckpoint) -> dict[str, Any]:
    """Return `state` without the extra states that the checkpoint lacks: other layers may have written it."""

    def is_there(leaf: Any) -> bool:
        extra = isinstance(leaf, ShardedObject) and checkpoint.EXTRA_STATE in leaf.key
        return not extra or leaf.unique_key in stored.objects

    present: dict[str, Any] = extract_matching_values(state, is_there)[0]
    return present


@torch.no_grad()
def put_weights(chunks: Sequence[nn.Module], loaded: dict[str, Any]) -> None:
    """Copy into the chunks what `read` returned for `weights_state`."""
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        missing, unexpected = unwrap(chunk).load_state_dict(loaded[name], strict=False)
        left = [key for key in (*missing, *unexpected) if checkpoint.EXTRA_STATE not in key]
        assert not left, f"names were compared before, yet {left} are missing or unexpected"


def save_weights(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    model: ModelConfig,
    folder: Path,
    base: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Collective over the world: write a checkpoint of the weights alone and return its path, `folder/iter_0000000`.

    If `base`, the marker's entry, is given, the checkpoint has only low-rank adapters and a scalar head.
    CheckpointError on all ranks when it cannot be written, or is there already.
    """
    final, writing = checkpoint.path_of_step(folder, 0), folder / f"{checkpoint.WRITING}weights"
    on_rank_zero(partial(_make_room, final, writing))
    weights = weights_state(chunks, mesh)
    state = (trained_weights(weights) if base else weights) | common_state(
        model, describe_mesh(mesh), mesh.world.size, 0, {}
    )
    plan = ShardPlanner(mesh).plan(state, writing)
    finish(plan, write_now(plan), mesh, model, 0, base=base)

    def give_name() -> None:
        with checkpoint_errors_explained(final, "naming"):
            checkpoint.publish(writing, final)

    on_rank_zero(give_name)
    return final


def load_weights(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    model: ModelConfig,
    path: Path,
    *,
    verify_checksums: bool = True,
    allowed: tuple[str, ...] | None = None,
) -> StoredCheckpoint:
    """Collective over the world: fill the chunks from a checkpoint written on any mesh, whatever else it holds.

    A model with scores takes from a checkpoint with logits the layers alone: its head stays as it is, and the
    checkpoint's output layer and MTP layers are left out. `has_scores` of the result shows which it was. Low-rank
    adapters stay as they are where the checkpoint has none.

    `path` is a checkpoint, a folder of them (the newest is taken), or a run's folder. An optimizer that has its own
    copy of the weights needs `reload_model_params` afterwards. `allowed` as for `read`.

    Raises:
        CheckpointError: on all ranks: it is damaged, or of another model, be it only by a setting that changes
            the result of these weights; also a checkpoint with scores for a model with logits.
    """
    stored = inspect(path, verify_checksums=verify_checksums)
    state = without_absent_extras(weights_state(chunks, mesh), stored)
    is_new_head = model.head == "score" and not stored.has_scores
    stored_layers = stored
    if is_new_head:
        layers = {name: shape for name, shape in stored.shapes.items() if not name.startswith(checkpoint.LOGIT_PARTS)}
        stored_layers = replace(stored, shapes=layers)

    def is_stored(leaf: Any) -> bool:
        is_adapter = checkpoint.ADAPTER in leaf.key and not stored.has_adapters
        return not (is_adapter or (is_new_head and leaf.key in (checkpoint.SCORE_WEIGHT, checkpoint.SCORE_SHIFT)))

    wanted, own = extract_matching_values(state, is_stored)
    loaded = read(wanted, stored_layers, mesh, model, allowed=allowed)
    for name, tensors in own.items():
        loaded[name] |= {key: shard.data for key, shard in tensors.items()}
    put_weights(chunks, loaded)
    return stored


def refuse_other_adapters(stored: StoredCheckpoint, lora: LoraConfig) -> None:
    """Raise a CheckpointError where the adapters of a checkpoint would add something else to a model with `lora`."""
    if not stored.has_adapters:
        return
    assert stored.marker is not None, "only this program writes adapters"
    if changes := config_changes(stored.marker.settings.get("lora", {}), lora, "lora."):
        raise CheckpointError(
            f"{stored.path} has other low-rank adapters:\n{listing(changes)[0]}\nSet the section `lora` as there, or "
            "add them to the weights, with `mcore-rl convert export --merge`, and import the result"
        )


def _names(chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _make_room(final: Path, writing: Path) -> None:
    if final.exists():
        raise CheckpointError(f"{final} exists. Move it away, or save to another folder")
    with checkpoint_errors_explained(writing, "making"):
        shutil.rmtree(writing, ignore_errors=True)
        # Two folders below the run's, each alone: a run's folder that was renamed is not made anew.
        for folder in (writing.parent.parent, writing.parent, writing):
            folder.mkdir(exist_ok=True)
