"""A small tokenizer with a chat template, as the files of a Hugging Face folder."""

import json
from pathlib import Path

import tokenizers

from tests.hf_models import VOCAB

WORDS = "the cat sat on mat and dog while nobody looked at letters".split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, with the special tokens of a chat."""
    words = ["?", *WORDS, "user", "assistant", "system"]
    words += [f"w{number}" for number in range(VOCAB - len(words) - 3)]  # as many as the model has, with those below
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, "?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
