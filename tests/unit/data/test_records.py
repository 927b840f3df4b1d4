"""One record is the same in JSON lines, compressed, as parquet and through `datasets`, for all that read records."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from rich.console import Console

from mcore_rl.config.rl.prompts import PromptConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.documents import DocumentFormat, find_input_files, format_of_endings
from mcore_rl.data.examples import read_examples
from mcore_rl.data.preprocess import PreprocessOptions, preprocess
from mcore_rl.data.records import filled, read_records
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.rl.rollouts.prompts import read_problems
from tests.unit.data.conftest import made_up_documents

SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0size"
"""A frame as pzstd puts it in front of the content."""
PACKED = {
    "gzipped": (".gz", gzip.compress),
    "zstandard": (".zst", zstd.compress),
    "pzstd": (".zst", lambda text: SKIPPED + zstd.compress(text[:900]) + SKIPPED + zstd.compress(text[900:])),
}
FORMS = ("lines", *PACKED, "parquet", "hub")
LINES = [
    {"question": f"{i} + 1 = {{?}}", "solution": f"{i + 1}", "text": text}
    for i, text in enumerate(made_up_documents(30, words=40))
]


@pytest.fixture(params=FORMS)
def data(request, tmp_path, monkeypatch):
    """The name of the data in one of the forms."""
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    if request.param == "lines":
        (tmp_path / "a.jsonl").write_text(text)
        return str(tmp_path / "a.jsonl")
    if request.param in PACKED:
        ending, pack = PACKED[request.param]
        (tmp_path / f"a.jsonl{ending}").write_bytes(pack(text.encode()))
        return str(tmp_path / f"a.jsonl{ending}")
    (tmp_path / "a").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(LINES), tmp_path / "a/train.parquet", row_group_size=7
    )
    if request.param == "parquet":
        return str(tmp_path / "a/train.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return f"hub:{tmp_path}/a:train"


def test_records_are_the_same_in_every_form(data):
    assert [record.entry for record in read_records(data)] == LINES
    assert [record.line for record in read_records(data)] == list(range(1, 31))


def test_chats_prompts_and_documents_are_read_in_every_form(data, tokenizer, tmp_path):
    words = load_tokenizer(tokenizer)
    config = SFTDataConfig(prompt_template="Question: {question}\n", response_field="solution")
    examples = read_examples([data], config, load_chat("raw", words, tokenizer.path))
    first = examples.ids_T[: examples.starts_N[1]].tolist()
    assert first == [*words.encode("Question: 0 + 1 = {?}\n"), *words.encode("1"), words.eod_id]
    assert len(examples) == 30

    prompts = PromptConfig(
        files=(data,), prompt_template="{question} In {{braces}}.", answer_field="solution"
    )
    problem = read_problems(prompts, needs_answer=True).problems[4]
    assert (problem.prompt, problem.answer) == ("4 + 1 = {?} In {braces}.", "5")

    sources = find_input_files([Path(data)])
    options = PreprocessOptions(
        inputs=(Path(data),),
        output=tmp_path / "out",
        tokenizer=tokenizer,
        document_format=DocumentFormat(kind=format_of_endings(sources)),
    )
    sidecar = preprocess(options, Console(quiet=True))
    assert sidecar.documents == 30
    assert sidecar.tokens == sum(len(words.encode(line["text"])) + 1 for line in LINES)


def test_a_template_is_filled_and_a_field_that_is_not_there_is_named():
    assert filled(r"{a} \boxed{} {{a}} {not a name}", {"a": 4}) == r"4 \boxed{} {a} {not a name}"
    with pytest.raises(DataError, match=r"the template names \{b\}, which it lacks \(keys: a\)"):
        filled("{b}", {"a": 4})


def test_bad_lines_are_counted_with_file_and_line_and_more_than_allowed_end_the_run(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n[]\n{"prompt": "c"}\n')
    chat = load_chat("raw", load_tokenizer(tokenizer), tokenizer.path)
    examples = read_examples([str(path)], SFTDataConfig(max_bad=2), chat)
    assert len(examples) == 1
    assert [line.split(": ")[0] for line in examples.bad_lines] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: a JSON list"):
        read_examples([str(path)], SFTDataConfig(max_bad=1), chat)


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files_are_refused_where_data_is_made_of_them(ending, damage, tokenizer, tmp_path):
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}[ending]
    noise = random.Random(0).randbytes(3000).hex()
    packed = pack("".join(json.dumps({"text": noise[i : i + 60]}) + "\n" for i in range(2000)).encode())
    half = len(packed) // 2
    content = packed[:-9] if damage == "cut" else packed[:40] + bytes(half) + packed[40 + half :]
    (path := tmp_path / f"a.jsonl.{ending}").write_bytes(content)
    options = PreprocessOptions(
        inputs=(path,),
        output=tmp_path / "out",
        tokenizer=tokenizer,
        document_format=DocumentFormat(kind="jsonl"),
    )
    for read in (lambda: list(read_records(str(path))), lambda: preprocess(options, Console(quiet=True))):
        with pytest.raises(DataError, match=rf"a\.jsonl\.{ending} cannot be read: "):
            read()
    assert not (tmp_path / "out.bin").exists()


def test_damaged_files_and_absent_datasets_are_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-9])
    packed = zstd.compress(bytes(random.Random(0).randbytes(1000)) + b"\n")
    (tmp_path / "a.jsonl.zst").write_bytes(packed[:-9])
    (tmp_path / "b.jsonl.zst").write_bytes(packed[:4] + b"\xff" * 9 + packed[13:])
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name, reason in (
        *(
            (f"{name}.jsonl.{ending}", "cannot be read")
            for name, ending in (("a", "gz"), ("a", "zst"), ("b", "zst"))
        ),
        ("a.parquet", "cannot be read as parquet"),
    ):
        with pytest.raises(DataError, match=reason):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(DataError, match="cannot be loaded"):
        list(read_records(f"hub:{tmp_path}/gone:train"))
