"""Conversions of the tiny models of tests/hf_models.py, as files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from mcore_rl.convert.check import Difference, compare
from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.importing import ImportOptions, plan_import
from mcore_rl.convert.peft import AdapterLayout, plan_adapter_export
from mcore_rl.metrics.progress import ByteProgress
from tests.hf_models import Tensors, oracle

ONE_FILE = CopySettings(workers=1)


def quiet() -> ByteProgress:
    return ByteProgress(Console(quiet=True))


def write_hf(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Write a Hugging Face folder, whose tokenizer is a placeholder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "tokenizer.json").write_bytes(b'{"model":\t{}}')
    names = sorted(tensors)
    index = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    if shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def saved(case: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write the model of `oracle(case)` as published checkpoints are: expert biases in fp32, three shards."""
    theirs = oracle(case, **changes)
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in theirs.tensors.items()
    }
    config = theirs.config | {"dtype": str(dtype).removeprefix("torch.")}
    return write_hf(folder, config, tensors, shards=3)


def with_mtp() -> tuple[dict[str, Any], Tensors]:
    """Return config.json and tensors of a deepseek_v3 with an MTP layer, as it is published."""
    theirs = oracle("deepseek_v3")
    last = {name: t for name, t in theirs.tensors.items() if name.startswith("model.layers.2.")}
    mtp = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in last.items()}
    mtp |= {f"model.layers.3.{name}.weight": torch.rand(48) for name in ("enorm", "hnorm", "shared_head.norm")}
    mtp["model.layers.3.eh_proj.weight"] = torch.rand(48, 96)
    mtp["model.layers.3.embed_tokens.weight"] = theirs.tensors["model.embed_tokens.weight"].clone()
    mtp["model.layers.3.shared_head.head.weight"] = theirs.tensors["lm_head.weight"].clone()
    config = theirs.config | {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    return config, theirs.tensors | mtp


def changed(tensors: Tensors, changes: Mapping[str, Tensor | Callable[[Tensor], Tensor] | None]) -> Tensors:
    """The tensors with others by name: a new one, a function of the one that was there, or None to leave it out."""
    found = tensors | {name: change(tensors[name]) if callable(change) else change for name, change in changes.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def read_hf(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_dist(path: Path) -> Tensors:
    """Return all tensors of a checkpoint, read by torch."""
    reader = FileSystemReader(str(path))
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def assert_adapters_alone_moved(before: Path, after: Path, *heads: str) -> None:
    """The checkpoint `after` has the weights of `before` bit for bit, and adapters and `heads` that have moved from 0;
    with heads it lacks the output layer.
    """
    base, weights = (
        {key: tensor for key, tensor in read_dist(path).items() if not key.startswith("optimizer.")}
        for path in (before, after)
    )
    trained = {key for key in weights if ".adapter." in key or key in heads}
    left_out = {"output_layer.weight"} if heads else set()
    assert weights.keys() - trained == base.keys() - left_out
    assert all(torch.equal(weights[key], base[key]) for key in weights.keys() - trained)
    assert {*heads, *(key for key in weights if key.endswith(".adapter.B"))} <= {
        key for key in trained if weights[key].any()
    }


def imported(source: Path, folder: Path, settings: CopySettings = ONE_FILE, **options: Any) -> Path:
    """Import a folder and return the checkpoint."""
    options.setdefault("vocab_multiple", 16)
    with quiet() as progress:
        return convert(plan_import(source, folder, ImportOptions(**options), settings), settings, progress)


def exported(source: Path, folder: Path, settings: CopySettings = ONE_FILE, **options: Any) -> Path:
    """Export a checkpoint and return the Hugging Face folder."""
    with quiet() as progress:
        return convert(plan_export(source, folder, ExportOptions(**options), settings), settings, progress)


def adapter_of(checkpoint: Path, folder: Path, layout: AdapterLayout) -> Path:
    """Export the low-rank adapters of a checkpoint and return peft's folder."""
    with quiet() as progress:
        plan = plan_adapter_export(checkpoint, folder, layout, None, "keep", ONE_FILE)
        return convert(plan, ONE_FILE, progress)


def differing(one: Path, other: Path, reference: Path | None = None) -> list[Difference]:
    with quiet() as progress:
        return compare(one, other, reference, "keep", progress)


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return every file but the marker, which has the time."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "checkpoint.json"
    }
