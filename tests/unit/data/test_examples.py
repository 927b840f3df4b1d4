"""Keys that change what a record means, in the usual data formats, against expectations that are written by hand."""

from pathlib import Path

import pytest

from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.config.rl.rollout import PromptConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.documents import DocumentReader, FileSlice
from mcore_rl.data.examples import read_examples
from mcore_rl.data.preferences import read_preferences
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.rl.rollouts.prompts import read_problems
from tests.unit.data.conftest import JSONL, chat_of, write_lines


def said(role, content, **keys):
    return {"role": role, "content": content, **keys}


ASKED, ANSWERED = said("user", "etao"), said("assistant", "nit")
CHAT, PAIR = {"messages": [ASKED, ANSWERED]}, {"prompt": "etao", "completion": "nit"}


def chat(*turns, **keys):
    return {"messages": list(turns), **keys}


def sharegpt(**keys):
    return {"conversations": [{"from": "human", "value": "etao"}, {"from": "gpt", "value": "nit", **keys}]}


TWICE = (said("assistant", "sun"), said("user", "oats"))
CONVERSATIONS = {
    # What is trained on, by the texts of the assistant's turns.
    "OpenAI weights": (chat(ASKED, TWICE[0] | {"weight": 0}, TWICE[1], ANSWERED | {"weight": 1}), ["nit"]),
    "a weight of 0.0": (chat(ASKED, TWICE[0] | {"weight": 0.0}, TWICE[1], ANSWERED), ["nit"]),
    "null weights": (chat(ASKED | {"weight": None}, ANSWERED | {"weight": None, "tool_calls": []}), ["nit"]),
    "axolotl": (chat(ASKED | {"train": False}, TWICE[0] | {"train": False}, TWICE[1], ANSWERED), ["nit"]),
    "ms-swift": (chat(ASKED, TWICE[0] | {"loss": True}, TWICE[1], ANSWERED | {"loss": False}), ["sun"]),
    "verl": (chat(ASKED | {"loss_mask": 0}, TWICE[0] | {"loss_mask": 0}, TWICE[1], ANSWERED), ["nit"]),
    "ShareGPT": ({"conversations": [*sharegpt(weight=0)["conversations"], *sharegpt()["conversations"]]}, ["nit"]),
    "LLaMA-Factory's history": ({"instruction": "etao", "output": "nit", "history": [["oats", "sun"]]}, ["sun", "nit"]),
    "ms-swift's history": ({"query": "etao", "response": "nit", "history": [["oats", "sun"]]}, ["sun", "nit"]),
    "history of turns": (PAIR | {"history": [TWICE[1], TWICE[0]]}, ["sun", "nit"]),
    "an empty history": ({"instruction": "etao", "output": "nit", "history": []}, ["nit"]),
    "KTO, an answer to learn": (PAIR | {"label": True}, ["nit"]),
    "kto_tag of an answer to learn": (sharegpt() | {"kto_tag": True}, ["nit"]),
    "NeMo's mask": (sharegpt() | {"mask": "User", "system": ""}, ["nit"]),
    "UltraFeedback's better side": (CHAT | {"chosen": CHAT["messages"], "rejected": [ASKED]}, ["nit"]),
    "absent keys of a table": (
        CHAT | {"label": None, "weight": float("nan"), "images": [], "prompt": None, "tools": None},
        ["nit"],
    ),
}
REFUSED = {
    "KTO": (PAIR | {"label": False}, '"label" is False: it says whether the answer is to be learned. Leave out'),
    "kto_tag": (sharegpt() | {"kto_tag": False}, '"kto_tag" is False'),
    "a wrong solution": ({"problem": "a", "solution": "b", "is_correct": False}, '"is_correct" is False'),
    "a weight between": (chat(ASKED, ANSWERED | {"weight": 0.5}), '(assistant): "weight" is 0.5'),
    "no trained turn": (chat(ASKED, ANSWERED | {"weight": 0}), "no text of the assistant is trained on"),
    "a trained user": (chat(ASKED | {"train": True}, ANSWERED), "only turns of the assistant are trained on"),
    "axolotl's detail": (chat(ASKED, ANSWERED | {"train_detail": [{"train": False}]}), '"train_detail" is [{'),
    "a weighted part": (
        chat(ASKED, said("assistant", [{"type": "text", "text": "a", "train": False}])),
        '"train" is False',
    ),
    "a weighted record": (CHAT | {"weight": 0}, '"weight" is 0: all texts of a file count alike'),
    "ms-swift's rejected": (CHAT | {"rejected_response": "x"}, "\"rejected_response\" is 'x': it is the worse of two"),
    "other sides": (CHAT | {"chosen": [ASKED, TWICE[0]], "rejected": [ASKED]}, '"rejected" is [{'),
    "labelled steps": (PAIR | {"labels": [True, False]}, '"labels" is [True, False]: it labels parts'),
    "NeMo's label": (sharegpt(label="quality:0"), "\"label\" is 'quality:0': it rates the turn"),
    "NeMo's other mask": (sharegpt() | {"mask": "Assistant"}, "\"mask\" is 'Assistant'"),
    "pictures": (CHAT | {"images": ["a.png"]}, "only texts are trained on"),
    "an old call": (chat(ASKED, said("assistant", "", function_call={"name": "f"})), '"function_call" is {'),
    "settings of the template": (
        CHAT | {"chat_template_kwargs": {"enable_thinking": False}},
        "all records are rendered alike",
    ),
    "reasoning beside": (PAIR | {"reasoning_content": "so"}, "reasoning is read in the assistant's turns"),
    "reasoning": (chat(ASKED, ANSWERED | {"reasoning": "so"}), 'has "reasoning", which a plain template cannot'),
    "a call of a tool": (
        chat(ASKED, said("assistant", None, tool_calls=[{"function": {"name": "add"}}])),
        "a turn of 'assistant' has \"tool_calls\", which a plain template cannot",
    ),
    "no content": (chat(ASKED, said("assistant", None)), 'turn 2 of "messages" (assistant): it has no content'),
    "no key of content": (chat({"role": "user", "text": "a"}, ANSWERED), "calls no tool (keys: role, text)"),
    "no value": (sharegpt() | {"conversations": [{"from": "human", "value": None}]}, "it has no content"),
    "a history of text": (PAIR | {"history": "a"}, '"history" is a str, wanted a list of turns'),
    "a history without end": (PAIR | {"history": [["a", None]]}, 'turn 2 of "history" (assistant): it has no content'),
}


