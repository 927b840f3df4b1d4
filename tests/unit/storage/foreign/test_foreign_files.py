"""Torch's and Megatron's own readers of a checkpoint run no programs, whoever calls them."""

import io
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.patches import table  # noqa: F401 - applies the patches
from mcore_rl.storage.foreign import StoredTensor, load_metadata, refuse_programs_inside
from tests.unit.storage.foreign.test_archives import Program

# isort: split
from megatron.core import dist_checkpointing

REFUSED = r"a pickle asks for _?io\.open, which could be any program and is not run"


def saved(path: Path, content: object) -> Path:
    """Write a checkpoint whose one entry is an object, as torch does."""
    dcp.save({"entry": content}, checkpoint_id=path, no_dist=True)
    return path


def test_an_object_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = {"entry": None}
    dcp.load(state, checkpoint_id=saved(tmp_path / "c", Namespace(a=[1, 2.5], b={"x"})), no_dist=True)
    assert state["entry"] == Namespace(a=[1, 2.5], b={"x"})


def test_a_program_in_an_object_is_refused_with_its_key_and_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", Program(tmp_path / "ran"))
    with pytest.raises(CheckpointException, match=rf"entry in __0_0\.distcp: {REFUSED}"):
        dcp.load({"entry": None}, checkpoint_id=path, no_dist=True)
    assert not (tmp_path / "ran").exists()


def extra_state(content: object) -> torch.Tensor:
    """Return a state as TransformerEngine's layers save it: pickled, in a tensor of bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def saved_object(content: object) -> io.BytesIO:
    """Return a state as TransformerEngine's layers saved it before 2.0."""
    file = io.BytesIO()
    torch.save(content, file)
    return file


class StorageWithProgram:
    """Pickles as a storage does, with a program in the bytes that torch would load for it."""

    def __init__(self, program: Program) -> None:
        self.bytes = pickle.dumps(program)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.bytes,)


SCALES = {"scale": torch.ones(3), "extra": {"num_gemms": 1}}


@pytest.mark.parametrize("state", [extra_state(SCALES), saved_object(SCALES), torch.empty(0, dtype=torch.uint8)])
def test_the_scales_of_a_layer_are_accepted(state: Any) -> None:
    refuse_programs_inside(state, "a state")


@pytest.mark.parametrize(
    "wrap",
    [extra_state, saved_object, lambda program: extra_state({"scale": StorageWithProgram(program)})],
    ids=["in a tensor", "saved", "in a storage"],
)
def test_a_program_inside_the_scales_of_a_layer_is_refused(wrap: Callable[[Program], Any], tmp_path: Path) -> None:
    key = "layer._extra_state/shard_0_1"
    with pytest.raises(CheckpointError, match=rf"{key}: {REFUSED}"):
        refuse_programs_inside(wrap(Program(tmp_path / "ran")), key)
    assert not (tmp_path / "ran").exists()


def test_loading_a_layers_extra_state_looks_inside(tmp_path: Path) -> None:
    key = "layer._extra_state/shard_0_1"
    path = tmp_path / "c"
    dcp.save({key: saved_object(Program(tmp_path / "ran"))}, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointException, match=rf"{key} in __0_0\.distcp: {REFUSED}"):
        dcp.load({key: None}, checkpoint_id=path, no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_a_program_in_the_list_of_parts_is_refused_with_its_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {})
    (path / ".metadata").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=rf"\.metadata: {REFUSED}"):
        dcp.FileSystemReader(path).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_a_program_in_the_common_state_is_refused_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A setting by which torch gives up its own allow-list.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": Program(tmp_path / "ran")}, tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=rf"common\.pt: {REFUSED}"):
        dist_checkpointing.load_common_state_dict(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_list_of_parts_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2, 3, dtype=torch.bfloat16), "entry": {1}}, checkpoint_id=tmp_path, no_dist=True)
    read, torchs = load_metadata(tmp_path), dcp.FileSystemReader(tmp_path).read_metadata()
    stored, wanted = read.state_dict_metadata["weight"], torchs.state_dict_metadata["weight"]
    assert isinstance(stored, StoredTensor) and not isinstance(read.state_dict_metadata["entry"], StoredTensor)
    assert (stored.size, stored.properties.dtype) == (wanted.size, wanted.properties.dtype)
    assert [vars(chunk) for chunk in stored.chunks] == [vars(chunk) for chunk in wanted.chunks]
    ours, theirs = (
        {(at.fqn, at.offset): (part.relative_path, part.offset, part.length) for at, part in places.items()}
        for places in (read.storage_data or {}, torchs.storage_data)
    )
    assert ours == theirs
