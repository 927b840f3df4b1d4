"""Small tokenizers, one with a chat template, as the files of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.hf_models import VOCAB

WORDS = "the cat sat on mat and dog while nobody looked at letters".split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save_tokenizer(
    folder: Path,
    words: Sequence[str],
    unknown: str,
    special: Sequence[str] = (),
    *,
    splits_characters: bool = False,
    **config: Any,
) -> Tokenizer:
    """Write a tokenizer of these words, in the order of their ids, and of special tokens that are among them or follow.

    Args:
        unknown: the word that stands for all others.
        splits_characters: a text is split into its characters, and not at its blanks.
        config: the fields of tokenizer_config.json.
    """
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if splits_characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, with the special tokens of a chat."""
    words = ["?", *WORDS, "user", "assistant", "system"]
    words += [f"w{number}" for number in range(VOCAB - len(words) - 3)]  # as many as the model has, with those below
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fields = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = save_tokenizer(folder, words, "?", special, **fields)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
