"""Prompts by cursor: the same in a run that resumes, none that is held out."""

import json
from pathlib import Path

import pytest

from mcore_rl.config.rl.loss import DistillConfig
from mcore_rl.config.rl.rollout import EvalConfig, PromptConfig
from mcore_rl.data.chat import PlainChat
from mcore_rl.errors import DataError
from mcore_rl.rl.rollouts.prompts import (
    PromptEncoder,
    held_out_prompts,
    read_problems,
    refuse_prompts_without_teacher,
    train_prompts,
)


class Letters:
    """A tokenizer of characters."""

    vocab_size, eod_id, bos_id, pad_id, digest = 128, 0, None, None, ""
    eos_id: int | None = None
    special_ids = frozenset[int]()

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_marked(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def encoder(max_tokens: int = 64, *, has_roles: bool = False) -> PromptEncoder:
    return PromptEncoder(PlainChat(Letters(), has_roles=has_roles), max_tokens)


def file_of(tmp_path: Path, *entries: object) -> PromptConfig:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return PromptConfig(files=(str(path),), max_bad=1)


def test_a_file_is_read_once_an_epoch_in_another_order_each_time(tmp_path: Path) -> None:
    config = file_of(tmp_path, *({"prompt": f"p{n}", "answer": n} for n in range(10)))
    source = train_prompts(config, (), encoder(), seed=3)
    taken = [prompt.problem.prompt for prompt in source.take(0, 30)]
    epochs = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(epoch) == sorted(f"p{n}" for n in range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    resumed = [prompt.problem.prompt for cursor in (0, 7, 14, 21) for prompt in source.take(cursor, 7)]
    assert resumed == taken[:28]
    assert [p.problem.prompt for p in train_prompts(config, (), encoder(), seed=4).take(0, 10)] != epochs[0]


def test_long_prompts_and_bad_lines_of_a_file_are_left_out_and_counted(tmp_path: Path) -> None:
    config = file_of(tmp_path, {"prompt": "ok"}, {"prompt": "x" * 65}, {"question": "?"}, {"prompt": "y" * 64})
    source = train_prompts(config, (), encoder(), seed=0)
    assert source.num_prompts == 2
    assert source.skipped == (
        "1 longer than rl.prompts.max_tokens, 1 no prompt: "
        f"{tmp_path}/prompts.jsonl:3: no text in 'prompt' (other keys: question)."
    )


def test_more_bad_lines_than_allowed_end_the_run_with_file_and_line(tmp_path: Path) -> None:
    config = file_of(tmp_path, {"prompt": "ok"}, {"question": "?"}, [], {"prompt": "fine"})
    with pytest.raises(DataError) as raised:
        train_prompts(config, (), encoder(), seed=0)
    assert str(raised.value) == (
        f"{tmp_path}/prompts.jsonl:2: no text in 'prompt' (other keys: question).\n"
        f"{tmp_path}/prompts.jsonl:3: a JSON list, wanted an object.\n"
        "Correct them, or allow them with rl.prompts.max_bad."
    )
    for max_bad in (2, None):
        allowed = config.model_copy(update={"max_bad": max_bad})
        assert train_prompts(allowed, (), encoder(), seed=0).num_prompts == 2
    held_out = EvalConfig(files=config.files)
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: no text"):
        held_out_prompts(held_out, PromptConfig(files=("other.jsonl",)), encoder(), 0)


def test_files_are_mixed_by_weight_and_a_resume_takes_the_next_prompts(tmp_path: Path) -> None:
    names = []
    for name, count in (("a", 10), ("b", 3)):
        lines = [json.dumps({"prompt": f"{name}{n}"}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        names.append(str(tmp_path / f"{name}.jsonl"))
    config = PromptConfig(files=tuple(names), file_weights=(0.25, 0.75))
    taken = [prompt.problem.prompt for prompt in train_prompts(config, (), encoder(), seed=3).take(0, 80)]
    for n in range(81):
        of_a = sum(prompt.startswith("a") for prompt in taken[:n])
        assert abs(of_a - n / 4) < 1
    of_a, of_b = ([prompt for prompt in taken if prompt.startswith(name)] for name in "ab")
    assert sorted(of_a[:10]) == sorted(of_a[10:]) == [f"a{n}" for n in range(10)]
    for first in range(0, 60, 3):
        assert sorted(of_b[first : first + 3]) == ["b0", "b1", "b2"]
    resumed = train_prompts(config, (), encoder(), seed=3)
    assert [prompt.problem.prompt for prompt in resumed.take(33, 40)] == taken[33:73]
    other = train_prompts(config, (), encoder(), seed=4).take(0, 80)
    assert [prompt.problem.prompt for prompt in other] != taken
    evaluated = held_out_prompts(EvalConfig(files=config.files[:1]), config, encoder(), 3)
    assert len(evaluated) == 10, "the weights are of the files to train on"


def test_files_in_which_no_prompt_fits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "ok"}')
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "x" * 65}))
    files = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl has the weight 2.0 in rl\.prompts\.file_weights"):
        train_prompts(PromptConfig(files=files, file_weights=(1, 2)), (), encoder(), seed=0)
    with pytest.raises(DataError, match=r"all 1 prompts are too long: .* has 9 tokens, .*max_tokens=8"):
        train_prompts(file_of(tmp_path, {"prompt": "x" * 9}), (), encoder(8), seed=0)


