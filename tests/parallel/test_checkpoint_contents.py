"""A checkpoint whose bytes were changed, by accident or in order to run a program, is not loaded."""

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.storage.foreign import load_metadata
from tests.parallel.checkpointing import SMALL, config_of, refusal
from tests.ranks import run_ranks
from tests.unit.storage.foreign.test_archives import Program

TP2_EP2 = MeshConfig(tp=2, ep=2)
RANDOM_STATES = "mcore_rl.random_states/shard_0_2"


def archive(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def place_of(path: Path, key: str) -> tuple[Path, int, int]:
    """File, first byte and length of the largest part of a tensor or an object."""
    storage = load_metadata(path).storage_data
    info = max((info for index, info in storage.items() if index.fqn == key), key=lambda info: info.length)
    return path / info.relative_path, info.offset, info.length


def overwrite(file: Path, start: int, data: bytes) -> None:
    with file.open("rb+") as opened_file:
        opened_file.seek(start)
        opened_file.write(data)


def agree(path: Path) -> None:
    """Write a marker that agrees with the changed files, as an attacker would."""
    marker = json.loads((path / "checkpoint.json").read_text())
    marker["files"] = {name: (path / name).stat().st_size for name in marker["files"]}
    del marker["marker_crc32"]
    marker["crc32"] = {name: crc32_of(path / name) for name in marker["files"]}
    (path / "checkpoint.json").write_text(json.dumps(marker))


def in_metadata(path: Path, program: Program) -> str:
    (path / ".metadata").write_bytes(pickle.dumps(program))
    return f"{path}/.metadata: a pickle asks for "


def in_the_common_state(path: Path, program: Program) -> str:
    common = torch.load(path / "common.pt", weights_only=False)
    torch.save(common | {"more": program}, path / "common.pt")
    return f"{path}/common.pt: a pickle asks for "


def replace_entry(path: Path, key: str, data: bytes) -> Path:
    """Append `data` to the file that holds the part `key`, and make `.metadata` name these bytes instead."""
    stored = FileSystemReader(path).read_metadata()
    index, info = next((index, info) for index, info in stored.storage_data.items() if index.fqn == key)
    file = path / info.relative_path
    stored.storage_data[index] = replace(info, offset=file.stat().st_size, length=len(data))
    with file.open("ab") as opened_file:
        opened_file.write(data)
    (path / ".metadata").write_bytes(pickle.dumps(stored))
    return file


def in_the_random_states(path: Path, program: Program) -> str:
    file = replace_entry(path, RANDOM_STATES, archive(program))
    return f"{RANDOM_STATES} in {file}: a pickle asks for "


def behind_a_harmless_pickle(path: Path, program: Program) -> str:
    """Torch reads `archive/data.pkl`, although another record before it ends in `/data.pkl` too."""
    file = replace_entry(path, RANDOM_STATES, two_pickles("archive/x/data.pkl", {}, program))
    return f"{RANDOM_STATES} in {file}: a pickle asks for "


def in_another_folder(path: Path, program: Program) -> str:
    file = replace_entry(path, RANDOM_STATES, two_pickles("other/data.pkl", {}, program))
    return f"{file} is damaged: the bytes of {RANDOM_STATES} are not those that were written ("


def before_the_archive(path: Path, program: Program) -> str:
    """Torch takes a file that does not begin as an archive for its older format: one pickle after the other."""
    file = replace_entry(path, RANDOM_STATES, pickle.dumps(program) + archive({}))
    return f"{file} is damaged: the bytes of {RANDOM_STATES} are not those that were written ("


def two_pickles(harmless_name: str, harmless: object, evil: object) -> bytes:
    """Return an archive with a harmless pickle before the evil one that torch would load."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as records:
        records.writestr("archive/version", "3\n")
        records.writestr("archive/byteorder", "little")
        records.writestr(harmless_name, pickle.dumps(harmless, protocol=2))
        records.writestr("archive/data.pkl", pickle.dumps(evil, protocol=2))
    return file.getvalue()


HIDDEN = [
    (in_metadata, "ours"),
    (in_metadata, "megatrons"),
    (in_the_common_state, "ours"),
    (in_the_common_state, "megatrons"),
    (in_the_random_states, "ours"),
    (behind_a_harmless_pickle, "ours"),
    (in_another_folder, "ours"),
    (before_the_archive, "ours"),
]


@pytest.mark.matrix("in_metadata-ours")
@pytest.mark.parametrize(("hide", "whose"), HIDDEN)
def test_a_program_in_a_checkpoint_is_refused_by_name_and_not_run(
    hide: Callable[[Path, Program], str], whose: str, saved: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "iter_0000002"
    shutil.copytree(saved / "checkpoints/iter_0000002", copy)
    where = hide(copy, Program(tmp_path / "ran"))
    agree(copy)
    if whose == "megatrons":
        (copy / "checkpoint.json").unlink()
    config = config_of(tmp_path / "new", SMALL, TP2_EP2, load=str(copy), load_optimizer=whose == "ours")
    messages = run_ranks(refusal, 2, config)
    assert len(set(messages)) == 1
    assert not (tmp_path / "ran").exists()
    assert where in messages[0]
    assert "asks for" not in where or ".open, which could be any program and is not run" in messages[0]


def in_a_weight(path: Path) -> str:
    file, start, length = place_of(path, "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    flip(file, start + length // 2)
    return f"{file} is damaged: the bytes of decoder.layers.mlp.experts.experts.linear_fc1.weight are not"


def in_a_moment(path: Path) -> str:
    storage = load_metadata(path).storage_data
    key = next(index.fqn for index in storage if "exp_avg_sq" in index.fqn)
    file, start, length = place_of(path, key)
    flip(file, start + length // 2)
    return f"{file} is damaged: the bytes of {key} are not"


def in_the_list_of_parts(path: Path) -> str:
    flip(path / ".metadata", (path / ".metadata").stat().st_size // 2)
    return f"{path}/.metadata is damaged: its bytes are not those that were written"


def in_common_values(path: Path) -> str:
    data = (path / "common.pt").read_bytes()
    flip(path / "common.pt", data.index(b"num_layers"))
    return f"{path}/common.pt is damaged: its bytes are not those that were written"


def in_the_format(path: Path) -> str:
    overwrite(path / "metadata.json", 0, b"[")
    return f"{path}/metadata.json is damaged: its bytes are not those that were written"


def of_another_step(path: Path) -> str:
    """Every part is sound and of the right size, but the weights and moments are those of step 1."""
    file, other = path / "__1_0.distcp", path.with_name("iter_0000001") / "__1_0.distcp"
    assert file.stat().st_size == other.stat().st_size and file.read_bytes() != other.read_bytes()
    shutil.copyfile(other, file)
    return f"{file} is not the file that was written with iter_0000002: it is damaged, or of another step"


def flip(file: Path, at: int) -> None:
    overwrite(file, at, bytes([file.read_bytes()[at] ^ 1]))


@pytest.mark.matrix("in_a_weight", "in_common_values")
@pytest.mark.parametrize(
    "damage", [in_a_weight, in_a_moment, in_the_list_of_parts, in_common_values, in_the_format, of_another_step]
)
def test_changed_bytes_are_found_and_the_last_complete_checkpoint_offered(
    damage: Callable[[Path], str], saved: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(saved, copy)
    what = damage(copy / "checkpoints/iter_0000002")
    messages = run_ranks(refusal, 2, config_of(copy, SMALL, TP2_EP2))
    assert len(set(messages)) == 1 and what in messages[0]
    assert f"The last complete one is {copy}/checkpoints/iter_0000001" in messages[0]
