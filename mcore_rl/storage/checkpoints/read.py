"""Reading a sharded state on any mesh, after the stored names, shapes and checksums were compared with those wanted."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.config.changes import config_changes, listing
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.families.same_model import model_changes
from mcore_rl.megatron.agree import from_every_rank, on_every_rank, on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.storage import archives, checkpoint, foreign
from mcore_rl.storage.megatron_lm import args_changes, read_args

MAX_LISTED = 3
"""Most differences that a message lists."""
MALFORMED = (*archives.UNREADABLE, LookupError, ImportError, CheckpointingException)
"""Exceptions that torch and Megatron raise on damaged or foreign files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """Contents of a checkpoint; all its files exist in full length."""

    path: Path
    marker: checkpoint.Marker | None
    """None: Megatron-LM wrote the checkpoint."""
    shapes: dict[str, tuple[int, ...]]
    """Global shape of each tensor, by key."""
    objects: frozenset[str]
    """Keys of the objects that are no tensors."""
    parts: Mapping[str, Sequence[archives.FileRange]]
    """Parts of each tensor and object, by key."""
    args: Mapping[str, Any]
    """Arguments of Megatron-LM's command line in its checkpoints; empty where there is a marker."""
    verify_checksums: bool
    """Whether `read` compares tensors with their checksums before it reads them."""
    base: "StoredCheckpoint | None" = None
    """Base checkpoint with the tensors and objects that are not in `parts`; None if `parts` has all."""

    @property
    def has_critic(self) -> bool:
        """Whether a critic was trained with the model."""
        return any(name.startswith(checkpoint.CRITIC) for name in self.shapes)

    @property
    def has_optimizer(self) -> bool:
        """Whether training can resume from it with its optimizer state."""
        return self.marker is not None and any(name.startswith(checkpoint.OPTIMIZER) for name in self.shapes)

    @property
    def has_scores(self) -> bool:
        """Whether its model has a scalar head, as reward models and critics have, and no logits."""
        return checkpoint.SCORE_WEIGHT in self.shapes

    @property
    def has_adapters(self) -> bool:
        """Whether its model has low-rank adapters."""
        return any(checkpoint.ADAPTER in name for name in self.shapes)


def inspect(path: Path, *, verify_checksums: bool = True) -> StoredCheckpoint:
    """Collective over the world: find the checkpoint `path`, or the newest in the folder `path`, on rank 0.

    With `verify_checksums`, `read` will compare tensors with their checksums before it reads them.
    CheckpointError on all ranks when there is none, or it is not complete, damaged, or not Megatron's.
    """
    return on_rank_zero(partial(_inspect, path, verify_checksums))


def read(
    state: dict[str, Any], stored: StoredCheckpoint, mesh: Mesh, model: ModelConfig, *, allowed: tuple[str, ...] | None
) -> dict[str, Any]:
    """Collective over the world: return `state` with its shards filled, and the entries common to all ranks.

    Args:
        state: The shards to be filled.
        stored: The checkpoint, as `inspect` found it.
        mesh: The mesh.
        model: The model that the weights are for.
        allowed: The fields and sections of `checkpoint.allow_changes`, in which the checkpoint's model may be another;
            None: no config allows any.

    Raises:
        CheckpointError: On all ranks before anything is read: names or shapes differ, the same weights were something
            else in the checkpoint's model, bytes are not those that were written, or an object asks for a program.
    """
    wanted = load_preprocess(state)[0]
    shapes = _compare(stored, wanted, model)
    _refuse_other_model(stored, model, allowed)
    folders = [stored] if stored.base is None else [stored, stored.base]
    for folder in folders:
        keys = shapes.keys() if folder is stored else shapes.keys() - stored.parts.keys()
        with nullcontext() if folder is stored else _of_base(stored.path):
            on_every_rank(partial(_check_objects, folder, wanted))
            if stored.verify_checksums:
                # Parts first: their message names the tensor.
                on_every_rank(partial(_check_tensors, folder, keys))
                on_every_rank(partial(_check_files, folder, keys | folder.objects))
    if stored.base is None:
        return _loaded(state, stored, mesh)

    def is_in_base(leaf: Any) -> bool:
        key = leaf.unique_key if isinstance(leaf, ShardedObject) else getattr(leaf, "key", None)
        return key is not None and key not in stored.parts

    of_base, own = extract_matching_values(state, is_in_base)
    loaded = _loaded(own, stored, mesh)
    with _of_base(stored.path):
        weights = _loaded(of_base, stored.base, mesh)
    # Only the chunks' weights are taken from the base: its common values, such as the step, belong to another run.
    return loaded | {name: weights[name] | loaded.get(name, {}) for name in of_base}


