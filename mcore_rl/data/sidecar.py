"""PREFIX.json: the origin of a dataset, so that it is not trained on with another tokenizer."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mcore_rl.errors import DataError
from mcore_rl.storage.files import with_ending

SIDECAR_VERSION = 1
LATER_FIELDS = {"bin_crc32", "idx_crc32"}
"""Fields that sidecars of this version did not have at first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file that documents were read from."""

    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """Description of a finished dataset. The same input and settings give the same bytes."""

    version: int = SIDECAR_VERSION
    tokenizer_kind: str
    tokenizer_digest: str
    vocab_size: int
    eod_id: int
    max_token_id: int
    """The largest id in the data."""
    documents: int
    tokens: int
    """Number of tokens, end-of-document tokens included."""
    dtype: str
    """Type of the tokens in the .bin."""
    bad_lines: int
    """Number of lines, or of documents of plain text, that were left out."""
    sources: tuple[SourceFile, ...]
    bin_crc32: str = ""
    """CRC-32 of the .bin in hexadecimal; empty, as the next: an earlier version did not record it."""
    idx_crc32: str = ""
    """CRC-32 of the .idx in hexadecimal."""

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of `prefix`; None if there is none, as with data from other tools."""
    path = with_ending(prefix, ".json")
    if not path.is_file():
        return None
    return sidecar_from(path)


def sidecar_from(path: Path) -> Sidecar:
    """Return the sidecar in `path`. Raises DataError if the file is not a sidecar, or has another version."""
    remedy = (
        "Make the data again with `mcore-rl data preprocess`, or remove the file to train without its checks."
    )
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. {remedy}") from error
    version = entries.get("version") if isinstance(entries, dict) else None
    if version != SIDECAR_VERSION:
        raise DataError(f"{path} has version {version!r}, this code reads {SIDECAR_VERSION}. {remedy}")
    names = {field.name for field in fields(Sidecar)}
    if not names - LATER_FIELDS <= set(entries) <= names:
        raise DataError(f"{path} has the fields {sorted(entries)}, wanted {sorted(names)}. {remedy}")
    sources = tuple(SourceFile(**source) for source in entries.pop("sources"))
    return Sidecar(**entries, sources=sources)
