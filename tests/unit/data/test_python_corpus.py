import json
import sysconfig
from pathlib import Path

from tools.python_corpus import write_python_corpus

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_library_files_as_they_are_none_of_them_in_both_halves(tmp_path):
    corpus = write_python_corpus(tmp_path, max_bytes=1 << 20)
    train, valid = entries(corpus.train), entries(corpus.valid)
    assert (len(train), len(valid)) == (corpus.train_files, corpus.valid_files)
    paths = [entry["path"] for entry in train + valid]
    assert len(set(paths)) == len(paths)
    assert all((LIBRARY / entry["path"]).read_bytes().decode() == entry["text"] for entry in train + valid)
    assert not any({"test", "site-packages", "encodings"} & set(Path(path).parts) for path in paths)


def test_its_size_is_capped_and_counted(tmp_path):
    corpus = write_python_corpus(tmp_path, max_bytes=1 << 20)
    size = sum(
        len(entry["text"].encode()) for path in (corpus.train, corpus.valid) for entry in entries(path)
    )
    assert corpus.num_bytes == size
    assert 0.5 < size / (1 << 20) <= 1


def test_two_runs_write_the_same_bytes_and_a_larger_cap_only_adds(tmp_path):
    first = write_python_corpus(tmp_path / "a", max_bytes=1 << 20)
    again = write_python_corpus(tmp_path / "b", max_bytes=1 << 20)
    larger = write_python_corpus(tmp_path / "c", max_bytes=1 << 21)
    for name in ("train", "valid"):
        content = getattr(first, name).read_bytes()
        assert getattr(again, name).read_bytes() == content
        assert getattr(larger, name).read_bytes().startswith(content)
