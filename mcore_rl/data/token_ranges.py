"""Parts of a .bin/.idx pair that begin and end inside documents, as pairs of their own that share the .bin."""

from pathlib import Path

import numpy

from mcore_rl.data.index_file import DTYPES, HEADER, MAGIC, IndexFile
from mcore_rl.storage.files import with_ending, write_atomically

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
    link = with_ending(prefix, ".bin")
    link.unlink(missing_ok=True)
    link.symlink_to(with_ending(index.prefix, ".bin").absolute())
    write_atomically(
        with_ending(prefix, ".idx"), header + lengths_N.tobytes() + offsets_N.tobytes() + bounds_N.tobytes()
    )
    return str(prefix)
