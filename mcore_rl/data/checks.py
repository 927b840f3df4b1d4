"""Checks that data, tokenizer and model fit together; they depend only on the files, so all ranks agree."""

from collections.abc import Mapping

from mcore_rl.data.index_file import IndexFile, first_outside
from mcore_rl.data.sidecar import Sidecar
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError
from mcore_rl.storage.files import with_ending


def check_sidecar(index: IndexFile, sidecar: Sidecar) -> None:
    """Raise DataError unless the sidecar describes this very pair."""
    described = (sidecar.documents, sidecar.tokens, sidecar.dtype)
    found = (index.lengths_N.size, index.num_tokens, index.dtype.name)
    if described != found:
        raise DataError(
            f"{index.prefix}.json describes {described[0]} documents, {described[1]} tokens of {described[2]}; the "
            f".idx has {found[0]}, {found[1]} of {found[2]}. The files are of different runs: make the data "
            "again with `mcore-rl data preprocess`."
        )


def check_same_tokenizer(sidecars: Mapping[str, Sidecar | None]) -> None:
    """Raise DataError if two datasets of a blend were made with different tokenizers."""
    by_digest = {sidecar.tokenizer_digest: prefix for prefix, sidecar in sidecars.items() if sidecar}
    if len(by_digest) > 1:
        raise DataError(
            "the data was made with different tokenizers: "
            + ", ".join(f"{prefix} with {digest[:12]}" for digest, prefix in by_digest.items())
            + ". Preprocess all of it with one."
        )


def check_tokenizer(prefix: str, sidecar: Sidecar, tokenizer: Tokenizer, path: str) -> None:
    """Raise DataError unless `tokenizer` made the data."""
    if sidecar.tokenizer_digest != tokenizer.digest:
        raise DataError(
            f"data prefix {prefix!r} was made with the tokenizer {sidecar.tokenizer_digest[:12]} of "
            f"{sidecar.vocab_size} tokens; data.tokenizer.path={path!r} is {tokenizer.digest[:12]} of "
            f"{tokenizer.vocab_size}. Name the tokenizer it was made with, or preprocess it again with this "
            "one."
        )
    if sidecar.eod_id != tokenizer.eod_id:
        raise DataError(
            f"data prefix {prefix!r} ends documents with token {sidecar.eod_id}; "
            f"data.tokenizer.path={path!r} now names {tokenizer.eod_id} as end of document. Undo the change "
            "of its special tokens, or preprocess again."
        )


def check_vocabulary(index: IndexFile, sidecar: Sidecar | None, vocab_size: int) -> None:
    """Raise DataError unless the model has a row for every token of the data and of its tokenizer."""
    if sidecar and sidecar.vocab_size > vocab_size:
        raise DataError(
            f"data prefix {index.prefix!r} was made with a tokenizer of {sidecar.vocab_size} tokens, and "
            f"model.vocab_size={vocab_size}. Set model.vocab_size={sidecar.vocab_size}."
        )
    if sidecar and sidecar.max_token_id < vocab_size:
        return
    outside = first_outside(index, vocab_size)
    if outside is None:
        return
    remedy = (
        "Ids below 0 are larger ids that this type is too small for: make the data again in a larger type."
        if outside.token < 0
        else "Set model.vocab_size to the tokenizer's size, or preprocess with the model's tokenizer."
    )
    raise DataError(
        f"{with_ending(index.prefix, '.bin')} ({index.dtype.name}) holds the token {outside.token} in document "
        f"{outside.document} at position {outside.position}, both from 0, and model.vocab_size={vocab_size} allows "
        f"ids from 0 to {vocab_size - 1}. {remedy}"
    )


def check_enough(prefix: str, *, tokens: int, seq_length: int) -> None:
    """Raise DataError unless the training part fills a sequence: otherwise Megatron would count epochs forever."""
    if tokens <= seq_length:
        raise DataError(
            f"the train part of data prefix {prefix!r} has {tokens} tokens; one sequence takes {seq_length + 1}. Give "
            f"more text, or lower data.seq_length={seq_length}."
        )