def _loaded(state: dict[str, Any], stored: StoredCheckpoint, mesh: Mesh) -> dict[str, Any]:
    """Collective over the world: return `state` with its shards filled from the files of a single checkpoint."""
    try:
        with _quiet():
            strategy = FullyParallelLoadStrategyWrapper(
                get_default_load_sharded_strategy(str(stored.path)), mesh.dp_cp.group
            )
            loaded: dict[str, Any] = dist_checkpointing.load(state, str(stored.path), strategy)
    except (CheckpointException, *MALFORMED) as error:
        raise DamagedCheckpointError(
            f"{stored.path} cannot be read: {_reason(error)}. {checkpoint.others(stored.path)}"
        ) from error
    return loaded


@contextmanager
def _of_base(path: Path) -> Iterator[None]:
    """Raise the damage of a base checkpoint as an error that is not of `path`, which has the adapters: it is whole, and
    a run that took an earlier checkpoint in its place would meet the same base.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        raise CheckpointError(
            f"{path} has low-rank adapters alone, and their base is damaged: {error}. Put the base back as it was"
        ) from error


def _inspect(path: Path, verify_checksums: bool) -> StoredCheckpoint:
    path = checkpoint.find_checkpoint(path)
    is_megatron_lm = not (path / checkpoint.MARKER).exists() and (path / checkpoint.FORMAT_FILE).is_file()
    marker = None if is_megatron_lm else checkpoint.check(path)
    if marker is not None:
        archives.check_descriptions(path, marker)
    metadata = foreign.load_metadata(path)
    if (path / checkpoint.COMMON).is_file():
        foreign.refuse_programs((path / checkpoint.COMMON).read_bytes(), str(path / checkpoint.COMMON))
    if is_megatron_lm:
        archives.file_sizes(path, (metadata.storage_data or {}).values())
        _check_origin(path)
    entries = metadata.state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, foreign.StoredTensor)}
    shapes = {name: tuple(entry.size) for name, entry in tensors.items()}
    objects = frozenset(entries.keys() - tensors.keys())
    parts: dict[str, list[archives.FileRange]] = {}
    for index, info in (metadata.storage_data or {}).items():
        if not getattr(info, "transform_descriptors", None):  # compressed parts are checked by torch itself
            parts.setdefault(index.fqn, []).append(archives.FileRange(info.relative_path, info.offset, info.length))
    with _of_base(path):
        base_path = None if marker is None else checkpoint.base_of(path, marker)
        base = None if base_path is None else _inspect(base_path, verify_checksums)
    if base is not None:
        shapes |= {key: base.shapes[key] for key in checkpoint.held_by_base(base.shapes, shapes)}
        objects |= {key for key in checkpoint.held_by_base(base.objects, objects) if checkpoint.EXTRA_STATE in key}
    return StoredCheckpoint(
        path=path,
        marker=marker,
        shapes=shapes,
        objects=objects,
        parts=parts,
        args=read_args(path) if is_megatron_lm else {},
        verify_checksums=verify_checksums,
        base=base,
    )


def _check_objects(stored: StoredCheckpoint, wanted: dict[str, Any]) -> None:
    keys = {leaf.unique_key for leaf in nested_values(wanted) if isinstance(leaf, ShardedObject)}
    for key in sorted(keys):
        for part in stored.parts.get(key, ()):
            archives.check_part(stored.path, key, part)
            with (stored.path / part.file).open("rb") as file:
                data = archives.FilePart(file.fileno(), part.start, part.length)
                foreign.refuse_programs(data, f"{key} in {stored.path / part.file}")


def _check_files(stored: StoredCheckpoint, keys: Collection[str]) -> None:
    if stored.marker is None:
        return
    ranges: dict[str, list[archives.FileRange]] = {}
    for parts in stored.parts.values():
        for part in parts:
            ranges.setdefault(part.file, []).append(part)
    # The same order on all ranks, dealt out in turn, as the parts below.
    needed = sorted({part.file for key in keys for part in stored.parts.get(key, ())})
    for name in needed[dist.get_rank() :: dist.get_world_size()]:
        archives.check_identity(stored.path, stored.marker, name, ranges[name])


def _check_tensors(stored: StoredCheckpoint, keys: Collection[str]) -> None:
    # The same order on all ranks, dealt out in turn: each part is read by one rank.
    every = sorted((part, key) for key in keys for part in stored.parts.get(key, ()))
    for part, key in every[dist.get_rank() :: dist.get_world_size()]:
        archives.check_part(stored.path, key, part)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings about functions of torch that Megatron calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch\.distributed|megatron\.core\.dist_checkpointing)\b")
        yield


def _check_origin(path: Path) -> None:
    """Raise a CheckpointError when a folder without a marker is an incomplete checkpoint of this program."""
    try:
        with _quiet():
            common = dist_checkpointing.load_common_state_dict(str(path))
    except (CheckpointException, *MALFORMED) as error:
        raise CheckpointError(
            f"{path}: what is common to all ranks cannot be read ({_reason(error)}): it is damaged, or of another "
            f"version of Megatron-Core than {checkpoint.megatron_version()}. {checkpoint.others(path)}"
        ) from error
    if checkpoint.OWN_ENTRY in common:
        checkpoint.check(path)


def _compare(stored: StoredCheckpoint, wanted: dict[str, Any], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Collective over the world: return the global shapes of all ranks' tensors; CheckpointError unless stored so."""
    shapes = {leaf.key: tuple(leaf.global_shape) for leaf in nested_values(wanted) if isinstance(leaf, ShardedTensor)}
    all_shapes = {name: shape for of_rank in from_every_rank(shapes) for name, shape in of_rank.items()}
    problems = list(_problems(stored, all_shapes))
    if not problems:
        return all_shapes
    absent = [name for name in sorted(all_shapes) if name not in stored.shapes]
    of_optimizer = [name for name in absent if name.removeprefix(checkpoint.CRITIC).startswith(checkpoint.OPTIMIZER)]
    if stored.has_optimizer and len(of_optimizer) == len(problems):
        raise CheckpointError(
            f"{stored.path} lacks {of_optimizer[0]}: its run had another optimizer for this weight, or none. Set "
            "optim.kind, and what is trained, as in that run, or start another run_dir from its weights, with "
            f"checkpoint.load={stored.path} and checkpoint.load_optimizer=false"
        )
    shown = "; ".join(problems[:MAX_LISTED]) + (
        f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    )
    if stored.has_scores and checkpoint.SCORE_WEIGHT not in all_shapes:
        raise CheckpointError(
            f"{stored.path} is of a reward model or a critic, whose scores are no logits: a language model cannot "
            "start from it. Name the checkpoint that it was trained from"
        )
    if stored.has_adapters and not any(checkpoint.ADAPTER in name for name in all_shapes):
        raise CheckpointError(
            f"{stored.path} has low-rank adapters, and this model has none: it would compute something else. Set the "
            "section `lora` as in its run, or add them to the weights, with `mcore-rl convert export --merge`, and "
            "import the result"
        )
    if checkpoint.HYBRID_NORM in stored.shapes:
        raise CheckpointError(
            f"{stored.path} has the layers of Megatron's HybridModel, in which attention and MLP of a layer are two "
            "layers, and training reads those of GPTModel. Convert it with `mcore-rl convert relayout`, which needs "
            "--reference HF_DIR if another program wrote it"
        )
    settings = config_changes(stored.marker.model, model, "model.") if stored.marker else []
    hint = f" Its settings: {'; '.join(map(str, settings))}." if settings else ""
    raise CheckpointError(
        f"{stored.path} is of another model: {shown}.{hint} Set the model as it was, or load another checkpoint"
    )


def _refuse_other_model(stored: StoredCheckpoint, model: ModelConfig, allowed: tuple[str, ...] | None) -> None:
    changes = model_changes(stored.marker.model, model) if stored.marker else args_changes(stored.args, model)
    refused = [change for change in changes if not change.is_allowed(allowed or ())]
    if not refused:
        return
    listed, keys = listing(refused)
    accept = "" if allowed is None else f", or accept it with checkpoint.allow_changes={keys}"
    raise CheckpointError(
        f"{stored.path} is of a model that computes something else of these weights:\n{listed}\n"
        f"Set the model as it was, or load another checkpoint{accept}"
    )


def _problems(stored: StoredCheckpoint, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in sorted(wanted.items()):
        there = stored.shapes.get(name)
        if there is None:
            yield f"{name} {shape} is not in it"
        elif there != shape:
            yield f"{name} is {there} there, {shape} here"
    for name, shape in sorted(stored.shapes.items()):
        if name not in wanted and not name.startswith((checkpoint.OPTIMIZER, checkpoint.CRITIC)):
            yield f"{name} {shape} is not in this model"


def _reason(error: BaseException) -> str:
    """Return one line: of the first rank that failed, where torch has collected the ranks' errors."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
