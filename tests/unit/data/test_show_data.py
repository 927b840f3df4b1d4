"""`mcore-rl data show`: its texts are those of the source, in the order of the training."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl.cli.cli import main
from mcore_rl.data.megatron.preprocess import preprocess
from mcore_rl.data.tokenizer import load_tokenizer
from tests.unit.data.conftest import in_form, made_up_documents, preprocessing, write_jsonl

LINES = [{"question": f"{word} {i}\n", "solution": f"{i} {word}"} for i, word in enumerate(["etao", "shrdlu", "nit"])]


@pytest.fixture(params=["lines", "gzipped", "parquet", "hub"])
def data(request, tmp_path, monkeypatch):
    return in_form(request.param, LINES, tmp_path, monkeypatch)


def shown(capsys, recipe, tokenizer, tmp_path, *words):
    fields = [
        "data.tokenizer.kind=sentencepiece",
        f"data.tokenizer.path={tokenizer.path}",
        "checkpoint.load=none",
        f"run_dir={tmp_path}/run",
    ]
    assert main(["data", "show", recipe, *fields, *words]) == 0
    assert not Path(tmp_path, "run").exists()
    head, *examples = capsys.readouterr().out.split("\n--- ")
    return head, [example.partition("\n") for example in examples]


def test_a_chat_is_shown_as_rendered_with_what_is_trained_on_marked(data, tokenizer, tmp_path, capsys):
    fields = [f"data.train=['{data}']", "data.prompt_field=question", "data.response_field=solution"]
    head, examples = shown(
        capsys, "tiny_moe/sft", tokenizer, tmp_path, *fields, "data.chat_template=plain", "--num", "4"
    )
    assert "no conversation is truncated" in head
    words = load_tokenizer(tokenizer)
    wanted = {}
    for line in LINES:
        answer = [*words.encode(line["solution"]), words.eod_id]
        prompt = words.encode("user:\n") + words.encode(line["question"] + "\n\n") + words.encode("assistant:\n")
        rendered = words.decode(prompt + answer[:-1])
        begin = rendered.rindex(line["solution"])
        text = f"{rendered[:begin].rstrip(' ')}⟦{rendered[len(rendered[:begin].rstrip(' ')) :]}<eod>⟧\n"
        wanted[text] = f", {data}: {len(prompt + answer)} tokens, {len(answer)} trained"
    assert sorted(text for _, _, text in examples[:3]) == sorted(wanted)
    for title, _, text in examples:
        assert title.endswith(wanted[text])
    assert len(examples) == 4, "the second epoch follows the first"


def test_a_prompt_is_shown_as_rendered_with_its_reference(data, tokenizer, tmp_path, capsys):
    fields = [f"rl.prompts.files=['{data}']", "rl.prompts.prompt_template='Say: {question}'"]
    fields += ["rl.prompts.answer_field=solution", "data.chat_template=raw"]
    head, examples = shown(capsys, "tiny_moe/own_prompts", tokenizer, tmp_path, *fields)
    assert head.startswith("3 prompts to learn from")
    words = load_tokenizer(tokenizer)
    assert sorted(text for _, _, text in examples) == sorted(
        f"Say: {line['question']}\nreference: {line['solution']}\n" for line in LINES
    )
    numbers = {line["solution"]: len(words.encode(f"Say: {line['question']}")) for line in LINES}
    for title, _, text in examples:
        assert title.endswith(f": {numbers[text.strip().rpartition('reference: ')[2]]} tokens")


@pytest.mark.parametrize(("template", "is_warned"), [("raw", True), ("plain", False)])
def test_prompts_of_several_turns_warn_where_the_template_joins_them(template, is_warned, tokenizer, tmp_path, capsys):
    turns = [{"role": "system", "content": "nit"}, {"role": "user", "content": "etao"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": turns, "answer": "etao"}) + "\n")
    fields = [f"rl.prompts.files={tmp_path}/a.jsonl", f"data.chat_template={template}"]
    fields += ["rl.prompts.prompt_template=none"]
    head, _ = shown(capsys, "tiny_moe/own_prompts", tokenizer, tmp_path, *fields)
    assert ("end to end" in head) == is_warned


def test_sequences_of_pretraining_are_shown_as_text_or_as_ids(tokenizer, tmp_path, capsys):
    (document,) = made_up_documents(1, words=4000, seed=3)
    text = write_jsonl(tmp_path / "a.jsonl", [document])
    preprocess(preprocessing(tokenizer, tmp_path / "a", text), Console(quiet=True))
    words = load_tokenizer(tokenizer)
    ids = words.encode(document)
    sequences = [ids[begin : begin + 128] for begin in range(0, len(ids) - 128, 128)]
    fields = [f"data.train=['{tmp_path}/a']", "data.split=[1,0,0]", "train.eval_interval=none"]
    # 32 sequences of the first epoch, in which each is a slice of the document.
    fields += ["train.eval_batches=none", "train.steps=2", "optim.warmup_steps=0"]
    assert len(sequences) > 32
    _, as_text = shown(capsys, "tiny_moe/pretrain", tokenizer, tmp_path, *fields, "--num", "2")
    texts = [text.removesuffix("\n") for _, _, text in as_text]
    assert len(set(texts)) == 2 and set(texts) <= {words.decode(sequence) for sequence in sequences}
    assert [title for title, _, _ in as_text] == [f"sequence {i}: 128 tokens, 0 ends of documents" for i in (0, 1)]
    none = ["data.tokenizer.kind=none", "data.tokenizer.path=none"]
    _, as_ids = shown(capsys, "tiny_moe/pretrain", tokenizer, tmp_path, *fields, *none, "--num", "2")
    shown_ids = [list(map(int, text.splitlines()[0].split())) for _, _, text in as_ids]
    assert [words.decode(sequence) for sequence in shown_ids] == texts
    assert "data.tokenizer.kind" in as_ids[-1][2]


def test_a_config_without_training_examples_is_refused(capsys):
    assert main(["data", "show", "tiny_moe/replay_study"]) == 2
    assert "it has no training examples. Name one of pretrain, sft, rm, dpo, rl" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_said_to_be_empty(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert main(["data", "show", str(tmp_path / "a.jsonl")]) == 2
    assert f"{tmp_path / 'a.jsonl'} is empty: it has no line with a record" in capsys.readouterr().err
