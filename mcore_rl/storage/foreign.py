"""Files of foreign origin, read without running any program in them: the archives and pickles that `torch.save` writes.

Each record of an archive has a CRC-32, which torch itself does not compare when it loads. The directory is not read by
`zipfile`, which finds different records than torch in some files: the checked bytes must be the loaded bytes.

Only the classes named here are ever called, whatever a pickle asks for. A checkpoint is checked before it is loaded
(`mcore_rl.storage.checkpoints.read`); the readers at the end, in place of torch's and Megatron's own, make sure that
nothing is run even if the check and torch disagree on a file's content, or the file changes in between.
"""

import io
import os
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint._traverse import set_element

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.storage.checksums import BLOCK_BYTES, PartChecksum, as_hex, crc32, joined

RECORD_MARK = b"PK\3\4"
HEADER_BYTES = 30
"""Length of the header of a record, without its name."""
ENTRY = struct.Struct("<4s6H3L5H2L")
"""Fixed part of a record's entry in the directory."""
EXTRA = struct.Struct("<2H")
"""Kind and length of each of an entry's further fields."""
END, LOCATOR_64, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
"""ZIP signatures: end of central directory, Zip64 locator, Zip64 end record."""
IN_64_BITS = 2**32 - 1
"""Value of a field if its number is in the entry's further field of KIND_64_BITS."""
KIND_64_BITS = 1
HAS_SIZES_BEHIND, HAS_UTF8_NAME = 0x8, 0x800
"""Flags of an entry that torch's writer sets."""
IS_DIRECTORY = 0x10
"""Attribute of MS-DOS, which all writers use, that marks a directory."""
MAX_NAME_BYTES = 500
"""Longest name of a record: torch cuts names at 512 bytes."""
TORCHSCRIPT_RECORD = "constants.pkl"
"""Record by which torch knows a TorchScript program, which it would load in place of the pickle."""


RECORDED_BYTES = 64 << 10
"""Records larger than this are not read for the checksum of a file: the archive's checksum is used."""


class FileRange(NamedTuple):
    """The bytes start <= i < start + length of a file, as torch.save wrote them."""

    file: str
    start: int
    length: int


class SliceableBytes(Protocol):
    """Bytes that are read by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, asked: slice, /) -> bytes: ...


class FilePart:
    """`length` bytes of an open file from `start` on, read when they are sliced."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, asked: slice, /) -> bytes:
        start, stop, _ = asked.indices(self._length)
        return os.pread(self._descriptor, max(0, stop - start), self._start + start)

    def crc32(self, start: int, size: int) -> int:
        """Return the CRC-32 of `size` bytes from `start` on, or of fewer at the end of the file."""
        block = memoryview(bytearray(min(size, BLOCK_BYTES)))
        crc = done = 0
        while done < size:
            wanted = block[: min(BLOCK_BYTES, size - done)]
            count = os.preadv(self._descriptor, [wanted], self._start + start + done)
            if not count:
                break
            crc = crc32(block[:count], crc)
            done += count
        return crc


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """A file in an archive."""

    name: str
    start: int
    size: int
    crc: int
    """CRC-32 of its bytes; 0 if torch was asked to leave it out."""
    is_plain: bool
    """Whether it is not compressed."""


def archive_records(data: SliceableBytes) -> list[ArchiveRecord]:
    """Return the records of an archive in the order of its directory, all of them in the first record's folder.

    An archive that another reader could understand differently is refused, so that the checked bytes are the bytes that
    torch loads: it begins with a record (else torch reads an older format, a bare pickle) and ends with the directory;
    every name is plain ASCII and differs from other names in more than case (torch's lookup ignores case).

    Raises:
        zipfile.BadZipFile: If the bytes are not such an archive.
    """
    if data[: len(RECORD_MARK)] != RECORD_MARK:
        raise zipfile.BadZipFile("it does not begin as an archive of torch.save does")
    start, size, count = _directory(data)
    directory = data[start : start + size]
    records = []
    position = 0
    while position < len(directory):
        record, position = _record(data, directory, position)
        records.append(record)
    if position != size or len(records) != count or not records:
        raise zipfile.BadZipFile(f"its directory has {len(records)} records, {count} are announced")
    folder = f"{records[0].name.partition('/')[0]}/"
    for record in records:
        if not record.name.startswith(folder):
            raise zipfile.BadZipFile(f"{record.name} is not in the folder {folder} of the first record")
    if len({record.name.lower() for record in records}) < len(records):
        raise zipfile.BadZipFile("two of its records have one name")
    if any(record.name == f"{folder}{TORCHSCRIPT_RECORD}" for record in records):
        raise zipfile.BadZipFile("it is a TorchScript program")
    return records


