"""Small folders as Moonlight and Kimi are published, and the encoding that their own code makes of them."""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

# As in tokenization_moonshot.py and tokenization_kimi.py.
PUBLISHED = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+""",
]  # fmt: skip
PATTERN = "|".join(PUBLISHED)
# As those of Moonlight-16B-A3B-Instruct: id behind the ranks, text, whether it is special.
NAMED = (
    (0, "[BOS]", True),
    (1, "[EOS]", True),
    (2, "<|im_end|>", True),
    (3, "<|im_user|>", True),
    (4, "<|im_assistant|>", True),
    (10, "<|im_system|>", True),
    (11, "<|tool_call_begin|>", False),
    (17, "<|im_middle|>", True),
    (254, "[UNK]", True),
    (255, "[PAD]", True),
)
TEMPLATE = (
    "{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{%- endif -%}"
    "<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
SAMPLE = (
    "It's what they'll say: we've 12345 words, I'm sure, and you'd agree.\nDON'T stop; DOESN'T matter\r\n\n\n"
    "def f(x):\n    return x ** 2  # naïve Größe\n\n漢字かな交じり文 中文English混合 北京市 한국어 русский עברית "
    "🙂👩‍👩‍👧 e\u0301 aaaaaaa bbbb      cccc\t\t\tend aaaaabaaab"
)


def ranks(num_tokens: int) -> dict[bytes, int]:
    """Byte pairs of `SAMPLE`, cut by the pattern: the ids that a trainer gives them are their ranks."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([SAMPLE] * 3, trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {bytes(byte_of[c] for c in token): index for token, index in inner.get_vocab().items()}


def write_tokenizer(folder: Path, module: str, num_tokens: int = 400) -> Path:
    """Write the tokenizer's files, code included, with `num_tokens` ranks and the reserved tokens behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(ranks(num_tokens).items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(num_tokens + i): {"content": text, "special": special} for i, text, special in NAMED}
    settings = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "chat_template": TEMPLATE,
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    parts = "".join(f'            r"""{part}""",\n' for part in PUBLISHED)
    (folder / f"{module}.py").write_text(f"class TikTokenTokenizer:\n    pat_str = '|'.join([\n{parts}    ])\n")
    return folder


class PublishedTokenizer:
    """The ids that the class in a model's folder makes of a text."""

    def __init__(self, folder: Path, num_reserved: int = 256) -> None:
        lines = (folder / "tiktoken.model").read_bytes().splitlines()
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        settings: Mapping[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        named = {int(index): entry["content"] for index, entry in settings["added_tokens_decoder"].items()}
        reserved = range(len(self.ranks), len(self.ranks) + num_reserved)
        self.special = {named.get(index, f"<|reserved_token_{index}|>"): index for index in reserved}
        self.model = tiktoken.Encoding(
            name="published", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=self.special
        )

    def encode(self, text: str, *, allow_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(text), 400_000):
            for piece in short_runs(text[start : start + 400_000]):
                if allow_special_tokens:
                    ids += self.model.encode(piece, allowed_special="all")
                else:
                    ids += self.model.encode(piece, disallowed_special=())
        return ids


def short_runs(text: str, longest: int = 25_000) -> Iterator[str]:
    """Cut a text so that no piece has more than `longest` characters of white space, or of other text, in a row."""
    begin = length = 0
    for index, letter in enumerate(text):
        is_other = index == 0 or letter.isspace() != text[index - 1].isspace()
        length = 1 if is_other else length + 1
        if length > longest:
            yield text[begin:index]
            begin, length = index, 1
    yield text[begin:]
