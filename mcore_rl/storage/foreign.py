"""Pickles of foreign origin, read without running any program in them; `archives` has the files that they are in.

Only the classes named here are ever called, whatever a pickle asks for. A checkpoint is checked before it is loaded
(`mcore_rl.storage.checkpoints.read`); the readers in `mcore_rl.megatron.patches.replacements`, in place of torch's and
Megatron's own, make sure that nothing is run even if the check and torch disagree on a file's content, or the file
changes in between.
"""

import io
import pickle
import tomllib
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import torch

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.storage.archives import MALFORMED, SliceableBytes, archive_records, record_bytes

Allowed = dict[tuple[str, str], Any]

DTYPES: Allowed = {
    ("torch", str(dtype).removeprefix("torch.")): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
PLAIN: Allowed = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict, **DTYPES}


class Opaque:
    """Stands for an object of an unknown class: it accepts whatever a pickle does to it, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "Opaque":
        """Drop the arguments."""
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        """Drop the state."""


class Stored(Opaque):
    """An object of `.metadata` by its attributes: importing the classes of torch's checkpoints takes a second."""

    offset: Any = None
    """A part's place in its tensor, which the index of an object lacks."""

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes; the state of TensorProperties is a tuple that begins with the type of the elements."""
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})


class StoredTensor(Stored):
    """A tensor in `.metadata`, as torch's TensorStorageMetadata."""

    size: Any
    properties: Any
    chunks: Any


class StoredMetadata(Stored):
    """The contents of `.metadata`, as torch's Metadata."""

    state_dict_metadata: dict[str, Any]
    """A StoredTensor for each tensor, another object for an object, by key."""
    storage_data: dict[Any, Any] | None = None
    """File, offset and length of each part, by its place: the key `fqn`, and a tensor's `offset`."""


TORCHS = "torch.distributed.checkpoint"
MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
"""Megatron 0.15's class in the place of torch's Metadata, with an additional field, which nothing reads."""
_NAMES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))


def _stand_ins(table: str, stand_in: type[Opaque]) -> Allowed:
    return {(module, name): stand_in for module, names in _NAMES[table].items() for name in names.split()}


METADATA: Allowed = {
    **PLAIN,
    **_stand_ins("metadata_stored", Stored),
    **_stand_ins("metadata_opaque", Opaque),
    (f"{TORCHS}.metadata", "Metadata"): StoredMetadata,
    (f"{TORCHS}.metadata", "TensorStorageMetadata"): StoredTensor,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # The folder that torch was asked to save to; the second is the module's name in Python 3.13.
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    MCORE_METADATA: StoredMetadata,
}
"""Classes in the `.metadata` of a distributed checkpoint."""
SAVED: Allowed = PLAIN | _stand_ins("saved", Opaque)
"""Classes in Megatron's states besides tensors: neither the check nor the load calls any other class."""


class AllowListUnpickler(pickle.Unpickler):
    """Calls the classes of `allowed` only; any other is refused by name, or become `Opaque`."""

    def __init__(self, file: io.BufferedIOBase | io.BytesIO, allowed: Allowed, *, opaque: bool = False) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._opaque = opaque

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of the allow-list; nothing is imported."""
        known = self._allowed.get((module, name))
        if known is not None:
            return known
        if self._opaque:
            return Opaque
        raise _refusal(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the reference to a tensor's storage as it is: no elements are read."""
        return pid


class _LoadingUnpickler(pickle.Unpickler):
    """Makes the objects of the classes of SAVED; torch asks it for each object of an archive (`pickle_module`)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in SAVED:
            raise _refusal(module, name)
        return super().find_class(module, name)


class _LoadingModule:
    __name__ = "pickle"
    Unpickler = _LoadingUnpickler


def load_metadata(path: Path) -> StoredMetadata:
    """Return the `.metadata` of a distributed checkpoint; DamagedCheckpointError if it is no pickle."""
    file = path / ".metadata"
    try:
        loaded = AllowListUnpickler(io.BytesIO(file.read_bytes()), METADATA).load()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}. Is {path} a torch_dist checkpoint?") from error
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}.") from None
    except MALFORMED as error:
        raise DamagedCheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}). Take another copy."
        ) from error
    if not isinstance(loaded, StoredMetadata):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}, wanted torch's Metadata.")
    return loaded


def load_common(data: SliceableBytes, what: str) -> dict[str, Any]:
    """Return the dict of a `common.pt`; objects other than plain values are Opaque, and tensors are left out."""
    allowed = PLAIN | {("argparse", "Namespace"): Namespace}
    loaded = _unpickled(data, what, allowed, opaque=True)
    return loaded if isinstance(loaded, dict) else {}


def load_saved(data: bytes, what: str, map_location: str | None = None) -> Any:
    """Return what `torch.save` wrote, by classes of SAVED alone; CheckpointError with `what` as `refuse_programs`."""
    refuse_programs(data, what)
    try:
        # With weights_only=True torch takes no unpickler but its own, whose classes are other ones than SAVED.
        return torch.load(io.BytesIO(data), map_location, pickle_module=_LoadingModule, weights_only=False)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}.") from None


def refuse_programs(data: SliceableBytes, what: str) -> None:
    """Raise a CheckpointError, naming `what`, if loading the archive would call more than the classes of SAVED."""
    _unpickled(data, what, SAVED, opaque=False)


def refuse_programs_inside(state: Any, what: str) -> None:
    """Raise a CheckpointError, naming `what`, if an extra state of TransformerEngine contains a program: its fp8 scales
    are a pickle in a tensor or (before 2.0) torch.save's format, which layers and Megatron 0.16 always load.
    """
    if isinstance(state, io.BytesIO):
        _unpickled(state.getvalue(), what, _extra_states(), opaque=False)
    elif isinstance(state, torch.Tensor) and state.numel():
        try:
            pickled = io.BytesIO(state.detach().cpu().numpy().tobytes())
            AllowListUnpickler(pickled, _extra_states()).load()
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}.") from None
        except MALFORMED as error:
            raise CheckpointError(
                f"{what} cannot be read ({type(error).__name__}: {error}). Take another copy."
            ) from error


def _extra_states() -> Allowed:
    return SAVED | {
        ("torch._tensor", "_rebuild_from_type_v2"): Opaque,
        ("torch.storage", "_load_from_bytes"): _check_storage,
        # Megatron 0.19 uses this instead of the function above.
        ("megatron.core.safe_globals", "safe_load_from_bytes"): _check_storage,
        **_stand_ins("extra_states", Opaque),
    }


def _check_storage(data: bytes) -> Opaque:
    """Replacement for torch's function that loads a storage inside a pickle, in the format before archives."""
    file = io.BytesIO(data)
    # A magic number, a version, the machine, the storage and its keys, each in a pickle; elements follow.
    first, *_ = (AllowListUnpickler(file, SAVED).load() for _ in range(5))
    if first != torch.serialization.MAGIC_NUMBER:
        raise pickle.UnpicklingError("a storage is not in torch's format")
    return Opaque()


def _unpickled(data: SliceableBytes, what: str, allowed: Allowed, *, opaque: bool) -> Any:
    try:
        pickled = record_bytes(data, archive_records(data), "data.pkl")
        return AllowListUnpickler(io.BytesIO(pickled), allowed, opaque=opaque).load()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}.") from None
    except MALFORMED as error:
        raise CheckpointError(f"{what} cannot be read ({type(error).__name__}: {error}). Take another copy.") from error


def _refusal(module: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"a pickle asks for {module}.{name}, which could be any program and is not run. Is this file from "
        "somebody you trust, load and save it again with the program that wrote it"
    )