def record_bytes(data: SliceableBytes, found: Sequence[ArchiveRecord], name: str) -> bytes:
    """Return the bytes of the record `name`; BadZipFile if there is none, or its bytes have changed since they were
    written.
    """
    record = record_named(found, name)
    read = data[record.start : record.start + record.size]
    if not record.is_plain or len(read) != record.size or not _is_sound(record, crc32(read)):
        raise zipfile.BadZipFile(f"{record.name} is not what was written")
    return read


def record_named(found: Sequence[ArchiveRecord], name: str) -> ArchiveRecord:
    """Return the record `name` of the folder that all records share; BadZipFile if there is none."""
    wanted = f"{found[0].name.partition('/')[0]}/{name}"
    for record in found:
        if record.name == wanted:
            return record
    raise zipfile.BadZipFile(f"there is no {name}")


def damaged_record(data: FilePart) -> str | None:
    """Return the name of the first record with bytes that have changed since they were written; None if none have."""
    for record in archive_records(data):
        if record.is_plain and not _is_sound(record, data.crc32(record.start, record.size)):
            return record.name
    return None


def recorded_crc32(file: Path, archives: Iterable[FileRange]) -> str:
    """Return the CRC-32 of a file, in hexadecimal, without reading large records.

    It is the CRC-32 of the whole file if the bytes of each large record match the checksum in their archive, which
    `damaged_record` checks.

    Args:
        file: The file.
        archives: Ranges of the file that torch.save wrote. Everything outside of valid archives is read.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        whole = FilePart(opened.fileno(), 0, size)
        large: list[PartChecksum] = []
        for archive in archives:
            if archive.length <= RECORDED_BYTES:
                continue  # so is none of its records
            try:
                records = archive_records(FilePart(opened.fileno(), archive.start, archive.length))
            except zipfile.BadZipFile:
                continue
            large += [
                PartChecksum(archive.start + record.start, record.size, record.crc)
                for record in records
                if record.is_plain and record.crc and record.size > RECORDED_BYTES
            ]
        parts: list[PartChecksum] = []
        position = 0
        for part in [*sorted(large), PartChecksum(size, 0, 0)]:
            if not position <= part.start <= size - part.size:
                # Archives overlap or end beyond the file, which no writer does: the file's own bytes count.
                return as_hex(whole.crc32(0, size))
            between = part.start - position
            parts += [PartChecksum(position, between, whole.crc32(position, between)), part]
            position = part.start + part.size
        crc = joined(parts, size)
        assert crc is not None, f"{parts} do not make up {size} bytes"
        return as_hex(crc)


def _is_sound(record: ArchiveRecord, crc: int) -> bool:
    return record.crc in (0, crc)


def _directory(data: SliceableBytes) -> tuple[int, int, int]:
    """Return the first byte, the length in bytes and the number of records of the directory at the archive's end."""
    end = len(data) - END.size
    mark, *disks, count_here, count, size, start, comment_length = _unpack(END, data, end)
    if mark != b"PK\5\6" or comment_length:
        raise zipfile.BadZipFile("it does not end as an archive of torch.save does")
    locator = end - LOCATOR_64.size
    if data[max(locator, 0) : max(locator, 0) + 4] == b"PK\6\7":
        # More or larger than 32 bits hold: these fields then count, and torch finds them where the locator says.
        _, disk, end_64, num_disks = _unpack(LOCATOR_64, data, locator)
        end = locator - END_64.size
        mark, _, _, _, *disks, count_here, count, size, start = _unpack(END_64, data, end)
        if mark != b"PK\6\6" or end_64 != end or disk or num_disks != 1:
            raise zipfile.BadZipFile("its end is not where it says")
    if any(disks) or count_here != count or start + size != end:
        raise zipfile.BadZipFile("its directory is not at its end")
    return start, size, count


