"""Which changes of a config a resume may not make by itself."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.config.changes import config_changes, with_contents
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig


@pytest.mark.parametrize(
    ("ptx", "refused"),
    [
        ({"files": ("other.jsonl",)}, {"rl.ptx.files"}),
        ({"sequences": 4}, {"rl.ptx.sequences"}),
        ({"files": (), "tokens": ("text",)}, {"rl.ptx.files", "rl.ptx.tokens"}),
        ({"coeff": 0.2}, set()),
    ],
)
def test_other_texts_beside_the_policys_updates_are_other_data(ptx: dict[str, Any], refused: set[str]) -> None:
    texts = {"coeff": 0.1, "files": ("chat.jsonl",)}
    before, now = (RlRunConfig.model_validate({"rl": {"ptx": one}}) for one in (texts, texts | ptx))
    changes = config_changes(before.model_dump(mode="json"), now)
    assert changes
    assert {change.key for change in changes if change.breaks_exactness} == refused


def test_a_run_from_before_data_shuffle_read_megatrons_order() -> None:
    now = PretrainConfig()
    recorded = now.model_dump(mode="json")
    assert config_changes(recorded, now) == []
    del recorded["data"]["shuffle"]
    (change,) = config_changes(recorded, now)
    assert str(change) == 'data.shuffle is "whole" there, "epoch" here'
    assert change.breaks_exactness
    whole = PretrainConfig.model_validate({"data": {"shuffle": "whole"}})
    assert config_changes(recorded, whole) == []
    assert config_changes(SFTConfig().model_dump(mode="json"), SFTConfig()) == []


def write_pair(prefix: Path, tokens: bytes, *, lengths: bytes = b"3 4 5", sidecar: bool = True) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".bin", tokens), (".idx", lengths)):
        prefix.with_suffix(ending).write_bytes(content)
    recorded = json.dumps({"bin_crc32": f"{zlib.crc32(tokens):08x}"})
    prefix.with_suffix(".json").write_text(recorded if sidecar else "{}")


def files_under(folder: Path) -> None:
    """Two pairs of data, a folder of conversations, a tokenizer, a template, prompts and texts."""
    write_pair(folder / "a", b"tokens of a")
    write_pair(folder / "b", b"tokens of b")
    write_pair(folder / "ab", b"tokens of ab")
    write_pair(folder / "plain", b"tokens", sidecar=False)
    for name, text in {
        "chats/1.jsonl": "{1}",
        "chats/2.jsonl": "{2}",
        "tokenizer/tokenizer.json": "{}",
        "tokenizer/chat_template.jinja": "{{ }}",
        "template.jinja": "{{ a }}",
        "prompts.jsonl": "{3}",
        "texts.jsonl": "{4}",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def pretraining(*prefixes: str, **data: Any) -> PretrainConfig:
    return PretrainConfig.model_validate({"data": {"train": prefixes or ("here/a", "here/b"), **data}})


def fine_tuning(place: str = "here", **data: Any) -> SFTConfig:
    tokenizer = {"kind": "huggingface", "path": f"{place}/tokenizer"}
    fields = {"train": (f"{place}/chats",), "tokenizer": tokenizer, "chat_template": f"{place}/template.jinja"}
    return SFTConfig.model_validate({"data": fields | data})


def reinforcing(place: str = "here", tokens: str = "here/a") -> RlRunConfig:
    rl = {"prompts": {"files": (f"{place}/prompts.jsonl",)}, "ptx": {"coeff": 0.1, "tokens": (tokens,)}}
    return RlRunConfig.model_validate({"rl": rl})


def moved(*names: str) -> Callable[[], object]:
    """Move these files and folders from `here` to `there`."""

    def move() -> None:
        Path("there").mkdir()
        for name in names:
            Path("here", name).rename(Path("there", name))

    return move


PAIRS = tuple(f"{name}{ending}" for name in "ab" for ending in (".bin", ".idx", ".json"))
CASES: dict[str, tuple[RunConfig, Callable[[], object], RunConfig, set[str], set[str]]] = {
    "nothing": (pretraining(), lambda: None, pretraining(), set(), set()),
    "tokens made anew with the same lengths": (
        pretraining(),
        lambda: write_pair(Path("here/a"), b"tokens of A"),
        pretraining(),
        {"data.train"},
        set(),
    ),
    "tokens of another length": (
        pretraining(),
        lambda: write_pair(Path("here/b"), b"tokens of b and"),
        pretraining(),
        {"data.train"},
        set(),
    ),
    "other documents of the same tokens": (
        pretraining(),
        lambda: write_pair(Path("here/a"), b"tokens of a", lengths=b"4 3 5"),
        pretraining(),
        {"data.train"},
        set(),
    ),
    "no checksum any more": (pretraining(), lambda: Path("here/a.json").unlink(), pretraining(), {"data.train"}, set()),
    "a sidecar that is not JSON": (
        pretraining(),
        lambda: Path("here/a.json").write_text("{"),
        pretraining(),
        {"data.train"},
        set(),
    ),
    "other text that is validated on": (
        pretraining(valid=("here/b",), train=("here/a",)),
        lambda: write_pair(Path("here/b"), b"tokens of B"),
        pretraining(valid=("here/b",), train=("here/a",)),
        set(),
        {"data.valid"},
    ),
    "data that moved": (pretraining(), moved(*PAIRS), pretraining("there/a", "there/b"), set(), {"data.train"}),
    "one pair that moved": (pretraining(), moved(*PAIRS[:3]), pretraining("there/a", "here/b"), set(), {"data.train"}),
    "data that moved to another name": (
        pretraining("here/a"),
        lambda: write_pair(Path("there/new"), b"tokens of a"),
        pretraining("there/new"),
        set(),
        {"data.train"},
    ),
    "data that moved beside data of a like name": (
        pretraining("here/a", "here/ab"),
        lambda: (write_pair(Path("there/a"), b"tokens of a"), write_pair(Path("there/ab"), b"tokens of ab")),
        pretraining("there/a", "there/ab"),
        set(),
        {"data.train"},
    ),
    "a path that is written otherwise": (
        pretraining("./here//a"),
        lambda: None,
        pretraining("here/a"),
        set(),
        {"data.train"},
    ),
    "other data elsewhere": (
        pretraining("here/a"),
        lambda: write_pair(Path("there/a"), b"tokens of A"),
        pretraining("there/a"),
        {"data.train"},
        set(),
    ),
    "data without a checksum elsewhere": (
        pretraining("here/a"),
        lambda: write_pair(Path("there/a"), b"tokens of a", sidecar=False),
        pretraining("there/a"),
        {"data.train"},
        set(),
    ),
    "data of another tool elsewhere": (
        pretraining("here/plain"),
        lambda: write_pair(Path("there/plain"), b"tokens", sidecar=False),
        pretraining("there/plain"),
        {"data.train"},
        set(),
    ),
    "data that moved away from data of a like name": (
        pretraining("here/a", "here/ab"),
        lambda: write_pair(Path("there/a"), b"tokens of a"),
        pretraining("there/a", "here/ab"),
        set(),
        {"data.train"},
    ),
    "two exchanged": (pretraining(), lambda: None, pretraining("here/b", "here/a"), {"data.train"}, set()),
    "one twice": (pretraining(), lambda: None, pretraining("here/a", "here/a"), {"data.train"}, set()),
    "one of a repeated pair": (
        pretraining("here/a", "here/b", "here/b"),
        lambda: None,
        pretraining("here/a", "here/a", "here/b"),
        {"data.train"},
        set(),
    ),
    "one less": (pretraining(), lambda: None, pretraining("here/a"), {"data.train"}, set()),
    "one more": (pretraining("here/a"), lambda: None, pretraining(), {"data.train"}, set()),
    "a file more in a folder": (
        fine_tuning(),
        lambda: Path("here/chats/3.jsonl").write_text("{3}"),
        fine_tuning(),
        {"data.train"},
        set(),
    ),
    "a file less in a folder": (
        fine_tuning(),
        lambda: Path("here/chats/2.jsonl").unlink(),
        fine_tuning(),
        {"data.train"},
        set(),
    ),
    "a file that is renamed in a folder": (
        fine_tuning(),
        lambda: Path("here/chats/1.jsonl").rename("here/chats/9.jsonl"),
        fine_tuning(),
        {"data.train"},
        set(),
    ),
    "another line of the same length": (
        fine_tuning(),
        lambda: Path("here/chats/1.jsonl").write_text("{9}"),
        fine_tuning(),
        {"data.train"},
        set(),
    ),
    "another file in the folder that no run reads": (
        fine_tuning(),
        lambda: Path("here/chats/notes.md").write_text("9"),
        fine_tuning(),
        set(),
        set(),
    ),
    "conversations, tokenizer and template that moved": (
        fine_tuning(),
        lambda: Path("here").rename("there"),
        fine_tuning("there"),
        set(),
        {"data.train", "data.tokenizer.path", "data.chat_template"},
    ),
    "another template of the tokenizer": (
        fine_tuning(),
        lambda: Path("here/tokenizer/chat_template.jinja").write_text("{{b}}"),
        fine_tuning(),
        {"data.tokenizer.path"},
        set(),
    ),
    "a template less": (
        fine_tuning(),
        lambda: Path("here/tokenizer/chat_template.jinja").unlink(),
        fine_tuning(),
        {"data.tokenizer.path"},
        set(),
    ),
    "another tokenizer elsewhere": (
        fine_tuning(),
        lambda: (Path("here").rename("there"), Path("there/tokenizer/tokenizer.json").write_text("[]")),
        fine_tuning("there"),
        {"data.tokenizer.path"},
        {"data.train", "data.chat_template"},
    ),
    "another template": (
        fine_tuning(),
        lambda: Path("here/template.jinja").write_text("{{ b }}"),
        fine_tuning(),
        {"data.chat_template"},
        set(),
    ),
    "prompts and texts that moved": (
        reinforcing(),
        lambda: Path("here").rename("there"),
        reinforcing("there", "there/a"),
        set(),
        {"rl.prompts.files", "rl.ptx.tokens"},
    ),
    "other prompts": (
        reinforcing(),
        lambda: Path("here/prompts.jsonl").write_text("{5}"),
        reinforcing(),
        {"rl.prompts.files"},
        set(),
    ),
    "other texts with the same lengths": (
        reinforcing(),
        lambda: write_pair(Path("here/a"), b"tokens of A"),
        reinforcing(),
        {"rl.ptx.tokens"},
        set(),
    ),
}
"""Name: the run, what happens to its files, the run that resumes, the fields in which it may not, and other changes."""


@pytest.mark.parametrize("case", CASES)
def test_a_resume_reads_the_same_bytes_wherever_they_are_and_no_others(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files_under(tmp_path / "here")
    before, happens, now, refused, other = CASES[case]
    recorded = json.loads(json.dumps(contents_of_inputs(inputs_of(before))))
    happens()
    changes = with_contents(
        config_changes(before.model_dump(mode="json"), now), recorded, contents_of_inputs(inputs_of(now))
    )
    assert {change.key for change in changes if change.breaks_exactness} == refused
    assert {change.key for change in changes} == refused | other


def test_a_checkpoint_of_an_earlier_version_has_the_size_of_a_bin_alone(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", b"tokens of a")
    now = contents_of_inputs(inputs_of(pretraining(str(tmp_path / "a"))))
    name = str(tmp_path / "a.bin")
    for size, is_same in (("11 bytes", True), ("1 bytes", False), ("110 bytes", False)):
        recorded = {"data.train": now["data.train"] | {name: size}}
        assert (with_contents([], recorded, now) == []) is is_same


def test_other_code_of_the_users_own_is_said_and_not_refused() -> None:
    (change,) = with_contents([], {"code": {"own:reward": "ab12"}}, {"code": {"own:reward": "cd34"}})
    assert str(change) == 'code is "own:reward with ab12" there, "own:reward with cd34" here'
    assert not change.breaks_exactness
    assert with_contents([], {}, {"code": {"own:reward": "cd34"}}) == []
