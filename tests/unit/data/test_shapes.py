"""Data in the shapes that people have it in, against turns that are written by hand."""

import bz2
import gzip
import json
import lzma

import pytest
from backports import zstd

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.cli.cli import main
from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.config.rl.rollout import PromptConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.data.chat import Conversation
from mcore_rl.data.examples import conversation_of, read_examples
from mcore_rl.data.preferences import comparison_of
from mcore_rl.data.records import Record, read_records
from mcore_rl.errors import DataError
from mcore_rl.rl.rollouts.prompts import read_problems
from tests.unit.data.conftest import chat_of, write_lines


def turn(role, content):
    return {"role": role, "content": content}


ASKED, SAID = turn("user", "What is 2 + 2?"), turn("assistant", "It is 4.")
SYSTEM = turn("system", "Be brief.")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
Q, A = ASKED["content"], SAID["content"]
CHATS = {
    "openai": ({"messages": [SYSTEM, ASKED, SAID]}, [SYSTEM, ASKED, SAID]),
    "openai parts": (
        {"messages": [turn("user", [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]), SAID]},
        [ASKED, SAID],
    ),
    "openai tools": (
        {"messages": [ASKED, CALL, turn("tool", "4"), SAID], "tools": '[{"function": {"name": "add"}}]'},
        [ASKED, CALL, turn("tool", "4"), SAID],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}], "system": "Be brief."},
        [SYSTEM, ASKED, SAID],
    ),
    "trl strings": ({"prompt": Q, "completion": A}, [ASKED, SAID]),
    "trl turns": ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, [SYSTEM, ASKED, SAID]),
    "prompt and response": ({"prompt": Q, "response": A}, [ASKED, SAID]),
    "alpaca": ({"instruction": "Add.", "input": "2 + 2", "output": A}, [turn("user", "Add.\n\n2 + 2"), SAID]),
    "alpaca without input": ({"instruction": Q, "input": "", "output": A}, [ASKED, SAID]),
    "dolly": (
        {"instruction": Q, "context": "Use base 10.", "response": A, "category": "qa"},
        [turn("user", f"{Q}\n\nUse base 10."), SAID],
    ),
    "question and answer": ({"question": Q, "answer": A}, [ASKED, SAID]),
    "problem and solution": ({"problem": Q, "solution": A}, [ASKED, SAID]),
    "text": ({"text": A}, [SAID]),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_is_recognised_by_its_keys(name):
    entry, expected = CHATS[name]
    conversation, _, _ = conversation_of(entry, SFTDataConfig(chat_template="raw"))
    assert list(conversation.messages) == expected
    assert [tool["function"]["name"] for tool in conversation.tools] == ["add"] * ("tools" in entry)