def _record(data: SliceableBytes, directory: bytes, position: int) -> tuple[ArchiveRecord, int]:
    """Return the record with its entry at byte `position` of the directory, and where the next entry begins."""
    mark, _, _, flags, method, _, _, *numbers = _unpack(ENTRY, directory, position)
    crc, stored_size, size, name_length, extra_length, comment_length, disk, _, attributes, header = numbers
    begin_extra = position + ENTRY.size + name_length
    encoded = directory[position + ENTRY.size : begin_extra]
    extra = directory[begin_extra : begin_extra + extra_length]
    if mark != b"PK\1\2" or comment_length or len(extra) != extra_length:
        raise zipfile.BadZipFile("its directory is not what was written")
    # A name cut at a zero byte, cut at 512 bytes or decoded differently would be a different name to another reader.
    if not encoded.isascii() or not encoded.decode("ascii").isprintable() or len(encoded) > MAX_NAME_BYTES:
        raise zipfile.BadZipFile(f"a record has the name {encoded[:MAX_NAME_BYTES]!r}")
    name = encoded.decode("ascii")
    if flags & ~(HAS_SIZES_BEHIND | HAS_UTF8_NAME) or disk:
        raise zipfile.BadZipFile(f"{name} is encrypted or in another file")
    # For a directory torch reads no bytes, and returns whatever was in the memory.
    if attributes & IS_DIRECTORY:
        raise zipfile.BadZipFile(f"{name} is a directory")
    size, stored_size, header = _in_64_bits(name, (size, stored_size, header), extra)
    if method == zipfile.ZIP_STORED and stored_size != size:
        raise zipfile.BadZipFile(f"{name} has two sizes")
    before = data[header : header + HEADER_BYTES]
    if len(before) != HEADER_BYTES or before[: len(RECORD_MARK)] != RECORD_MARK:
        raise zipfile.BadZipFile(f"{name} is not where the directory says")
    # Bytes 26 to 29 of the header before the record: the lengths of the name and of a further field. The further field
    # can have another length than the directory says, as it aligns the record.
    begin = header + HEADER_BYTES + sum(struct.unpack_from("<2H", before, 26))
    return (
        ArchiveRecord(name=name, start=begin, size=size, crc=crc, is_plain=method == zipfile.ZIP_STORED),
        begin_extra + extra_length,
    )


def _in_64_bits(name: str, fields: Sequence[int], extra: bytes) -> list[int]:
    """Return a record's fields; fields that do not fit into 32 bits are taken from its field of 64-bit numbers."""
    wanted = [field for field in fields if field == IN_64_BITS]
    position = num_found = 0
    large: tuple[int, ...] = ()
    while position < len(extra):
        kind, length = _unpack(EXTRA, extra, position)
        value = extra[position + EXTRA.size : position + EXTRA.size + length]
        if kind == KIND_64_BITS and len(value) == length == 8 * len(wanted):
            large = struct.unpack(f"<{len(wanted)}Q", value)
            num_found += 1
        elif kind == KIND_64_BITS or len(value) != length:
            raise zipfile.BadZipFile(f"the size of {name} is not what was written")
        position += EXTRA.size + length
    if num_found > 1 or len(large) != len(wanted):
        raise zipfile.BadZipFile(f"the size of {name} is not what was written")
    left = iter(large)
    return [next(left) if field == IN_64_BITS else field for field in fields]


def _unpack(form: struct.Struct, data: SliceableBytes, start: int) -> tuple[Any, ...]:
    found = data[start : start + form.size] if start >= 0 else b""
    if len(found) != form.size:
        raise zipfile.BadZipFile("it is shorter than an archive")
    return form.unpack(found)


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


METADATA: Allowed = PLAIN | {
    (module.__name__, name): getattr(module, name)
    for module, names in {
        metadata: (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
        planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
        filesystem: ("_StorageInfo", "_StoragePrefix"),
    }.items()
    for name in names
} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # The folder that torch was asked to save to; the second is the module's name in Python 3.13.
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    # Megatron 0.15 has torch's class with an additional field, which nothing reads.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    # Classes of older versions of Megatron; nothing in them is needed.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): Opaque,
    ("megatron.core.dist_checkpointing.strategies.resharding", "TensorReformulationMetadata"): Opaque,
}  # fmt: skip
"""Classes in the `.metadata` of a distributed checkpoint."""
SAVED: Allowed = PLAIN | {
    (module, name): Opaque
    for module, names in {
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "pathlib": "PosixPath",
        "pathlib._local": "PosixPath",
        "signal": "Signals",
        "_io": "BytesIO",
        "io": "BytesIO",
        "_codecs": "encode",
        "builtins": "bytearray complex frozenset set slice",
        "__builtin__": "bytearray complex frozenset set slice",
        "numpy": "dtype ndarray",
        "numpy.dtypes": "UInt32DType",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "torch": "device BFloat16Storage BoolStorage ByteStorage CharStorage DoubleStorage FloatStorage HalfStorage "
        "IntStorage LongStorage ShortStorage",
        "torch.storage": "UntypedStorage",
        "torch._utils": "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3",
        "megatron.core.enums": "ModelType",
        "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
        "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
        "megatron.core.transformer.enums": "AttnBackend CudaGraphModule CudaGraphScope InferenceCudaGraphScope",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Classes in Megatron's states besides tensors: neither the check nor the load calls any other class."""
FP8_RECIPES = (
    "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling Format _FormatHelper "
    "MMParams QParams"
)
"""Classes of TransformerEngine in its layers' extra states, from Megatron 0.19's own list."""
MALFORMED = (
    *(zipfile.BadZipFile, NotImplementedError, pickle.UnpicklingError, EOFError),
    *(AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError),
    # Crafted bytes: values within values without end, and sizes beyond all memory.
    *(RecursionError, MemoryError),
)
"""Exceptions raised by reading a malformed pickle or archive."""


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
        """Return the class or function if SAVED has it."""
        if (module, name) not in SAVED:
            raise _refusal(module, name)
        return super().find_class(module, name)


class _LoadingModule:
    """Stands in for the module `pickle` in torch.load."""

    __name__ = "pickle"
    Unpickler = _LoadingUnpickler


def unpickle_metadata(file: io.BufferedIOBase | io.BytesIO) -> Any:
    """Return the `.metadata` of a distributed checkpoint, in place of `pickle.load`."""
    return AllowListUnpickler(file, METADATA).load()


def load_metadata(path: Path) -> metadata.Metadata:
    """Return the `.metadata` of a distributed checkpoint.

    Raises:
        DamagedCheckpointError: If its bytes are not a pickle.
        CheckpointError: If it cannot be read, is not torch's metadata, or asks for classes that this file does not
            name.
    """
    file = path / ".metadata"
    try:
        loaded = unpickle_metadata(io.BytesIO(file.read_bytes()))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}. Is {path} a torch_dist checkpoint?") from error
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}.") from None
    except MALFORMED as error:
        raise DamagedCheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}). Take another copy."
        ) from error
    if not isinstance(loaded, metadata.Metadata):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}, wanted torch's Metadata.")
    return loaded


