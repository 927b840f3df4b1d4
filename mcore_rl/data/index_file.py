"""The .bin/.idx pair on disk with its sidecar PREFIX.json, checked byte for byte against Megatron's format before
Megatron opens it, and against the tokenizer and the model. Checks depend only on the files: all ranks agree.

An .idx holds a magic word, version, dtype code, the counts of sequences and documents, then the sequences'
lengths (int32), their byte offsets in the .bin (int64), and the document bounds (int64). Megatron asserts the
first bytes only: a pair that is cut short or of two datasets gives wrong tokens, or an error at a later step.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError
from mcore_rl.storage.files import with_ending, write_atomically

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCK_TOKENS = 1 << 24
SCANNED_BLOCKS = 8
"""Blocks of tokens that are looked at when the data has no sidecar and is larger than them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexFile:
    """The content of a valid pair's .idx."""

    prefix: str
    dtype: numpy.dtype[Any]
    lengths_N: NDArray[numpy.int32]
    """Tokens of each sequence; preprocessed text has one sequence a document."""
    fingerprint: str
    """SHA-256 of the .idx: equal fingerprints, equal cuts into training samples."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the .bin."""
        return int(self.lengths_N.sum(dtype=numpy.int64))

    def tokens_T(self) -> NDArray[Any]:
        """Return all tokens, mapped from the .bin."""
        tokens_T: NDArray[Any] = numpy.memmap(with_ending(self.prefix, ".bin"), dtype=self.dtype, mode="r")
        return tokens_T


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideToken:
    """A token for which a model has no row."""

    token: int
    document: int
    """Index of its sequence in the .idx, from 0."""
    position: int
    """Index of the token in that document, from 0."""


def read_index(prefix: str) -> IndexFile:
    """Return the pair of `prefix`; DataError when it is missing, empty, cut short, or not Megatron's."""
    _require_pair(prefix)
    path = with_ending(prefix, ".idx")
    # Mapped, not read: a node's ranks share the pages of an index that may have gigabytes.
    content: Any = numpy.memmap(path, mode="r") if path.stat().st_size else b""
    again = "Make the data again with `mcore-rl data preprocess`, or copy both files again."
    if len(content) < HEADER.size or bytes(content[: len(MAGIC)]) != MAGIC:
        raise DataError(f"{path} ({len(content)} bytes) is not a Megatron index: wrong magic word. {again}")
    _, version, code, num_sequences, num_bounds = HEADER.unpack_from(content)
    if version != 1 or code not in DTYPES:
        raise DataError(f"{path} has version {version} and dtype code {code}; known: 1 and {sorted(DTYPES)}. {again}")
    wanted = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(content) != wanted:
        raise DataError(
            f"{path} has {len(content)} bytes; {num_sequences} sequences and {num_bounds} bounds need {wanted}. {again}"
        )
    dtype = numpy.dtype(DTYPES[code])
    lengths_N = numpy.frombuffer(content, numpy.int32, num_sequences, HEADER.size)
    offsets_N = numpy.frombuffer(content, numpy.int64, num_sequences, HEADER.size + 4 * num_sequences)
    bounds = numpy.frombuffer(content, numpy.int64, num_bounds, HEADER.size + 12 * num_sequences)
    ends_N = numpy.cumsum(lengths_N, dtype=numpy.int64) * dtype.itemsize
    if num_sequences == 0 or ends_N[-1] == 0:
        raise DataError(f"{path} holds no token. Give data with documents in it.")
    is_sound = lengths_N.min() >= 0 and offsets_N[0] == 0 and (offsets_N[1:] == ends_N[:-1]).all()
    if not is_sound or num_bounds < 2 or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise DataError(f"{path} is corrupt: its lengths, offsets and document bounds contradict each other. {again}")
    num_bytes = with_ending(prefix, ".bin").stat().st_size
    if num_bytes != ends_N[-1]:
        raise DataError(f"{prefix}.bin has {num_bytes} bytes, its .idx implies {ends_N[-1]}. {again}")
    fingerprint = hashlib.sha256(content).hexdigest()
    return IndexFile(prefix=prefix, dtype=dtype, lengths_N=lengths_N, fingerprint=fingerprint)


def first_outside(index: IndexFile, vocab_size: int) -> OutsideToken | None:
    """Return the first token outside of the vocabulary; large files are sampled in SCANNED_BLOCKS blocks."""
    tokens_T = index.tokens_T()
    for start in _starts(tokens_T.size, BLOCK_TOKENS):
        block_T = tokens_T[start : start + BLOCK_TOKENS]
        if block_T.min() < 0 or block_T.max() >= vocab_size:
            place = start + int(((block_T < 0) | (block_T >= vocab_size)).argmax())
            ends_N = index.lengths_N.cumsum(dtype=numpy.int64)
            document = int(ends_N.searchsorted(place, side="right"))
            position = place - int(ends_N[document] - index.lengths_N[document])
            return OutsideToken(token=int(tokens_T[place]), document=document, position=position)
    return None


