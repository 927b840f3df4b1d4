"""Megatron to Hugging Face."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.convert.copying.conversion import Conversion, Settings, files_identity
from mcore_rl.convert.copying.manifest import write_manifest
from mcore_rl.convert.copying.plan import Pair, Target, Task, chunks_of, export_pairs, one_dtype, tasks_of
from mcore_rl.convert.copying.sources import sizes
from mcore_rl.convert.copying.work_folder import replace
from mcore_rl.convert.copying.workers import Record
from mcore_rl.convert.copying.writers import SafetensorsWriter, shards_of
from mcore_rl.convert.hf.folder import INDEX, HfFolder, open_hf
from mcore_rl.convert.hf.model import Mtp, expert_layout
from mcore_rl.convert.importing import DTYPES, Dtype
from mcore_rl.convert.megatron.model import DistModel, open_dist_model, read_config
from mcore_rl.families import hf_config
from mcore_rl.families.weight_map import DuplicateTensor

MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What of the output is the user's choice."""

    reference: Path | None = None
    """A folder of the same model, whose config and tokenizer are copied."""
    dtype: Dtype = "keep"
    mtp: Mtp = "keep"


@dataclass(frozen=True, slots=True)
class _Extra:
    """What lies beside the weights."""

    reference: Path | None
    config: bytes
    file_of: dict[str, str]


def plan_export(source: Path, folder: Path, options: ExportOptions, settings: Settings) -> Conversion:
    """The export of a checkpoint to the Hugging Face folder `folder`. CheckpointError or ConfigError by name."""
    reference = _reference(options.reference)
    experts = expert_layout(reference) if reference else "each"
    found = open_dist_model(source, options.reference, mtp=options.mtp, experts=experts)
    targets = export_targets(found, options.dtype, reference)
    shards = shards_of(targets, settings.shard_bytes)
    file_of = {target.name: file for file, group in shards.items() for target in group}
    chunks = (chunk for target in targets for chunk in chunks_of(target))
    config, notes = _config(found, options, targets)
    identity = files_identity(found.folder.path, sorted(found.folder.files))
    return Conversion(
        title="export",
        final=folder,
        targets=targets,
        tasks=tasks_of(chunks, settings.task_bytes, file_of),
        open_source=found.source,
        writer=SafetensorsWriter(shards),
        identity=f"export {options} {found.model} {found.folder.digest} {identity}",
        finish=partial(_finish, found, _Extra(options.reference, config, file_of)),
        publish=replace,
        notes=[
            f"{found.model.family}, step {found.folder.step}: {found.layout}",
            *notes,
            *_padding_notes(found),
        ],
    )


def export_targets(found: DistModel, dtype: Dtype, reference: HfFolder | None) -> list[Target]:
    """Hugging Face's tensors, in the order of the rules, and the copies that are to be written."""
    pairs = export_pairs(found.weights.blocks)
    shapes = dict(found.weights.hf_shapes)
    for copy in found.weights.copies:
        if _is_written(copy, reference):
            pairs[copy.name], shapes[copy.name] = pairs[copy.original], shapes[copy.original]
    return [
        Target(
            name=name, shape=shape, dtype=_dtype(found, name, pairs[name], dtype), pairs=tuple(pairs[name])
        )
        for name, shape in shapes.items()
    ]


def _reference(path: Path | None) -> HfFolder | None:
    """The reference's tensors, if it has any: a folder with config and tokenizer alone is a reference too."""
    if path is None:
        return None
    read_config(path)
    return open_hf(path) if any(path.glob("*.safetensors")) or (path / INDEX).is_file() else None


def _is_written(copy: DuplicateTensor, reference: HfFolder | None) -> bool:
    return copy.name in reference.tensors if reference else copy.written


def _dtype(found: DistModel, name: str, pairs: Sequence[Pair], dtype: Dtype) -> torch.dtype:
    if any(pair.source in found.weights.fp32_keys for pair in pairs):
        return torch.float32
    if dtype != "keep":
        return DTYPES[dtype]
    return one_dtype(name, {pair.source: found.dtype(pair.source) for pair in pairs})


def _config(found: DistModel, options: ExportOptions, targets: Sequence[Target]) -> tuple[bytes, list[str]]:
    """config.json, and what is to be said about it."""
    if options.reference is None:
        kinds = {target.dtype for target in targets} - {torch.float32}
        config = hf_config(found.model) | {
            "dtype": str(next(iter(kinds), torch.float32)).removeprefix("torch.")
        }
        note = "config.json is made from the checkpoint's settings; there is no tokenizer (see --reference)"
        return _json(config), [note]
    raw, config = (options.reference / "config.json").read_bytes(), read_config(options.reference)
    changed = []
    if config.pop("quantization_config", None):
        changed.append("quantization_config is left out, as the weights are not quantized any more")
    for name in MTP_COUNTS:
        if config.get(name, found.model.mtp_layers) != found.model.mtp_layers:
            changed.append(f"{name} is {found.model.mtp_layers} instead of {config[name]}")
            config[name] = found.model.mtp_layers
    return (_json(config) if changed else raw), [
        f"config.json is the reference's, but {line}" for line in changed
    ]


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()


def _padding_notes(found: DistModel) -> list[str]:
    """Training can move the rows that pad the vocabulary; they are dropped all the same."""
    notes = []
    source = found.source()
    for key, where in found.weights.padding:
        rows = torch.empty(sizes(where), dtype=found.dtype(key))
        source.fill(rows, key, where)
        if rows.any():
            notes.append(
                f"{key}: the {len(rows)} rows that pad the vocabulary are not zero; they are dropped"
            )
    return notes


def _finish(
    found: DistModel, extra: _Extra, folder: Path, plan: str, done: Sequence[tuple[Task, list[Record]]]
) -> None:
    if len(set(extra.file_of.values())) > 1:
        total = sum(chunk.num_bytes for task, _ in done for chunk in task.chunks)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(extra.file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if extra.reference is not None:
        for file in sorted(extra.reference.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_bytes(extra.config)
    facts = {"kind": "export", "family": found.model.family, "step": found.folder.step}
    sources = {"metadata_sha256": found.folder.digest, "files": found.folder.files}
    write_manifest(folder, plan, facts, sources, done)