def trained(examples, tokenizer):
    """The texts that are trained on, each up to the token that ends it."""
    words = load_tokenizer(tokenizer)
    ids = examples.ids_T[examples.assistant_mask_T].tolist()
    ends = [index for index, token in enumerate(ids) if token == words.eod_id]
    assert ends and ends[-1] == len(ids) - 1
    return [words.decode(ids[a + 1 : b]) for a, b in zip([-1, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_is_trained_on_is_what_the_keys_of_the_format_say(read, tokenizer, name):
    entry, texts = CONVERSATIONS[name]
    examples = read(entry)
    assert trained(examples, tokenizer) == texts
    assert not [note for note in examples.notes if note.startswith("warning")]


def test_a_turn_without_weight_is_in_the_context_of_what_follows(read):
    wanted = read(chat(ASKED, *TWICE, ANSWERED))
    assert read(CONVERSATIONS["OpenAI weights"][0]).ids_T.tolist() == wanted.ids_T.tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_cannot_be_followed_is_refused_with_its_line_and_what_to_do(read, tmp_path, name):
    entry, reason = REFUSED[name]
    with pytest.raises(DataError) as refused:
        read(CHAT, entry)
    assert f"{tmp_path}/a.jsonl:2: " in str(refused.value) and reason in str(refused.value)
    assert len(read(CHAT, entry, max_bad=1)) == 1


def test_every_other_key_is_counted_by_name_whatever_its_type(read, tmp_path):
    lines = [
        CHAT | {"id": 3, "score": 0.5, "meta": {"a": 1}, "tags": ["x"], "note": None, "flag": False},
        chat(ASKED | {"name": "Ann"}, ANSWERED, id=4),
        PAIR | {"messages": None, "category": "x"},
    ]
    shapes, warning = read(*lines).notes
    forms = "OpenAI messages (messages) and TRL prompt and completion (prompt, completion)"
    assert shapes == f"{tmp_path}/a.jsonl is read as {forms}"
    names = "id (2), score (1), meta (1), tags (1), flag (1), name of turns (1), category (1)"
    assert warning == (
        f"warning: {tmp_path}/a.jsonl has keys that are not read: {names}; a prompt_template can use those of "
        "records, a chat template those of turns"
    )


SIDES = {"prompt": "etao", "chosen": "nit", "rejected": "sun"}
STEPS = {"prompt": "etao", "completions": ["nit", "sun"], "labels": [True, False]}


@pytest.mark.parametrize(
    ("line", "reason", "form"),
    [
        (SIDES | {"weight": 0.3}, '"weight" is 0.3: all texts', "auto"),
        (SIDES | {"prompt": [said("user", None)]}, "it has no content", "auto"),
        (SIDES | {"chosen": [ANSWERED | {"weight": 0}], "rejected": [TWICE[0]]}, "an answer has no tokens", "auto"),
        (STEPS | {"loss": 0}, '"loss" is 0', "steps"),
    ],
)
def test_preferences_and_steps_refuse_the_same_keys(tmp_path, tokenizer, line, reason, form):
    with pytest.raises(DataError) as refused:
        preferences(tmp_path, tokenizer, line, form)
    assert f"{tmp_path}/a.jsonl:1: " in str(refused.value) and reason in str(refused.value)


@pytest.mark.parametrize(("line", "form"), [(SIDES, "auto"), (STEPS, "steps")])
def test_preferences_and_steps_read_a_history_and_count_other_keys(tmp_path, tokenizer, line, form):
    with_history = line | {"history": [["oats", "sun"]], "system": "nit", "score": 3}
    turns = [said("system", "nit"), said("user", "oats"), said("assistant", "sun"), ASKED]
    found, wanted = (preferences(tmp_path, tokenizer, one, form) for one in (with_history, line | {"prompt": turns}))
    assert found.ids_T.tolist() == wanted.ids_T.tolist()
    *_, warning = found.notes
    assert "has keys that are not read: score (1);" in warning
    assert len(wanted.notes) == 1


def preferences(tmp_path, tokenizer, line, form):
    path = write_lines(tmp_path / "a.jsonl", line)
    config = PreferenceDataConfig(format=form, chat_template="plain")
    return read_preferences([path], config, chat_of(tokenizer), packed_length=256, length_multiple=1)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ({"prompt": "a", "history": [["b", "c"]]}, ["b", "c", "a"]),
        ({"prompt": "a", "system": "s"}, ["s", "a"]),
        ({"prompt": [said("user", "a")], "system_prompt": "s"}, ["s", "a"]),
        ({"prompt": [said("system", "t"), said("user", "a")], "system": "s"}, ["t", "a"]),
        ({"question": "a", "answer": "b", "system": "s"}, ["s", "a"]),
        ({"prompt": "a", "label": "42", "weight": 0.5, "score": 3}, ["a"]),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "tools come from rl.environment"),
        ({"prompt": [said("user", "a", train=True)]}, "only turns of the assistant are trained on"),
        ({"prompt": [said("user", None)]}, "it has no content"),
    ],
)
def test_prompts_have_what_stands_before_them_and_refuse_what_they_cannot_have(tmp_path, line, wanted):
    config = PromptConfig(files=(write_lines(tmp_path / "a.jsonl", line),))
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            read_problems(config)
        return
    (problem,) = read_problems(config).problems
    assert ([turn["content"] for turn in problem.messages] or [problem.prompt]) == wanted
    others = line.keys() - {"prompt", "question", "answer"}
    assert {key: problem.fields[key] for key in others} == {key: line[key] for key in others}