def unigram_entropy(*prefixes: str) -> float:
    """Return the entropy of the tokens' frequencies in nats/token: the loss of the best model without context. Of files
    of more than SCANNED_BLOCKS x BLOCK_TOKENS tokens it counts evenly spread blocks, the same at each start.
    """
    counts_V: NDArray[Any] = numpy.zeros(0)
    block_tokens = -(-BLOCK_TOKENS // len(prefixes))
    for prefix in prefixes:
        tokens_T = read_index(prefix).tokens_T()
        starts = _starts(tokens_T.size, block_tokens)
        blocks = [tokens_T[start : start + block_tokens] for start in starts]
        # A file counts by its size, however much of it is looked at.
        weight = tokens_T.size / sum(block_T.size for block_T in blocks)
        for block_T in blocks:
            block_V = weight * numpy.bincount(block_T, minlength=counts_V.size)
            block_V[: counts_V.size] += counts_V
            counts_V = block_V
    shares_V = counts_V[counts_V > 0] / counts_V.sum()
    return float(-(shares_V * numpy.log(shares_V)).sum())


def _starts(num_tokens: int, block_tokens: int) -> list[int]:
    if num_tokens <= SCANNED_BLOCKS * block_tokens:
        return list(range(0, num_tokens, block_tokens))
    last = num_tokens - block_tokens
    return [round(i * last / (SCANNED_BLOCKS - 1)) for i in range(SCANNED_BLOCKS)]


def _require_pair(prefix: str) -> None:
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"data prefix {prefix!r} has an ending: write {prefix[:-4]!r}, the part that both files share.")
    missing = [ending for ending in (".bin", ".idx") if not with_ending(prefix, ending).is_file()]
    if not missing:
        return
    if with_ending(prefix, ".partial").is_dir():
        raise DataError(
            f"data prefix {prefix!r}: its preprocessing has not ended ({prefix}.partial is there). Run the "
            "same `mcore-rl data preprocess` command again: it resumes."
        )
    folder = Path(prefix).absolute().parent
    names = " and no ".join(Path(prefix).name + ending for ending in missing)
    if not folder.is_dir():
        relative = "" if Path(prefix).is_absolute() else f" Relative paths begin at the working folder, {Path.cwd()}."
        raise DataError(f"data prefix {prefix!r}: there is no folder {folder}.{relative} Correct the path.")
    there = sorted(path.stem for path in folder.glob("*.idx"))
    near = get_close_matches(Path(prefix).name, there, n=3, cutoff=0.4) or there[:3]
    raise DataError(
        f"data prefix {prefix!r}: there is no {names} in {folder}. "
        + (f"Its folder has: {', '.join(near)}." if near else "Make the pair with `mcore-rl data preprocess`.")
    )