def test_a_conversation_as_prompt_goes_through_the_chat_template_and_may_begin_the_answer(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    begun = [turns[1], {"role": "assistant", "content": "Hello, I"}]
    entries = ({"prompt": turns, "answer": "Hello"}, {"prompt": [{"content": "no role"}]}, {"prompt": begun})
    read = read_problems(file_of(tmp_path, *entries))
    assert (read.problems[0].prompt, read.problems[0].answer) == ("Hi", "Hello")
    assert "no object with a" in read.bad_lines[0]
    first, second = (Letters().decode(list(encoder(has_roles=True)(one).tokens_T)) for one in read.problems)
    assert first == "system:\nBe short.\n\nuser:\nHi\n\nassistant:\n"
    assert second == "user:\nHi\n\nassistant:\nHello, I"


def test_problems_of_a_task_never_repeat_a_held_out_prompt() -> None:
    config = PromptConfig(task="reversing", smallest=2, largest=2)
    held_out = held_out_prompts(EvalConfig(num_prompts=50), config, encoder(), seed=1)
    texts = {prompt.problem.prompt for prompt in held_out}
    assert len(texts) == 50
    source = train_prompts(config, held_out, encoder(), seed=1)
    taken = [prompt.problem.prompt for prompt in source.take(0, 400)]
    assert not texts & set(taken)
    assert len(set(taken)) > 40
    assert [p.problem.prompt for p in source.take(100, 50)] == taken[100:150]


def test_a_task_with_too_few_problems_is_refused() -> None:
    config = PromptConfig(task="reversing", smallest=1, largest=1)
    held_out = held_out_prompts(EvalConfig(num_prompts=64), config, encoder(), seed=1)
    assert len(held_out) == 10, "as many as there are"
    with pytest.raises(DataError, match="all are held out"):
        train_prompts(config, held_out, encoder(), seed=1).take(0, 1)


def test_a_prompt_whose_tag_no_teacher_has_is_named(tmp_path: Path) -> None:
    tags = ("math", "code", "law", None)
    entries = ({"prompt": f"p{n}"} | ({} if tag is None else {"area": tag}) for n, tag in enumerate(tags))
    source = train_prompts(file_of(tmp_path, *entries), (), encoder(), seed=0)
    tagged = {"math": "runs/math", "code": "runs/code"}
    with pytest.raises(DataError, match=r"2 prompts have no teacher of math, code: .*jsonl:3 .area='law'") as error:
        refuse_prompts_without_teacher(source, DistillConfig(teachers=tagged, tag_field="area"))
    assert "jsonl:4 (area=None)" in str(error.value)
    others = DistillConfig(teacher="self", teachers=tagged, tag_field="area")
    refuse_prompts_without_teacher(source, others)
    assert [others.paths[others.index_of(tag) or 0] for tag in tags] == ["runs/math", "runs/code", "self", "self"]