def test_a_prompt_template_that_names_the_system_prompt_has_it_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "system": "s"})
    config = PromptConfig(files=(path,), prompt_template="{system}: {prompt}")
    (problem,) = read_problems(config).problems
    assert (problem.prompt, problem.messages) == ("s: a", ())


def test_a_weighted_document_is_a_bad_line(tmp_path):
    lines = [{"text": "a", "weight": 1, "label": 0, "id": 3}, {"text": "b", "weight": 0}, {"text": "c", "train": None}]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    read = list(DocumentReader(FileSlice(path=path, start=0, end=Path(path).stat().st_size), JSONL))
    found = [(document.text, document.problem.partition(":")[0]) for document in read]
    assert found == [("a", ""), ("", '"weight" is 0'), ("c", "")]


@pytest.fixture
def read(tmp_path, tokenizer):
    def read_lines(*lines, **settings):
        path = write_lines(tmp_path / "a.jsonl", *lines)
        return read_examples([path], SFTDataConfig(**{"chat_template": "plain"} | settings), chat_of(tokenizer))

    return read_lines


def test_both_formats_say_the_same(read, tokenizer):
    examples = read(CHAT, PAIR, b"")
    assert len(examples) == 2
    begin = examples.starts_N[1]
    first, second = examples.ids_T[:begin].tolist(), examples.ids_T[begin : examples.starts_N[2]].tolist()
    assert first == second
    words = load_tokenizer(tokenizer)
    assert examples.ids_T[:begin][examples.assistant_mask_T[:begin]].tolist() == [*words.encode("nit"), words.eod_id]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'{"prompt": "a", "response": "\\ud800"}', "a lone surrogate, which is not text"),
        (b"[]", "a JSON list, wanted an object"),
        ({"text": "a"}, '"text" without turns (keys: text)'),
        ({"messages": "a"}, '"messages" is a str'),
        ({"messages": [{"content": "a"}]}, 'turn 1 of "messages" is no object with a "role"'),
        ({"messages": CHAT["messages"][:1]}, 'no turn has the role "assistant"'),
        ({"prompt": "a"}, '"response" is not there'),
        ({"prompt": "a", "response": 4}, '"response" is a int'),
        (CHAT | {"tools": [{"name": "look"}]}, '"tools", which a plain template cannot describe'),
    ],
)
def test_a_line_that_is_no_conversation_is_named(read, tmp_path, line, said):
    with pytest.raises(DataError) as raised:
        read(CHAT, line)
    assert f"{tmp_path}/a.jsonl:2: " in str(raised.value) and said in str(raised.value)