SIDECAR_VERSION = 1


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
    documents: int
    tokens: int
    """Number of tokens, end-of-document tokens included."""
    dtype: str
    bad_lines: int
    """Number of lines, or of documents of plain text, that were left out."""
    sources: tuple[SourceFile, ...]
    bin_crc32: str = ""
    """CRC-32 of the .bin in hexadecimal; empty, as the next, until the shards are merged."""
    idx_crc32: str = ""

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of `prefix`; None if there is none, as with data from other tools."""
    path = with_ending(prefix, ".json")
    return sidecar_from(path) if path.is_file() else None


def sidecar_from(path: Path) -> Sidecar:
    """Return the sidecar in `path`. Raises DataError if the file is not a sidecar, or has another version."""
    remedy = "Make the data again with `mcore-rl data preprocess`, or remove the file to train without its checks."
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. {remedy}") from error
    version = entries.get("version") if isinstance(entries, dict) else None
    if version != SIDECAR_VERSION:
        raise DataError(f"{path} has version {version!r}, this code reads {SIDECAR_VERSION}. {remedy}")
    names = {field.name for field in fields(Sidecar)}
    if set(entries) != names:
        raise DataError(f"{path} has the fields {sorted(entries)}, wanted {sorted(names)}. {remedy}")
    sources = tuple(SourceFile(**source) for source in entries.pop("sources"))
    return Sidecar(**entries, sources=sources)


CODES = {name: code for code, name in DTYPES.items()}


def write_range(index: IndexFile, begin: int, end: int, folder: Path) -> str:
    """Write a pair with the tokens `begin` to `end - 1` of `index` and return its prefix; documents are cut there.

    The .bin is a link to the whole .bin: only the .idx is new. The name depends on the content, so that a part that was
    written before is written again with the same bytes.
    """
    ends_N = index.lengths_N.cumsum(dtype=numpy.int64)
    starts_N = ends_N - index.lengths_N
    firsts_N, lasts_N = starts_N.clip(begin, end), ends_N.clip(begin, end)
    is_inside_N = lasts_N > firsts_N
    lengths_N = (lasts_N - firsts_N)[is_inside_N].astype(numpy.int32)
    offsets_N = firsts_N[is_inside_N] * index.dtype.itemsize
    bounds_N = numpy.arange(lengths_N.size + 1, dtype=numpy.int64)
    header = HEADER.pack(MAGIC, 1, CODES[index.dtype.name], lengths_N.size, bounds_N.size)
    prefix = folder / f"{Path(index.prefix).name}-{index.fingerprint[:16]}-{begin}-{end}"
    content = header + lengths_N.tobytes() + offsets_N.tobytes() + bounds_N.tobytes()
    link, own_idx, whole = with_ending(prefix, ".bin"), with_ending(prefix, ".idx"), with_ending(index.prefix, ".bin")
    # Left alone where they are right: they may be another user's.
    if not (link.exists() and link.samefile(whole)):
        link.unlink(missing_ok=True)
        link.symlink_to(whole.absolute())
    if not (own_idx.is_file() and own_idx.read_bytes() == content):
        write_atomically(own_idx, content)
    return str(prefix)


def check_sidecar(index: IndexFile, sidecar: Sidecar) -> None:
    """Raise DataError unless the sidecar describes this very pair."""
    described = (sidecar.documents, sidecar.tokens, sidecar.dtype)
    found = (index.lengths_N.size, index.num_tokens, index.dtype.name)
    if described != found:
        raise DataError(
            f"{index.prefix}.json describes {described[0]} documents, {described[1]} tokens of {described[2]}; the "
            f".idx has {found[0]}, {found[1]} of {found[2]}. The files are of different runs: make the data "
            "again with `mcore-rl data preprocess`."
        )


def check_same_tokenizer(sidecars: Mapping[str, Sidecar | None]) -> None:
    """Raise DataError if two datasets of a blend were made with different tokenizers."""
    by_digest = {sidecar.tokenizer_digest: prefix for prefix, sidecar in sidecars.items() if sidecar}
    if len(by_digest) > 1:
        raise DataError(
            "the data was made with different tokenizers: "
            + ", ".join(f"{prefix} with {digest[:12]}" for digest, prefix in by_digest.items())
            + ". Preprocess all of it with one."
        )


def check_tokenizer(prefix: str, sidecar: Sidecar, tokenizer: Tokenizer, path: str) -> None:
    """Raise DataError unless `tokenizer` made the data."""
    if sidecar.tokenizer_digest != tokenizer.digest:
        raise DataError(
            f"data prefix {prefix!r} was made with the tokenizer {sidecar.tokenizer_digest[:12]} of "
            f"{sidecar.vocab_size} tokens; data.tokenizer.path={path!r} is {tokenizer.digest[:12]} of "
            f"{tokenizer.vocab_size}. Name the tokenizer it was made with, or preprocess it again with this "
            "one."
        )
    if sidecar.eod_id != tokenizer.eod_id:
        raise DataError(
            f"data prefix {prefix!r} ends documents with token {sidecar.eod_id}; "
            f"data.tokenizer.path={path!r} now names {tokenizer.eod_id} as end of document. Undo the change "
            "of its special tokens, or preprocess again."
        )


def check_vocabulary(index: IndexFile, sidecar: Sidecar | None, vocab_size: int) -> None:
    """Raise DataError unless the model has a row for every token of the data and of its tokenizer."""
    if sidecar and sidecar.vocab_size > vocab_size:
        raise DataError(
            f"data prefix {index.prefix!r} was made with a tokenizer of {sidecar.vocab_size} tokens, and "
            f"model.vocab_size={vocab_size}. Set model.vocab_size={sidecar.vocab_size}."
        )
    if sidecar and sidecar.max_token_id < vocab_size:
        return
    outside = first_outside(index, vocab_size)
    if outside is None:
        return
    remedy = (
        "Ids below 0 are larger ids that this type is too small for: make the data again in a larger type."
        if outside.token < 0
        else "Set model.vocab_size to the tokenizer's size, or preprocess with the model's tokenizer."
    )
    raise DataError(
        f"{with_ending(index.prefix, '.bin')} ({index.dtype.name}) holds the token {outside.token} in document "
        f"{outside.document} at position {outside.position}, both from 0, and model.vocab_size={vocab_size} allows "
        f"ids from 0 to {vocab_size - 1}. {remedy}"
    )


def check_enough(prefix: str, *, tokens: int, seq_length: int) -> None:
    """Raise DataError unless the training part fills a sequence: otherwise Megatron would count epochs forever."""
    if tokens <= seq_length:
        raise DataError(
            f"the train part of data prefix {prefix!r} has {tokens} tokens; one sequence takes {seq_length + 1}. Give "
            f"more text, or lower data.seq_length={seq_length}."
        )