PAIRS = {
    "ultrafeedback binarized": {
        "prompt": Q,
        "chosen": [ASKED, SAID],
        "rejected": [ASKED, turn("assistant", "5")],
        "messages": [ASKED, SAID],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
    "ultrafeedback": {
        "instruction": Q,
        "completions": [{"response": "5", "overall_score": 2.0}, {"response": A, "overall_score": 8.5}],
    },
    "orca": {"question": Q, "chosen": A, "rejected": "5"},
    "alpaca": {"instruction": Q, "input": "", "chosen": A, "rejected": "5"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": Q}],
        "chosen": {"from": "gpt", "value": A},
        "rejected": {"from": "gpt", "value": "5"},
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_preference_is_recognised_by_its_keys(name):
    comparison = comparison_of(Record(line=1, file="a", entry=PAIRS[name]), PreferenceDataConfig())
    ((chosen, rejected),) = comparison.pairs
    assert list(comparison.prompt.messages) == [ASKED]
    assert comparison.answers[chosen] == (SAID,)
    assert comparison.answers[rejected] == (turn("assistant", "5"),)


def test_ratings_without_a_number_are_not_ranked_by_their_order():
    entry = {"instruction": Q, "completions": [{"response": "5", "overall_score": None}, {"response": A}]}
    with pytest.raises(DataError, match="no number as overall_score"):
        comparison_of(Record(line=1, file="a", entry=entry), PreferenceDataConfig())


@pytest.mark.parametrize(
    ("entry", "prompt", "messages", "answer"),
    [
        ({"question": Q, "answer": "4"}, Q, [], "4"),
        ({"problem": Q, "solution": "4"}, Q, [], "4"),
        ({"messages": [SYSTEM, ASKED, SAID]}, Q, [SYSTEM, ASKED], A),
        ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, "Add.\n\n2 + 2", [], "4"),
        ({"conversations": [{"from": "human", "value": Q}], "answer": "4"}, Q, [], "4"),
    ],
)
def test_a_prompt_with_its_answer_is_recognised_by_its_keys(tmp_path, entry, prompt, messages, answer):
    path = write_lines(tmp_path / "a.jsonl", entry)
    read = read_problems(PromptConfig(files=(path,)))
    (problem,) = read.problems
    assert (problem.prompt, list(problem.messages), problem.answer) == (prompt, messages, answer)
    (note,) = read.notes
    assert note.startswith(f"{path} is read as ") and all(key in note for key in entry)


def test_the_shape_of_prompts_is_said_for_each_file(tmp_path):
    entries = {"a": {"problem": Q, "solution": "4"}, "b": {"prompt": Q, "answer": "4", "level": "two words"}}
    paths = [write_lines(tmp_path / f"{name}.jsonl", entry) for name, entry in entries.items()]
    read = read_problems(PromptConfig(files=tuple(paths)))
    assert read.notes == (
        f"{paths[0]} is read as problem and solution (problem, solution)",
        f"{paths[1]} is read as prompt and answer (prompt, answer)",
    )
    assert read.problems[1].fields == {"level": "two words"}
    template = PromptConfig(files=(paths[0],), prompt_template="Solve: {problem}", answer_field="solution")
    read = read_problems(template)
    assert read.problems[0].prompt == f"Solve: {Q}"
    assert read.notes == (f"{paths[0]} is read as prompt_template and answer (solution)",)


LINES = [{"question": Q, "answer": A}, {"question": "?\n[", "answer": "é"}]


@pytest.mark.full
@pytest.mark.parametrize("form", ["jsonl", "list", "gz", "bz2", "xz", "zst", "list.xz", "list.zst"])
def test_files_of_each_form_have_the_same_records_whatever_their_name(tmp_path, form):
    path = tmp_path / "data"
    text = json.dumps(LINES, indent=1) if "list" in form else "".join(json.dumps(line) + "\n" for line in LINES)
    packs = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
    path.write_bytes(packs.get(form.split(".")[-1], bytes)(text.encode()))
    assert [(record.line, record.entry) for record in read_records(str(path))] == [(1, LINES[0]), (2, LINES[1])]


@pytest.fixture
def folder(tmp_path):
    """Two files of records and files of other kinds."""
    path = tmp_path / "data"
    path.mkdir()
    (path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINES[1]).encode()))
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([LINES[0]] * 2), path / "a.parquet")
    (path / "README.md").write_text("not data")
    (path / "more").mkdir()
    return path


def test_a_folder_is_its_files_in_the_order_of_their_names(folder, tokenizer, capsys):
    places = [(f"{folder}/a.parquet", 1), (f"{folder}/a.parquet", 2), (f"{folder}/b.jsonl.gz", 1)]
    records = list(read_records(str(folder)))
    assert [(record.file, record.line) for record in records] == places
    assert [record.entry for record in records] == [LINES[0], LINES[0], LINES[1]]
    chat = chat_of(tokenizer)
    examples = read_examples([str(folder)], SFTDataConfig(chat_template="plain"), chat)
    assert examples.source_sizes == (3,)
    assert examples.notes == (f"{folder} is read as question and answer (question, answer)",)
    problems = read_problems(PromptConfig(files=(str(folder),))).problems
    assert [problem.problem_id for problem in problems] == ["a.parquet:1", "a.parquet:2", "b.jsonl.gz:1"]
    assert main(["data", "show", str(folder), "--num", "3"]) == 0
    assert f"--- {folder}/b.jsonl.gz:1: keys question, answer" in capsys.readouterr().out
    contents = contents_of_inputs(inputs_of(SFTConfig(data=SFTDataConfig(train=(str(folder),)))))
    assert sorted(contents["data.train"]) == [f"{folder}/a.parquet", f"{folder}/b.jsonl.gz"]


