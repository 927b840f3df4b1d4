import random
import zlib
from itertools import pairwise
from pathlib import Path

from mcore_rl.storage.checksums import BLOCK_BYTES, PartChecksum, crc32, crc32_of, joined


def test_crc32_is_that_of_zip_and_gzip(tmp_path: Path) -> None:
    # The check value of CRC-32/ISO-HDLC in Williams' catalogue, "A painless guide to CRC error detection algorithms".
    assert crc32(b"123456789") == 0xCBF43926
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 17)
    assert crc32(memoryview(data)[5:], crc32(data[:5])) == zlib.crc32(data)
    (tmp_path / "file").write_bytes(data)
    assert int(crc32_of(tmp_path / "file"), 16) == zlib.crc32(data)


def test_the_checksum_of_the_whole_follows_from_those_of_its_parts() -> None:
    data = random.Random(0).randbytes(10_007)
    cuts = [0, 1, 100, 5_000, 5_001, 10_007]
    parts = [PartChecksum(a, b - a, zlib.crc32(data[a:b])) for a, b in pairwise(cuts)]
    random.shuffle(parts)
    assert joined(parts, len(data)) == zlib.crc32(data)
    assert joined(parts[1:], len(data)) is None
    assert joined([], 0) == 0
