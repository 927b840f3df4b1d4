"""A folder is read from the files that transformers loads, or refused where it has others beside them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from mcore_rl.convert.hf.folder import INDEX, open_hf
from mcore_rl.errors import CheckpointError
from tests.conversion import saved

SINGLE = "model.safetensors"


def merged(folder: Path, name: str, factor: float = 1.0) -> None:
    """Write all tensors of the shards, times a factor, into one file."""
    tensors = {key: tensor * factor for file in folder.glob("model-*") for key, tensor in load_file(file).items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")


def without_shards(folder: Path) -> None:
    for file in folder.glob("model-*"):
        file.unlink()


def named_in_config(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))


def indexed(folder: Path, name: str) -> None:
    """Let the index name one file for all tensors."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (folder / INDEX).write_text(json.dumps(index))


LAYOUTS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "shards and their index": (lambda f: None, True),
    "one file": (lambda f: (merged(f, SINGLE), without_shards(f), (f / INDEX).unlink()), True),
    "one file and its index": (lambda f: (merged(f, SINGLE), without_shards(f), indexed(f, SINGLE)), True),
    "one file beside shards and their index": (lambda f: merged(f, SINGLE, 2.0), False),
    "one file beside shards": (lambda f: (merged(f, SINGLE, 2.0), (f / INDEX).unlink()), False),
    "one file and its index, shards left over": (lambda f: (merged(f, SINGLE), indexed(f, SINGLE)), True),
    "a pickle beside shards and their index": (pickled, True),
    "a pickle beside one file": (
        lambda f: (merged(f, SINGLE), without_shards(f), (f / INDEX).unlink(), pickled(f)),
        True,
    ),
    "a pickle beside shards without an index": (lambda f: ((f / INDEX).unlink(), pickled(f)), False),
    "one file of another name beside shards and their index": (lambda f: merged(f, "ema.safetensors"), True),
    "config.json names one file of several": (
        lambda f: (merged(f, "ema.safetensors", 2.0), named_in_config(f, "ema.safetensors")),
        False,
    ),
    "config.json names the index": (lambda f: named_in_config(f, INDEX), True),
}
"""Name: how a folder of three shards with an index is changed, and whether it is read."""


def of_transformers(folder: Path) -> set[str]:
    """The files from which transformers loads a folder's weights, by its own rule."""
    name = json.loads((folder / "config.json").read_text()).get("transformers_weights")
    files, _ = _get_resolved_checkpoint_files(
        str(folder), None, None, None, None, False, transformers_explicit_filename=name
    )
    return {Path(file).name for file in files}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_those_that_transformers_loads(layout: str, tmp_path: Path) -> None:
    change, is_read = LAYOUTS[layout]
    folder = saved("qwen3", tmp_path / "hf")
    change(folder)
    if is_read:
        assert open_hf(folder).files.keys() == of_transformers(folder)
        return
    with pytest.raises(CheckpointError, match="more than one set of weights: transformers loads "):
        open_hf(folder)