@pytest.mark.parametrize(
    ("line", "template", "is_warned"),
    [
        (CHAT, "raw", False),
        ({"messages": [said("system", "etao"), *CHAT["messages"]]}, "raw", True),
        ({"messages": [*CHAT["messages"], *CHAT["messages"]]}, "raw", True),
        ({"messages": [said("system", "etao"), *CHAT["messages"], *CHAT["messages"]]}, "plain", False),
    ],
)
def test_raw_warns_once_of_turns_that_it_joins(read, line, template, is_warned):
    notes = read(line, line, chat_template=template).notes
    assert sum("end to end" in note for note in notes) == is_warned


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([{"text": "a"}] * 8, {}, "and 3 more like these"),
        ([CHAT], {"format": "prompt_response"}, '"prompt" is not there'),  # a format that was asked for
        ([], {}, "is empty"),
    ],
)
def test_files_without_conversations_are_refused(read, tokenizer, lines, settings, message):
    with pytest.raises(DataError, match=message):
        read(*lines, **settings)
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read: No such file"):
        read_examples(["absent.jsonl"], SFTDataConfig(), chat_of(tokenizer))


def test_what_no_row_holds_is_refused_or_counted(read):
    long = {"prompt": "etao " * 200, "response": "in"}
    advice = r'jsonl:2: \d+ tokens, and data.seq_length=64. Raise it, or set data.too_long="skip"'
    with pytest.raises(DataError, match=advice):
        read(PAIR, long, seq_length=64)
    examples = read(PAIR, long, seq_length=64, too_long="skip")
    assert (len(examples), examples.num_skipped) == (1, 1)
    with pytest.raises(DataError, match="all 1 conversations are longer"):
        read(long, seq_length=64, too_long="skip")
    positions = int(read(PAIR).lengths_N[0])
    assert len(read(PAIR, seq_length=positions)) == 1
    with pytest.raises(DataError, match="Raise it"):
        read(PAIR, seq_length=positions - 1)
