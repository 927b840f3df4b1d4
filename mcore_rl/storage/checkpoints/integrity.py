"""Whether the bytes of a checkpoint are those that were written: of its small files, of a whole file, of one part."""

from collections.abc import Iterable
from pathlib import Path

from mcore_rl.errors import DamagedCheckpointError
from mcore_rl.storage.checkpoint import COMMON, FORMAT_FILE, METADATA, Marker, others
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.storage.foreign import pickles
from mcore_rl.storage.foreign.archives import FilePart, FileRange, damaged_record, recorded_crc32

DESCRIPTIONS = (METADATA, COMMON, FORMAT_FILE)
"""Small files that describe the large ones' content."""
UNREADABLE = (OSError, RuntimeError, *pickles.MALFORMED)
"""Exceptions that reading a damaged archive raises."""


def check_descriptions(path: Path, marker: Marker) -> None:
    """Raise a DamagedCheckpointError when a small file that describes other files has changed since it was written."""
    for name in DESCRIPTIONS:
        if name in marker.crc32 and crc32_of(path / name) != marker.crc32[name]:
            raise DamagedCheckpointError(
                f"{path / name} is damaged: its bytes are not those that were written. {others(path)}"
            )


def check_identity(path: Path, marker: Marker, name: str, archives: Iterable[FileRange]) -> None:
    """Raise a DamagedCheckpointError when a file is not the file that the marker names, such as another step's.

    Large records are not read: `check_part` compares them with the checksums on which this check is built.

    Args:
        path: The checkpoint.
        marker: Its marker; a marker of an earlier version has no checksums of files, and passes.
        name: Name of the file.
        archives: Ranges of it that torch.save wrote.
    """
    if name not in marker.crc32:
        return
    try:
        is_written = recorded_crc32(path / name, archives) == marker.crc32[name]
    except UNREADABLE:
        is_written = False
    if not is_written:
        raise DamagedCheckpointError(
            f"{path / name} is not the file that was written with {path.name}: it is damaged, or of another step. "
            f"{others(path)}"
        )


def check_part(path: Path, key: str, part: FileRange) -> None:
    """Raise a DamagedCheckpointError when the bytes of a tensor's or object's part are not those that were written."""
    with (path / part.file).open("rb") as file:
        try:
            record = damaged_record(FilePart(file.fileno(), part.start, part.length))
        except UNREADABLE as error:
            record = str(error)
    if record is not None:
        raise DamagedCheckpointError(
            f"{path / part.file} is damaged: the bytes of {key} are not those that were written ({record}). "
            f"{others(path)}"
        )