def load_common(data: SliceableBytes, what: str) -> dict[str, Any]:
    """Return the dict of a `common.pt`; objects other than plain values are Opaque, and tensors are left out."""
    allowed = PLAIN | {("argparse", "Namespace"): Namespace}
    loaded = _unpickled(data, what, allowed, opaque=True)
    return loaded if isinstance(loaded, dict) else {}


def load_saved(data: bytes, what: str, map_location: str | None = None) -> Any:
    """Return the object that `torch.save` wrote; CheckpointError, naming `what`, as `refuse_programs` raises it.

    Only classes of SAVED are ever called, whichever record of the archive torch reads.
    """
    refuse_programs(data, what)
    try:
        return torch.load(io.BytesIO(data), map_location, pickle_module=_LoadingModule, weights_only=False)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}.") from None


def refuse_programs(data: SliceableBytes, what: str) -> None:
    """Raise a CheckpointError, naming `what`, if loading the archive would call more than the classes of SAVED."""
    _unpickled(data, what, SAVED, opaque=False)


def refuse_programs_inside(state: Any, what: str) -> None:
    """Raise a CheckpointError, naming `what`, if a loaded extra state of TransformerEngine contains a program.

    Its fp8 scales are again a pickle, in a tensor of bytes or (before 2.0) in torch.save's format; its layers and
    Megatron 0.16's unpickle it in any case, even in a run without fp8.
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
        ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): Opaque,
        **{("transformer_engine.common.recipe", name): Opaque for name in FP8_RECIPES.split()},
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


COMMON = "common.pt"


def load_entry(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """`DefaultLoadPlanner.load_bytes`: put an object that is no tensor into the planner's state.

    Raises:
        CheckpointError: If the object asks for a program; the message names its key and file.
    """
    name = read_item.dest_index.fqn
    stored = self.metadata.storage_data if self.metadata is not None else {}
    info = (stored or {}).get(read_item.storage_index)
    what = f"{name} in {info.relative_path}" if info is not None else name
    loaded = load_saved(value.getvalue(), what)
    if "_extra_state" in name:
        refuse_programs_inside(loaded, what)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def restricted_pickle(module: Any) -> Any:
    """Return the part of `pickle` that torch's reader and writer of `.metadata` use, with a load that runs no
    programs.
    """

    def load(file: Any) -> Any:
        try:
            return unpickle_metadata(file)
        except CheckpointError as error:
            raise CheckpointError(f"{file.name}: {error}.") from None

    return SimpleNamespace(**vars(module) | {"load": load})


def load_common_method(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`TorchCommonLoadStrategy.load_common` of 0.16; a missing file is left to Megatron, which names it."""
    return lambda self, folder: _load_common(folder, lambda: load(self, folder))


def load_common_function(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`load_common` of 0.19; a missing file is left to Megatron, which names it."""
    return lambda checkpoint_dir: _load_common(checkpoint_dir, lambda: load(checkpoint_dir))


def _load_common(folder: Any, otherwise: Callable[[], Any]) -> Any:
    file = Path(folder) / COMMON
    return load_saved(file.read_bytes(), str(file), "cpu") if file.is_file() else otherwise()
