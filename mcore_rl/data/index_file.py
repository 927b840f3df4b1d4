"""The .bin/.idx pair on disk, checked byte for byte against Megatron's format before Megatron opens it.

An .idx holds a magic word, version, dtype code, the counts of sequences and documents, then the sequences'
lengths (int32), their byte offsets in the .bin (int64), and the document bounds (int64). Megatron asserts the
first bytes only: a pair that is cut short or of two datasets gives wrong tokens, or an error at a later step.
"""

import hashlib
import struct
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mcore_rl.errors import DataError
from mcore_rl.storage.files import with_ending

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCK_TOKENS = 1 << 24
"""Tokens read at a time."""
SCANNED_BLOCKS = 8
"""Blocks of tokens that are looked at when the data has no sidecar and is larger than them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexFile:
    """The content of a valid pair's .idx."""

    prefix: str
    dtype: numpy.dtype[Any]
    """Type of the tokens in the .bin."""
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
        raise DataError(
            f"{path} has version {version} and dtype code {code}; known: 1 and {sorted(DTYPES)}. {again}"
        )
    wanted = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(content) != wanted:
        raise DataError(
            f"{path} has {len(content)} bytes; {num_sequences} sequences and {num_bounds} bounds need "
            f"{wanted}. {again}"
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
        raise DataError(
            f"{path} is corrupt: its lengths, offsets and document bounds contradict each other. {again}"
        )
    num_bytes = with_ending(prefix, ".bin").stat().st_size
    if num_bytes != ends_N[-1]:
        raise DataError(f"{prefix}.bin has {num_bytes} bytes, its .idx implies {ends_N[-1]}. {again}")
    fingerprint = hashlib.sha256(content).hexdigest()
    return IndexFile(prefix=prefix, dtype=dtype, lengths_N=lengths_N, fingerprint=fingerprint)


def first_outside(index: IndexFile, vocab_size: int) -> OutsideToken | None:
    """Return the first token in the .bin below 0 or not below `vocab_size`; a larger file is looked at in
    SCANNED_BLOCKS blocks, evenly spread.
    """
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
    """Return where the blocks that are looked at begin: all of a file, or SCANNED_BLOCKS evenly spread blocks."""
    if num_tokens <= SCANNED_BLOCKS * block_tokens:
        return list(range(0, num_tokens, block_tokens))
    last = num_tokens - block_tokens
    return [round(i * last / (SCANNED_BLOCKS - 1)) for i in range(SCANNED_BLOCKS)]


def _require_pair(prefix: str) -> None:
    if prefix.endswith((".bin", ".idx")):
        raise DataError(
            f"data prefix {prefix!r} has an ending: write {prefix[:-4]!r}, the part that both files share."
        )
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
        relative = (
            ""
            if Path(prefix).is_absolute()
            else f" Relative paths begin at the working folder, {Path.cwd()}."
        )
        raise DataError(f"data prefix {prefix!r}: there is no folder {folder}.{relative} Correct the path.")
    there = sorted(path.stem for path in folder.glob("*.idx"))
    near = get_close_matches(Path(prefix).name, there, n=3, cutoff=0.4) or there[:3]
    raise DataError(
        f"data prefix {prefix!r}: there is no {names} in {folder}. "
        + (
            f"Its folder has: {', '.join(near)}."
            if near
            else "Make the pair with `mcore-rl data preprocess`."
        )
    )
