"""A corpus of made-up words, a tokenizer of it, and a world of one rank."""

import csv
import gzip
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from backports import zstd

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.chat import Chat, load_chat
from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.megatron.preprocess import PreprocessOptions
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer

JSONL = DocumentFormat(kind="jsonl")


def datasets() -> Any:
    """The library, whose import takes seconds: only the process that runs these tests needs it."""
    return importlib.import_module("datasets")


def made_up_documents(count: int, *, words: int, seed: int = 0) -> list[str]:
    """Documents of common and rare words, with digits, tabs, blank lines and letters that no tokenizer expects."""
    draw = random.Random(seed)
    letters = "etaoinshrdlu"
    lexicon = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
    joints = [" "] * 30 + ["\n", "\n\n", "\t", " 1984 ", ", ", " é ", " 漢 ", " 😀 ", "    "]
    documents = []
    for _ in range(count):
        length = draw.randint(1, 2 * words)
        documents.append("".join(draw.choice(lexicon) + draw.choice(joints) for _ in range(length)) + "end")
    return documents


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)))
    return path


def write_lines(path: Path, *lines: object) -> str:
    """Write records as JSON lines, bytes as they are; return the path as text."""
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in content))
    return str(path)


SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0size"
"""A frame as pzstd puts it in front of the content."""
PACKED = {
    "lines": ("", bytes),
    "gzipped": (".gz", gzip.compress),
    "zstandard": (".zst", zstd.compress),
    "pzstd": (".zst", lambda text: SKIPPED + zstd.compress(text[:900]) + SKIPPED + zstd.compress(text[900:])),
}
DELIMITERS = {"csv": ",", "tsv": "\t"}
FORMS = (*PACKED, *DELIMITERS, "list", "utf-16", "parquet", "hub", "saved")


def in_form(form: str, lines: list[dict[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write records in one of FORMS; return the name of the data."""
    (folder / "a").mkdir()
    if form in PACKED:
        ending, pack = PACKED[form]
        path = folder / f"a/a.jsonl{ending}"
        path.write_bytes(pack("".join(json.dumps(line) + "\n" for line in lines).encode()))
        return str(path)
    if form in DELIMITERS:
        with open(path := folder / f"a/a.{form}", "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, lines[0].keys(), delimiter=DELIMITERS[form])
            table.writeheader()
            table.writerows(lines)
        return str(path)
    if form in ("list", "utf-16"):
        text = json.dumps(lines, indent=1) if form == "list" else "".join(json.dumps(line) + "\r\n" for line in lines)
        (path := folder / "a/a.json").write_text(text, encoding="utf-8" if form == "list" else form)
        return str(path)
    if form == "saved":
        datasets().Dataset.from_list(lines).save_to_disk(folder / "a/saved")
        return str(folder / "a/saved")
    # Here, and not in every process of tests, of which one has these.
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), folder / "a/train.parquet", row_group_size=7)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    return f"hub:{folder}/a:train" if form == "hub" else str(folder / "a/train.parquet")


def preprocessing(
    tokenizer: TokenizerConfig, output: Path, *inputs: Path, document_format: DocumentFormat = JSONL
) -> PreprocessOptions:
    return PreprocessOptions(inputs=inputs, output=output, tokenizer=tokenizer, document_format=document_format)


def chat_of(tokenizer: TokenizerConfig, template: str = "plain") -> Chat:
    return load_chat(template, load_tokenizer(tokenizer), tokenizer.path)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """About 1.3 MB of JSON lines: five shards."""
    return made_up_documents(700, words=280)


@pytest.fixture(scope="session")
def corpus(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    sample = write_jsonl(folder / "sample.jsonl", made_up_documents(40, words=100))
    model = folder / "small.model"
    train_tokenizer(TokenizerTraining(inputs=(sample,), output=model, document_format=JSONL, vocab_size=400))
    return TokenizerConfig(kind="sentencepiece", path=str(model))


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
