"""Training of a sentencepiece tokenizer with a lossless encoding: decode(encode(text)) is text."""

import io
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sentencepiece

from mcore_rl import __version__
from mcore_rl.data.documents import DocumentFormat, DocumentReader, FileSlice, InputFile, find_input_files
from mcore_rl.data.records import MAX_BAD, refuse_bad_share
from mcore_rl.errors import DataError
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.storage.files import disk_errors_explained, make_folder, refuse_replacing, with_ending, write_atomically

UNKNOWN_ID, BOS_ID, EOD_ID, PAD_ID = 0, 1, 2, 3
LONGEST_LINE_BYTES = 1 << 20
"""Lines longer than this are cut: sentencepiece would leave them out."""
SAMPLE_SEED = 0
MANIFEST_ENDING = ".manifest.json"
"""Ending of a tokenizer's manifest, without which it is not replaced."""
AGAIN = "Make room (or give write access) there, or give another output, and run again."
TOO_LARGE = re.compile(r"too high \(\d+\)\. Please set it to a value <= (\d+)")
TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerTraining:
    """Inputs and settings of a tokenizer."""

    inputs: tuple[Path, ...]
    output: Path
    document_format: DocumentFormat
    vocab_size: int
    model_type: Literal["bpe", "unigram"] = "bpe"
    character_coverage: float = 0.9995
    """Share of the text's characters that get a piece; the rest are spelt in bytes."""
    max_bytes: int = 512 << 20
    """Bytes of text that are read; of a larger corpus documents are drawn at random, the same at every run."""
    threads: int = 4
    """Number of threads. It is written into the file, so that the file's digest depends on it."""
    max_bad: float = MAX_BAD
    """Share of the documents that may be bad: they are left out."""
    overwrite: bool = False
    """Replace the file where it is a tokenizer that this function wrote."""


def train_tokenizer(options: TokenizerTraining) -> int:
    """Write the model and its manifest; return the number of lines read. Each byte and digit has a piece."""
    if not 0 < options.character_coverage <= 1:
        raise DataError(f"character coverage {options.character_coverage}: wanted above 0, at most 1.")
    sources = [("an input", path) for path in options.inputs]
    manifest = with_ending(options.output, MANIFEST_ENDING)
    not_ours = f"is no tokenizer of this command (by {manifest.name})"
    refuse_replacing(
        options.output,
        sources,
        overwrite=options.overwrite,
        foreign=lambda output: None if _recorded(manifest) == crc32_of(output) else not_ours,
    )
    refuse_replacing(
        manifest,
        sources,
        overwrite=True,
        foreign=lambda path: None if _recorded(path) is not None else "was not written by this command",
    )
    make_folder(options.output.parent, AGAIN)  # now: the training may take an hour
    lines = _Lines(find_input_files(options.inputs), options)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            character_coverage=options.character_coverage,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=UNKNOWN_ID,
            bos_id=BOS_ID,
            eos_id=EOD_ID,
            pad_id=PAD_ID,
            max_sentence_length=LONGEST_LINE_BYTES,
            num_threads=options.threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explained(str(error), options, lines)) from error
    refuse_bad_share(lines.num_bad, lines.num_documents, options.max_bad, f" The first is {lines.problem}.")
    with disk_errors_explained(options.output.parent, AGAIN):
        write_atomically(options.output, model.getvalue())
        content = {"program": f"mcore_rl {__version__}", "kind": "tokenizer", "crc32": crc32_of(options.output)}
        write_atomically(manifest, json.dumps(content) + "\n")
    return lines.count


def _recorded(manifest: Path) -> object:
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        return content["crc32"] if content["kind"] == "tokenizer" else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class _Lines:
    def __init__(self, sources: Sequence[InputFile], options: TokenizerTraining) -> None:
        self.count = self.num_documents = self.num_bad = 0
        self.problem = ""
        self._sources = sources
        self._document_format = options.document_format
        self._share = min(1.0, options.max_bytes / max(1, sum(source.num_bytes for source in sources)))

    def __iter__(self) -> Iterator[str]:
        draw = random.Random(SAMPLE_SEED)
        for source in self._sources:
            for record in DocumentReader(
                FileSlice(path=source.path, start=0, end=source.num_bytes), self._document_format
            ):
                if record.problem:
                    self.num_bad += 1
                    self.problem = self.problem or f"{source.path}:{record.line}: {record.problem}"
                    continue
                self.num_documents += 1
                if self._share == 1.0 or draw.random() < self._share:
                    longest = LONGEST_LINE_BYTES // 4  # UTF-8 takes at most four bytes a character
                    for line in record.text.split("\n"):
                        for start in range(0, len(line), longest):
                            self.count += 1
                            yield line[start : start + longest]


def _explained(message: str, options: TokenizerTraining, lines: _Lines) -> str:
    if lines.count == 0:
        return f"no text in the inputs ({lines.num_bad} bad lines; {lines.problem}). Look at --key and --format."
    if found := TOO_LARGE.search(message):
        return (
            f"--vocab-size {options.vocab_size} is more than these {lines.count} lines of text yield. The "
            f"largest that fits is {found[1]}: take it, or give more text."
        )
    if found := TOO_SMALL.search(message):
        return (
            f"--vocab-size {options.vocab_size} is less than the bytes and characters alone take. The "
            f"smallest that fits is {found[1]}: take it, or lower --character-coverage "
            f"({options.character_coverage})."
        )
    return f"sentencepiece trains no {options.model_type} model of {options.vocab_size} pieces: {message}"
