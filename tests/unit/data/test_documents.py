import json
import re
from itertools import pairwise

import pytest

from mcore_rl.data.documents import (
    DocumentFormat,
    DocumentReader,
    FileSlice,
    find_input_files,
    format_of_endings,
)
from mcore_rl.errors import DataError

JSONL = DocumentFormat(kind="jsonl")
BLANK = DocumentFormat(kind="text", separator="")
MARKED = DocumentFormat(kind="text", separator="%%")
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
    "jsonl": (JSONL, b'{"text": "one"}\n\n{"text": "tw\xc3\xb6"}\nnot json\n{"text": "three"}'),
    "jsonl with a byte-order mark": (JSONL, b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n'),
    "blank lines": (BLANK, b"\n\none\n two\n\n \n\nthree\n\n\n\nfour\xc3\xb6\n"),
    "marks": (MARKED, b"one\n\none b\n%%\n%%\n\n%%\r\ntwo %%\n%%three\n%%\nfour"),
    "no end": (MARKED, b"%%\nall\nof\nit"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_wherever_a_file_is_cut_its_documents_and_line_numbers_are_the_same(tmp_path, name):
    document_format, content = CONTENTS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    whole = read(path, document_format)
    for first in range(1, len(content)):
        for second in range(first, len(content), 3):
            assert read(path, document_format, (first, second)) == whole, (first, second)


def test_json_lines_give_the_key_and_its_line(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENTS["jsonl"][1])
    assert [(line, text) for line, text, problem in read(path, JSONL) if not problem] == [
        (1, "one"),
        (3, "twö"),
        (5, "three"),
    ]


def test_blank_lines_part_documents_and_spaces_inside_stay(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENTS["blank lines"][1])
    assert read(path, BLANK) == [(3, "one\n two", ""), (8, "three", ""), (12, "fourö", "")]


def test_only_a_line_that_is_the_mark_parts_documents(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENTS["marks"][1])
    texts = [(line, text or problem) for line, text, problem in read(path, MARKED)]
    assert texts == [(1, "one\n\none b"), (6, "empty"), (8, "two %%\n%%three"), (11, "four")]


def test_without_a_separator_a_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b" a\n\n b\r\n\n")
    assert read(path, WHOLE) == [(1, " a\n\n b\r\n\n", "")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"txt": "a", "n": 1}', r"no key 'text' \(keys: txt, n\)"),
        (b'{"text": 5}', "'text' holds a int, not text"),
        (b'{"text": " \\n "}', "'text' is empty"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "not JSON"),
        (b"  ", "empty line"),
    ],
)
def test_a_bad_line_is_told_with_its_reason_and_the_next_one_read(tmp_path, line, problem):
    path = tmp_path / "file"
    path.write_bytes(line + b"\n" + json.dumps({"text": "good"}).encode() + b"\n")
    bad, good = read(path, JSONL)
    assert good == (2, "good", "")
    assert bad[0] == 1
    assert re.search(problem, bad[2])


@pytest.mark.parametrize("content", [b"", b" \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf\r\n"])
def test_a_text_of_nothing_but_byte_order_marks_is_as_empty_as_one_without(tmp_path, content):
    path = tmp_path / "text"
    path.write_bytes(content)
    assert read(path, WHOLE) == [(1, "", "empty")]
    path.write_text(json.dumps({"text": content.decode()}))
    assert read(path, JSONL) == [(1, "", "'text' is empty")]


def test_a_folder_is_its_files_by_name_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [source.path.removeprefix(f"{tmp_path}/") for source in find_input_files([tmp_path])]
    assert names == ["a.txt", "b.txt", "sub/c.txt"]


def test_endings_decide_the_format_and_a_doubt_is_an_error(tmp_path):
    for name in ("a.jsonl", "b.txt", "c.bin"):
        (tmp_path / name).write_text("x")
    kinds = {name: find_input_files([tmp_path / name]) for name in ("a.jsonl", "b.txt", "c.bin")}
    assert (format_of_endings(kinds["a.jsonl"]), format_of_endings(kinds["b.txt"])) == ("jsonl", "text")
    for doubtful in (kinds["c.bin"], kinds["a.jsonl"] + kinds["b.txt"]):
        with pytest.raises(DataError, match="Give --format"):
            format_of_endings(doubtful)


def test_missing_inputs_and_archives_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"PK\x03\x04" + b"zip")
    for name, message in (("a.jsonl", r"an archive \(zip\)"), ("b.jsonl", "does not exist")):
        with pytest.raises(DataError, match=message):
            find_input_files([tmp_path / name])
