"""The tokens that end a completion: the end of a chat's turn and the end of a text, as a model's files name them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy

from mcore_rl.data.chat import Chat
from mcore_rl.data.examples import Examples
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError

GENERATION_CONFIG = "generation_config.json"
"""File of a Hugging Face folder that names its end tokens, in `eos_token_id`."""

LOOKED_AT = 1000
"""Conversations in which `no_end_warning` looks for an end token."""


def end_tokens(tokenizer: Tokenizer, chat: Chat | None, path: str | None) -> dict[int, str]:
    """Return the ids of the tokens that end a completion, and for each the place that names it.

    They are the end of the assistant's turn in the chat template, the tokenizer's `eos_token`, the ids of
    generation_config.json, and the end of a document. A model that was fine-tuned with a template ends with the first,
    which need not be among the rest.

    Args:
        tokenizer: the tokenizer that was read from `path`.
        chat: the chat template; None if the model is not a chat model, or its template is unknown.
        path: folder of the tokenizer, which may hold generation_config.json, or a file.

    Raises:
        DataError: generation_config.json cannot be read, or names an id that the tokenizer does not have.
    """
    ends: dict[int, str] = {}
    for token in chat.turn_end_ids if chat is not None else ():
        ends.setdefault(token, "end of the assistant's turn in the chat template")
    if tokenizer.eos_id is not None:
        ends.setdefault(tokenizer.eos_id, "eos_token of the tokenizer")
    for token in _ids_of_generation_config(Path(path) / GENERATION_CONFIG, tokenizer) if path else ():
        ends.setdefault(token, f"eos_token_id in {GENERATION_CONFIG}")
    ends.setdefault(tokenizer.eod_id, "end of a document")
    return ends


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or the name of a special token that decodes to nothing."""
    names = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eod_id: "<eod>"}
    return tokenizer.decode([token]) or names.get(token, f"<{token}>")


def describe_ends(ends: Mapping[int, str], tokenizer: Tokenizer) -> str:
    """Return one line for the log: the text, id and origin of each end token."""
    tokens = [f"{token_name(tokenizer, token)!r} ({token}, {origin})" for token, origin in ends.items()]
    return f"a completion ends at {', '.join(tokens)}"


def no_end_warning(examples: Examples, ends: Mapping[int, str], tokenizer: Tokenizer) -> str | None:
    """Return a warning when the first conversations train on no end token; None when they do.

    A model fine-tuned on them does not stop after its answer but continues to the largest length: every completion is
    truncated.

    Args:
        examples: conversations as tokens.
        ends: tokens that end a completion, as `end_tokens` returns them.
        tokenizer: the tokenizer of `examples`.
    """
    num_looked_at = min(len(examples), LOOKED_AT)
    num_tokens = int(examples.starts_N[num_looked_at])
    trained_T = examples.ids_T[:num_tokens][examples.assistant_mask_T[:num_tokens]]
    if numpy.isin(trained_T, list(ends)).any():
        return None
    return (
        f"warning: none of the first {num_looked_at} conversations trains on a token that ends a completion, and "
        f"{describe_ends(ends, tokenizer)}. The model learns no end to its answers, and will write to the largest "
        "length. Let data.chat_template end the assistant's turn with such a token, before {% endgeneration %} where "
        "the template has that mark."
    )


def _ids_of_generation_config(path: Path, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of `eos_token_id`, which is a number, a list of numbers, or absent."""
    if not path.is_file():
        return []
    try:
        entry = json.loads(path.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is no JSON object: {error}. Copy it again.") from error
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"{path} names eos_token_id={entry!r}, and the tokenizer beside it has the ids 0 to "
                f"{tokenizer.vocab_size - 1}. Correct eos_token_id, or delete it."
            )
    return ids
