"""What ends a completion, on the templates and files that published models have."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.chat import Chat, Conversation, load_chat
from mcore_rl.data.end_tokens import describe_ends, end_tokens, no_end_warning
from mcore_rl.data.examples import read_examples
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|return|>",
    "</s>",
]
PLAIN_ADDED = ["\n\n", "</think>", "<|eot|>"]
EACH = "{% for message in messages %}"
TEMPLATES = {
    "chatml": (
        EACH + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "white space and thoughts are no end": (
        EACH
        + "<|im_start|>{{ message.role }}\n</think>\n\n{{ message.content }}\n\n<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "an added token that is not special": (EACH + "{{ message.content }}<|eot|>\n{% endfor %}", "<|eot|>"),
    "the end of the text": (
        EACH + "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    # As gpt-oss: the last turn ends otherwise than the ones before it.
    "another end of the last turn": (
        EACH + "{{ message.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}",
        "<|return|>",
    ),
    # As GLM-4: a turn ends where the user's begins.
    "the next turn's begin": (EACH + "<|{{ message.role }}|>\n{{ message.content }}{% endfor %}", "<|user|>"),
    "a cut text": (
        EACH + "{{ message.content.strip().upper() | lower }}<|im_end|>{% endfor %}",
        "<|im_end|>",
    ),
    "no token": (EACH + "{{ message.role }}: {{ message.content }}\n{% endfor %}", None),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(PLAIN_ADDED)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tmp_path


def loaded(folder: Path, template: str) -> tuple[Tokenizer, Chat]:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    return tokenizer, load_chat("tokenizer", tokenizer, str(folder))


def id_of(folder: Path, text: str) -> int:
    index = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    assert isinstance(index, int)
    return index


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_the_token_that_the_template_puts_after_it(name: str, folder: Path) -> None:
    template, wanted = TEMPLATES[name]
    _, chat = loaded(folder, template)
    assert chat.turn_end_ids == (() if wanted is None else (id_of(folder, wanted),))


def test_ends_are_those_of_template_tokenizer_and_generation_config_with_the_end_of_a_document(
    folder: Path,
) -> None:
    tokenizer, chat = loaded(folder, TEMPLATES["chatml"][0])
    turn, text, document = (id_of(folder, name) for name in ("<|im_end|>", "</s>", "<|endoftext|>"))
    assert list(end_tokens(tokenizer, chat, str(folder))) == [turn, text, document]
    further = id_of(folder, "<|return|>")
    for entry, wanted in (
        (further, [turn, text, further, document]),
        ([document, turn], [turn, text, document]),
    ):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": entry}))
        assert list(end_tokens(tokenizer, chat, str(folder))) == wanted
    (folder / "generation_config.json").write_text("{}")
    ends = end_tokens(tokenizer, None, str(folder))
    assert list(ends) == [text, document]
    assert f"'</s>' ({text}, eos_token of the tokenizer)" in describe_ends(ends, tokenizer)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"eos_token_id": 13}', r"names eos_token_id=13, and the tokenizer beside it has the ids 0 to 12"),
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id=\['</s>'\]"),
        ("[1]", "is no JSON object"),
        ("{", "is no JSON object"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(content: str, error: str, folder: Path) -> None:
    tokenizer, chat = loaded(folder, TEMPLATES["chatml"][0])
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=error):
        end_tokens(tokenizer, chat, str(folder))


def test_an_end_that_has_no_text_is_named(tokenizer: TokenizerConfig) -> None:
    words = load_tokenizer(tokenizer)
    assert words.decode([words.eod_id]) == ""
    said = describe_ends(end_tokens(words, None, tokenizer.path), words)
    assert said == f"a completion ends at '<eod>' ({words.eod_id}, eos_token of the tokenizer)"


def test_a_plain_chat_ends_turns_as_documents_end(tokenizer: TokenizerConfig) -> None:
    words = load_tokenizer(tokenizer)
    assert list(end_tokens(words, load_chat("plain", words, tokenizer.path), tokenizer.path)) == [
        words.eod_id
    ]


def test_special_tokens_of_a_text_without_roles_are_tokens_and_of_one_with_roles_text(folder: Path) -> None:
    tokenizer, _ = loaded(folder, TEMPLATES["chatml"][0])
    turn = {"role": "user", "content": "a<|im_end|>"}
    end = id_of(folder, "<|im_end|>")
    for template, has_token in (("raw", True), ("plain", False)):
        chat = load_chat(template, tokenizer, str(folder))
        ids = chat.prompt(Conversation(messages=(turn,)))
        assert (end in ids) == has_token
    assert tokenizer.encode_marked("a<|im_end|>") == [id_of(folder, "a"), end]
    assert end not in tokenizer.encode("a<|im_end|>")


PROMPT_AND_ANSWER = (
    EACH
    + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<END IN>{% endgeneration %}<END OUT>"
    "{% else %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "is_taught"),
    [
        (PROMPT_AND_ANSWER.replace("<END IN>", "<|im_end|>").replace("<END OUT>", ""), True),
        # The model reads the end of its turn and is never trained on it.
        (PROMPT_AND_ANSWER.replace("<END OUT>", "<|im_end|>").replace("<END IN>", ""), False),
        (PROMPT_AND_ANSWER.replace("<END IN>", "").replace("<END OUT>", ""), False),
        (TEMPLATES["chatml"][0], True),
        (TEMPLATES["the end of the text"][0], True),
        ("plain", True),
    ],
    ids=["in the mark", "after the mark", "no end", "without marks", "the end of the text", "plain"],
)
def test_a_template_whose_answers_teach_no_end_is_warned_of(
    template: str, is_taught: bool, folder: Path, tmp_path: Path
) -> None:
    """None of 1,200 conversations trains on an end; of them 1,000 are looked at."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    if template == "plain":
        chat = load_chat("plain", tokenizer, str(folder))
    else:
        tokenizer, chat = loaded(folder, template)
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "aa"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(line) + "\n") * 1200)
    examples = read_examples([str(tmp_path / "chats.jsonl")], SFTDataConfig(), chat)
    warning = no_end_warning(examples, end_tokens(tokenizer, chat, str(folder)), tokenizer)
    assert (warning is None) == is_taught
    assert is_taught or "none of the first 1000 conversations trains on a token that ends" in str(warning)
