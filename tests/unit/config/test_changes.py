"""Which changes of a config a resume may not make by itself."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """A run, what happens to its files, and how the run that resumes differs."""

    before: RunConfig
    happens: Callable[[], object]
    refused: str = ""
    """Fields in which the run that resumes may not differ."""
    other: str = ""
    """Other changed fields."""
    now: RunConfig | None = None
    """The run that resumes; None for the same config."""


def nothing() -> None:
    """Leave all files as they are."""


def pair(prefix: str, tokens: bytes, **options: Any) -> Callable[[], object]:
    return lambda: write_pair(Path(prefix), tokens, **options)


def text(path: str, content: str) -> Callable[[], object]:
    return lambda: Path(path).write_text(content)


BOTH_A = pair("there/a", b"tokens of a"), pair("there/ab", b"tokens of ab")
TRAIN = "data.train"
CASES = {
    "nothing": Case(pretraining(), nothing),
    "tokens made anew with the same lengths": Case(pretraining(), pair("here/a", b"tokens of A"), TRAIN),
    "tokens of another length": Case(pretraining(), pair("here/b", b"tokens of b and"), TRAIN),
    "other documents of the same tokens": Case(pretraining(), pair("here/a", b"tokens of a", lengths=b"4 3 5"), TRAIN),
    "no checksum any more": Case(pretraining(), lambda: Path("here/a.json").unlink(), TRAIN),
    "a sidecar that is not JSON": Case(pretraining(), text("here/a.json", "{"), TRAIN),
    "other text that is validated on": Case(
        pretraining("here/a", valid=("here/b",)), pair("here/b", b"tokens of B"), other="data.valid"
    ),
    "data that moved": Case(pretraining(), moved(*PAIRS), other=TRAIN, now=pretraining("there/a", "there/b")),
    "one pair that moved": Case(pretraining(), moved(*PAIRS[:3]), other=TRAIN, now=pretraining("there/a", "here/b")),
    "data that moved to another name": Case(
        pretraining("here/a"), pair("there/new", b"tokens of a"), other=TRAIN, now=pretraining("there/new")
    ),
    "data that moved beside data of a like name": Case(
        pretraining("here/a", "here/ab"),
        lambda: [happens() for happens in BOTH_A],
        other=TRAIN,
        now=pretraining("there/a", "there/ab"),
    ),
    "a path that is written otherwise": Case(pretraining("./here//a"), nothing, other=TRAIN, now=pretraining("here/a")),
    "other data elsewhere": Case(
        pretraining("here/a"), pair("there/a", b"tokens of A"), TRAIN, now=pretraining("there/a")
    ),
    "data without a checksum elsewhere": Case(
        pretraining("here/a"), pair("there/a", b"tokens of a", sidecar=False), TRAIN, now=pretraining("there/a")
    ),
    "data of another tool elsewhere": Case(
        pretraining("here/plain"), pair("there/plain", b"tokens", sidecar=False), TRAIN, now=pretraining("there/plain")
    ),
    "data that moved away from data of a like name": Case(
        pretraining("here/a", "here/ab"), BOTH_A[0], other=TRAIN, now=pretraining("there/a", "here/ab")
    ),
    "two exchanged": Case(pretraining(), nothing, TRAIN, now=pretraining("here/b", "here/a")),
    "one twice": Case(pretraining(), nothing, TRAIN, now=pretraining("here/a", "here/a")),
    "one of a repeated pair": Case(
        pretraining("here/a", "here/b", "here/b"), nothing, TRAIN, now=pretraining("here/a", "here/a", "here/b")
    ),
    "one less": Case(pretraining(), nothing, TRAIN, now=pretraining("here/a")),
    "one more": Case(pretraining("here/a"), nothing, TRAIN, now=pretraining()),
    "a file more in a folder": Case(fine_tuning(), text("here/chats/3.jsonl", "{3}"), TRAIN),
    "a file less in a folder": Case(fine_tuning(), lambda: Path("here/chats/2.jsonl").unlink(), TRAIN),
    "a file that is renamed in a folder": Case(
        fine_tuning(), lambda: Path("here/chats/1.jsonl").rename("here/chats/9.jsonl"), TRAIN
    ),
    "another line of the same length": Case(fine_tuning(), text("here/chats/1.jsonl", "{9}"), TRAIN),
    "another file in the folder that no run reads": Case(fine_tuning(), text("here/chats/notes.md", "9")),
    "conversations, tokenizer and template that moved": Case(
        fine_tuning(),
        lambda: Path("here").rename("there"),
        other="data.train data.tokenizer.path data.chat_template",
        now=fine_tuning("there"),
    ),
    "another template of the tokenizer": Case(
        fine_tuning(), text("here/tokenizer/chat_template.jinja", "{{b}}"), "data.tokenizer.path"
    ),
    "a template less": Case(
        fine_tuning(), lambda: Path("here/tokenizer/chat_template.jinja").unlink(), "data.tokenizer.path"
    ),
    "another tokenizer elsewhere": Case(
        fine_tuning(),
        lambda: (Path("here").rename("there"), Path("there/tokenizer/tokenizer.json").write_text("[]")),
        "data.tokenizer.path",
        other="data.train data.chat_template",
        now=fine_tuning("there"),
    ),
    "another template": Case(fine_tuning(), text("here/template.jinja", "{{ b }}"), "data.chat_template"),
    "prompts and texts that moved": Case(
        reinforcing(),
        lambda: Path("here").rename("there"),
        other="rl.prompts.files rl.ptx.tokens",
        now=reinforcing("there", "there/a"),
    ),
    "other prompts": Case(reinforcing(), text("here/prompts.jsonl", "{5}"), "rl.prompts.files"),
    "other texts with the same lengths": Case(reinforcing(), pair("here/a", b"tokens of A"), "rl.ptx.tokens"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resume_reads_the_same_bytes_wherever_they_are_and_no_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files_under(tmp_path / "here")
    this = CASES[name]
    now, refused = this.now or this.before, set(this.refused.split())
    recorded = json.loads(json.dumps(contents_of_inputs(inputs_of(this.before))))
    this.happens()
    changes = config_changes(this.before.model_dump(mode="json"), now)
    changes = with_contents(changes, recorded, contents_of_inputs(inputs_of(now)))
    assert {change.key for change in changes if change.breaks_exactness} == refused
    assert {change.key for change in changes} == refused | set(this.other.split())


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