def test_a_bad_line_of_a_folder_is_named_with_its_file(folder, tokenizer):
    (folder / "c.jsonl").write_text('{"a": 1}\n')
    chat = chat_of(tokenizer)
    with pytest.raises(DataError, match=f"^{folder}/c.jsonl:1: no conversation is recognised"):
        read_examples([str(folder)], SFTDataConfig(chat_template="plain"), chat)
    with pytest.raises(DataError, match=f"^{folder}/c.jsonl:1: no text in 'prompt'"):
        read_problems(PromptConfig(files=(str(folder),)))


def test_splits_are_not_read_together_and_a_folder_without_data_is_refused(folder, tmp_path):
    (folder / "train-0.jsonl").write_text("{}\n")
    (folder / "train-1.jsonl").write_text("{}\n")
    assert len(list(read_records(str(folder)))) == 5
    (folder / "test.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"has files of several splits \(a.parquet, b.jsonl.gz, test.jsonl, "):
        list(read_records(str(folder)))
    with pytest.raises(DataError, match=r"more has no file that ends in .parquet, .jsonl, "):
        list(read_records(str(folder / "more")))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"a": "b", "c": "d"}, "(keys: a, c); name its fields: data.messages_field"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "is from 'function_call'"),
        ({"prompt": Q, "answered": A}, '"response" is not there, wanted text (keys: prompt, answered); name'),
        ({"question": 3, "answer": A}, '"question" is a int, wanted text or a list of turns (keys: question, answer)'),
    ],
)
def test_a_record_that_is_not_recognised_shows_its_keys_and_the_fields_that_mend_it(entry, said):
    with pytest.raises(DataError) as refused:
        conversation_of(entry, SFTDataConfig())
    assert said in str(refused.value)


def test_the_config_is_stronger_than_what_is_recognised():
    entry = {"instruction": "Add.", "input": "2 + 2", "output": A, "messages": [ASKED, SAID]}
    named = SFTDataConfig(format="prompt_response", prompt_field="input", response_field="output")
    assert conversation_of(entry, named)[0].messages[0] == turn("user", "2 + 2")
    assert conversation_of(entry, SFTDataConfig())[0].messages == (ASKED, SAID)
    template = SFTDataConfig(format="prompt_response", prompt_template="{input}!", response_field="output")
    assert conversation_of(entry, template)[0].messages[0] == turn("user", "2 + 2!")


@pytest.mark.parametrize(("other", "is_warned"), [("Answer in French.", True), ("Be brief.", False)])
def test_a_system_prompt_beside_that_of_the_turns_is_a_warning_where_it_says_something_else(
    tmp_path, tokenizer, other, is_warned
):
    path = write_lines(tmp_path / "a.jsonl", {"system": other, "messages": [SYSTEM, ASKED, SAID]})
    chat = chat_of(tokenizer)
    read = read_examples([path], SFTDataConfig(chat_template="plain"), chat)
    assert tuple(read.ids_T) == chat.encode(Conversation(messages=(SYSTEM, ASKED, SAID))).ids_T
    shape, *warnings = read.notes
    assert shape == f"{path} is read as OpenAI messages ({'' if is_warned else 'system, '}messages)"
    assert [f"{path} has keys that are not read: system (1);" in text for text in warnings] == [True] * is_warned


def test_a_file_of_data_is_shown_without_a_config(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", CHATS["alpaca"][0], PAIRS["ultrafeedback"], {"a": 1})
    assert main(["data", "show", path]) == 0
    alpaca, ranking, unknown = capsys.readouterr().out.split("--- ")[1:]
    shape = f"{path}:1: keys instruction, input, output\nalpaca (instruction, input, output)\n"
    assert alpaca.strip() == f"{shape}user: Add.\n\n2 + 2\nassistant: It is 4."
    ranked = f"user: {Q}\nanswer 0:\nassistant: 5\nanswer 1:\nassistant: {A}\n1 is better than 0"
    assert ranking.strip().split("\n", 2)[2] == ranked
    assert "no conversation is recognised in it (keys: a)" in unknown
