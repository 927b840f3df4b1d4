"""One record is the same in JSON lines, compressed, as parquet and through `datasets`, for all that read records."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from backports import zstd
from rich.console import Console

from mcore_rl.config.rl.rollout import PromptConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.documents import DocumentFormat, DocumentReader, FileSlice, find_input_files, format_of_endings
from mcore_rl.data.examples import read_examples
from mcore_rl.data.megatron.preprocess import plan_shards, preprocess
from mcore_rl.data.records import filled, read_records
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.rl.rollouts.prompts import read_problems
from tests.unit.data.conftest import (
    FORMS,
    JSONL,
    chat_of,
    datasets,
    in_form,
    made_up_documents,
    preprocessing,
    write_lines,
)
from tools.python_corpus import write_python_corpus

WHOLE = DocumentFormat(kind="text")


def read(path, document_format, offsets=()):
    """(line in the file, text, problem) of the file, read in file_slices cut at `offsets`."""
    bounds = [0, *offsets, path.stat().st_size]
    records, lines = [], 0
    for start, end in pairwise(bounds):
        reader = DocumentReader(FileSlice(path=str(path), start=start, end=end), document_format)
        records += [(lines + record.line, record.text, record.problem) for record in reader]
        lines += reader.num_lines
    return records


CONTENTS = {
    # Content, and the lines and texts of its documents; "" where one has a problem.
    "jsonl": (
        b'{"text": "one"}\n\n{"text": "tw\xc3\xb6"}\nnot json\n{"text": "three"}',
        [(1, "one"), (3, "twö"), (4, ""), (5, "three")],
    ),
    "jsonl with a byte-order mark": (b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n', [(1, "one"), (2, "two")]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONTENTS)
def test_wherever_a_file_is_cut_its_documents_and_line_numbers_are_the_same(tmp_path, name):
    content, documents = CONTENTS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    whole = read(path, JSONL)
    assert [(line, text) for line, text, _ in whole] == documents
    for first in range(1, len(content)):
        for second in range(first, len(content), 3):
            assert read(path, JSONL, (first, second)) == whole, (first, second)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "a JSON list, wanted an object"),
        (b'{"txt": "a", "n": 1}', r"no key 'text' \(keys: txt, n\)"),
        (b'{"text": 5}', "'text' holds a int, not text"),
        (b'{"text": " \\n "}', "'text' is empty"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "of a cut-off li', "not JSON"),
        ('{"text": "zwölf"}'.encode("latin-1"), r"not UTF-8 \(byte 0xf6\); .*iconv -f LATIN1"),
        ('{"text": "two"}'.encode("utf-16-le"), "NUL bytes"),
        (b'{"text": "a"},', r"not JSON \(Extra data"),
        (b"\0\0\0\0\0", "NUL bytes"),
    ],
)
def test_a_bad_line_is_told_with_its_reason_by_every_reader_and_blank_lines_are_skipped(tmp_path, line, problem):
    path = tmp_path / "file"
    path.write_bytes(json.dumps({"text": "good"}).encode() + b"\n\n" + line + b"\n")
    good, bad = read(path, JSONL)
    assert good == (1, "good", "")
    assert bad[0] == 3
    assert re.search(problem, bad[2])
    first, second = read_records(str(path))
    assert (first.line, first.entry, second.line) == (1, {"text": "good"}, 3)
    assert second.problem in (bad[2], "")  # none: an object whose text is no document


@pytest.mark.parametrize("content", [b"", b" \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf\r\n"])
def test_a_text_of_nothing_but_byte_order_marks_is_as_empty_as_one_without(tmp_path, content):
    path = tmp_path / "text"
    path.write_bytes(b" a\n\n b\r\n\n")
    assert read(path, WHOLE) == [(1, " a\n\n b\r\n\n", "")], "byte for byte"
    path.write_bytes(content)
    assert read(path, WHOLE) == [(1, "", "empty")]
    path.write_text(json.dumps({"text": content.decode()}))
    assert read(path, JSONL) == [(1, "", "'text' is empty")]


def test_a_folder_is_its_files_by_name_without_hidden_ones_and_an_input_that_is_not_there_is_refused(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [source.path.removeprefix(f"{tmp_path}/") for source in find_input_files([tmp_path])]
    assert names == ["a.txt", "b.txt", "sub/c.txt"]
    with pytest.raises(DataError, match="does not exist"):
        find_input_files([tmp_path / "b.jsonl"])


def test_endings_decide_the_format_and_a_doubt_is_an_error(tmp_path):
    for name in ("a.jsonl", "b.txt", "c.bin"):
        (tmp_path / name).write_text("x")
    kinds = {name: find_input_files([tmp_path / name]) for name in ("a.jsonl", "b.txt", "c.bin")}
    assert (format_of_endings(kinds["a.jsonl"]), format_of_endings(kinds["b.txt"])) == ("jsonl", "text")
    for doubtful in (kinds["c.bin"], kinds["a.jsonl"] + kinds["b.txt"]):
        with pytest.raises(DataError, match="Give --format"):
            format_of_endings(doubtful)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"PK\x03\x04zip", r"an archive \(zip\)"),
        ("a.jsonl", LFS, "pointer of Git LFS.*git lfs pull"),
        ("a.csv", LFS, "pointer of Git LFS.*git lfs pull"),
        ("a.jsonl", None, "no file, but a folder, pipe or device"),
        ("a.json", b'[{"text": "one"},\n{"text": "tw', "begins a JSON list that is damaged or cut off"),
        ("a.json", b'[{"text": "on\xf6"}]', "begins a JSON list that is damaged.*byte 0xf6"),
        ("a.csv", b'text,n\none,1\n"two', "a.csv cannot be read: unexpected end of data"),
        ("a.jsonl", '{"text": "zwölf"}'.encode("utf-16")[:-1], "a.jsonl cannot be read: .*truncated data"),
    ],
)
def test_files_that_hold_no_records_are_named_for_what_they_are(tmp_path, name, content, message):
    path = tmp_path / name
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_records(str(path)))
    with pytest.raises(DataError, match=message):
        [list(DocumentReader(part, JSONL)) for part in plan_shards(find_input_files([path]), JSONL)[0].file_slices]


def test_a_saved_dataset_is_read_one_split_at_a_time(tmp_path):
    texts, both = datasets().Dataset.from_list([{"text": "one"}, {"text": "two"}]), tmp_path / "both"
    datasets().DatasetDict({"train": texts, "test": texts.select([1])}).save_to_disk(both)
    with pytest.raises(DataError, match=f"several splits. Name one of them: {both}/train, {both}/test"):
        list(read_records(str(both)))
    assert [record.fields for record in read_records(f"{both}/test")] == [{"text": "two"}]


LINES = [
    {"question": f"{i} + 1 = {{?}}", "solution": f"{i + 1}", "text": text}
    for i, text in enumerate(made_up_documents(30, words=40))
]


@pytest.fixture(params=FORMS)
def data(request, tmp_path, monkeypatch):
    return in_form(request.param, LINES, tmp_path, monkeypatch)


@pytest.mark.matrix("lines", "gzipped", "zstandard", "pzstd", "hub", "list", "csv", "utf-16")
def test_records_are_the_same_in_every_form(data):
    assert [record.entry for record in read_records(data)] == LINES
    # A row of CSV may have several lines.
    assert data.endswith("sv") or [record.line for record in read_records(data)] == list(range(1, 31))


@pytest.mark.matrix("lines", "gzipped", "zstandard", "list", "tsv", "saved")
def test_chats_prompts_and_documents_are_read_in_every_form(data, tokenizer, tmp_path):
    words = load_tokenizer(tokenizer)
    config = SFTDataConfig(prompt_template="Question: {question}\n", response_field="solution")
    examples = read_examples([data], config, chat_of(tokenizer, "raw"))
    first = examples.ids_T[: examples.starts_N[1]].tolist()
    assert first == [*words.encode("Question: 0 + 1 = {?}\n"), *words.encode("1"), words.eod_id]
    assert len(examples) == 30

    prompts = PromptConfig(files=(data,), prompt_template="{question} In {{braces}}.", answer_field="solution")
    problem = read_problems(prompts, needs_answer=True).problems[4]
    assert (problem.prompt, problem.answer) == ("4 + 1 = {?} In {braces}.", "5")

    document_format = DocumentFormat(kind=format_of_endings(find_input_files([Path(data)])))
    options = preprocessing(tokenizer, tmp_path / "out", Path(data), document_format=document_format)
    sidecar = preprocess(options, Console(quiet=True))
    assert sidecar.documents == 30
    assert sidecar.tokens == sum(len(words.encode(line["text"])) + 1 for line in LINES)


def test_a_template_is_filled_and_a_field_that_is_not_there_is_named():
    assert filled(r"{a} \boxed{} {{a}} {not a name}", {"a": 4}) == r"4 \boxed{} {a} {not a name}"
    with pytest.raises(DataError, match=r"the template names \{b\}, which it lacks \(keys: a\)"):
        filled("{b}", {"a": 4})


def test_bad_lines_are_counted_with_file_and_line_and_more_than_allowed_end_the_run(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, [], {"prompt": "c"})
    chat = chat_of(tokenizer, "raw")
    examples = read_examples([path], SFTDataConfig(max_bad=2), chat)
    assert len(examples) == 1
    assert [line.split(": ")[0] for line in examples.bad_lines] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: a JSON list"):
        read_examples([path], SFTDataConfig(max_bad=1), chat)


@pytest.mark.matrix("cut-zst", "changed-gz", "changed-bz2")
@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files_are_refused_where_data_is_made_of_them(ending, damage, tokenizer, tmp_path):
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}[ending]
    noise = random.Random(0).randbytes(3000).hex()
    packed = pack("".join(json.dumps({"text": noise[i : i + 60]}) + "\n" for i in range(2000)).encode())
    half = len(packed) // 2
    content = packed[:-9] if damage == "cut" else packed[:40] + bytes(half) + packed[40 + half :]
    (path := tmp_path / f"a.jsonl.{ending}").write_bytes(content)
    options = preprocessing(tokenizer, tmp_path / "out", path)
    for read in (lambda: list(read_records(str(path))), lambda: preprocess(options, Console(quiet=True))):
        with pytest.raises(DataError, match=rf"a\.jsonl\.{ending} cannot be read: "):
            read()
    assert not (tmp_path / "out.bin").exists()


def test_damaged_tables_headers_and_absent_datasets_are_refused(tmp_path):
    packed = zstd.compress(bytes(random.Random(0).randbytes(1000)) + b"\n")
    contents = {"a.jsonl.zst": packed[:4] + b"\xff" * 9 + packed[13:], "a.parquet": b"PAR1"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(DataError, match="cannot be loaded"):
        list(read_records(f"hub:{tmp_path}/gone:train"))


LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_library_files_as_they_are_none_of_them_in_both_halves_and_its_size_is_capped(tmp_path):
    corpus = write_python_corpus(tmp_path, max_bytes=1 << 20)
    train, valid = entries(corpus.train), entries(corpus.valid)
    size = sum(len(entry["text"].encode()) for entry in train + valid)
    assert corpus.num_bytes == size and 0.5 < size / (1 << 20) <= 1
    assert (len(train), len(valid)) == (corpus.train_files, corpus.valid_files)
    paths = [entry["path"] for entry in train + valid]
    assert len(set(paths)) == len(paths)
    assert all((LIBRARY / entry["path"]).read_bytes().decode() == entry["text"] for entry in train + valid)
    assert not any({"test", "site-packages", "encodings"} & set(Path(path).parts) for path in paths)


def test_two_runs_write_the_same_bytes_and_a_larger_cap_only_adds(tmp_path):
    first = write_python_corpus(tmp_path / "a", max_bytes=1 << 20)
    again = write_python_corpus(tmp_path / "b", max_bytes=1 << 20)
    larger = write_python_corpus(tmp_path / "c", max_bytes=1 << 21)
    for name in ("train", "valid"):
        content = getattr(first, name).read_bytes()
        assert getattr(again, name).read_bytes() == content
        assert getattr(larger, name).read_bytes().startswith(content)
