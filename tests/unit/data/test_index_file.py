import math
import struct
from collections import Counter

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mcore_rl.data import index_file
from mcore_rl.data.index_file import OutsideToken, first_outside, read_index, unigram_entropy
from mcore_rl.errors import DataError

DOCUMENTS = [[5, 6, 7, 2], [8, 2], [2], [900, 1, 1, 1, 2]]


def write(prefix, documents, dtype=numpy.uint16):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_megatrons_pair_is_read_as_it_was_written(tmp_path, dtype):
    index = read_index(write(tmp_path / "data.v1", DOCUMENTS, dtype))
    assert index.lengths_N.tolist() == [4, 2, 1, 5]
    assert index.num_tokens == 12
    assert index.tokens_T().tolist() == [token for document in DOCUMENTS for token in document]
    assert index.dtype == dtype
    assert first_outside(index, 901) is None
    assert first_outside(index, 900) == OutsideToken(token=900, document=3, position=0)


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def patch(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


HEADER, LENGTHS = 34, 4 * 4
CORRUPTIONS = {
    "empty .bin": (lambda bin, idx: cut(bin, 0), r"\.bin has 0 bytes, its \.idx implies 24"),
    "short .bin": (lambda bin, idx: cut(bin, 23), r"\.bin has 23 bytes"),
    "long .bin": (lambda bin, idx: bin.write_bytes(bin.read_bytes() + b"\0\0"), r"\.bin has 26 bytes"),
    "missing .bin": (lambda bin, idx: bin.unlink(), r"there is no .*\.bin"),
    "missing .idx": (lambda bin, idx: idx.unlink(), r"there is no .*\.idx"),
    "missing pair": (lambda bin, idx: (bin.unlink(), idx.unlink()), r"no .*\.bin and no .*\.idx"),
    "empty .idx": (lambda bin, idx: cut(idx, 0), "wrong magic"),
    "header only": (lambda bin, idx: cut(idx, HEADER), "need 122"),
    "short .idx": (lambda bin, idx: cut(idx, 100), "100 bytes; 4 sequences and 5 bounds need 122"),
    "other magic": (lambda bin, idx: patch(idx, 0, b"X"), "wrong magic"),
    "other version": (lambda bin, idx: patch(idx, 9, b"\x02"), "version 2"),
    "unknown dtype": (lambda bin, idx: patch(idx, 17, b"\x63"), "dtype code 99"),
    "other dtype": (lambda bin, idx: patch(idx, 17, b"\x04"), "contradict"),
    "zeroed tail": (lambda bin, idx: patch(idx, HEADER + LENGTHS, bytes(72)), "contradict"),
    "negative length": (lambda bin, idx: patch(idx, HEADER, struct.pack("<i", -4)), "contradict"),
    "wrong length": (lambda bin, idx: patch(idx, HEADER, struct.pack("<i", 3)), "contradict"),
    "wrong bound": (lambda bin, idx: patch(idx, 114, struct.pack("<q", 9)), "contradict"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_pair_is_refused_with_what_is_wrong(tmp_path, name):
    damage, message = CORRUPTIONS[name]
    prefix = write(tmp_path / "data", DOCUMENTS)
    damage(tmp_path / "data.bin", tmp_path / "data.idx")
    with pytest.raises(DataError, match=message):
        read_index(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_prefix_with_an_ending_is_told_without(tmp_path, ending):
    prefix = write(tmp_path / "data", DOCUMENTS)
    with pytest.raises(DataError, match=f"write '{prefix}'"):
        read_index(prefix + ending)


def test_a_prefix_without_a_pair_or_documents_is_told_what_is_there(tmp_path):
    write(tmp_path / "books", DOCUMENTS)
    write(tmp_path / "empty", [])
    (tmp_path / "data.partial").mkdir()
    reasons = {"book": "Its folder has: books", "empty": "holds no token", "data": "preprocessing has not ended"}
    for name, reason in reasons.items():
        with pytest.raises(DataError, match=reason):
            read_index(str(tmp_path / name))


def test_a_relative_prefix_is_answered_with_the_folder_that_it_begins_at(tmp_path, monkeypatch):
    """A job whose folder is gone runs in another one: new data would not help there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        read_index("data/train")
    assert f"there is no folder {tmp_path}/data. Relative paths begin at the working folder, {tmp_path}." in str(
        error.value
    )
    with pytest.raises(DataError, match=rf"there is no train\.bin and no train\.idx in {tmp_path}\. "):
        read_index("train")


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize(
    ("documents", "entropy"),
    [([[1, 1], [1, 1, 9, 7], [9, 7]], 1.5 * math.log(2)), ([list(range(100, 108))], math.log(8)), ([[4, 4, 4]], 0.0)],
    ids=["a half and two quarters", "equally frequent", "one token"],
)
def test_entropy_is_that_of_the_tokens_frequencies(tmp_path, monkeypatch, block, documents, entropy):
    monkeypatch.setattr(index_file, "BLOCK_TOKENS", block)
    assert unigram_entropy(write(tmp_path / "data", documents)) == pytest.approx(entropy, abs=0)


def test_entropy_of_large_files_is_that_of_blocks_of_each_counted_as_the_whole_file(tmp_path, monkeypatch):
    """Eight blocks of two tokens, at 0, 14, 28, ... 98 of a file of 100; a smaller one is counted as it is."""
    monkeypatch.setattr(index_file, "BLOCK_TOKENS", 4)  # of all files together
    large, small = [(7 * place) % 11 for place in range(100)], [3] * 15
    seen = [large[start + i] for start in range(0, 99, 14) for i in (0, 1)]
    assert len(seen) == 16
    counts = Counter()
    for token in seen:
        counts[token] += 100 / 16
    counts[3] += 15
    wanted = -sum(count / 115 * math.log(count / 115) for count in counts.values())
    prefixes = [write(tmp_path / "large", [large]), write(tmp_path / "small", [small])]
    assert unigram_entropy(*prefixes) == pytest.approx(wanted, rel=1e-12)
