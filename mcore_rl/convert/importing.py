"""Hugging Face to Megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from mcore_rl.checkpoint.folder import DELETING, delete, path_of_step, publish
from mcore_rl.checkpoint.weights import common_state
from mcore_rl.convert.copying.conversion import Conversion, Settings, files_identity
from mcore_rl.convert.copying.manifest import hf_sources, write_manifest
from mcore_rl.convert.copying.plan import Pair, Target, Task, chunks_of, import_pairs, one_dtype, tasks_of
from mcore_rl.convert.copying.workers import Record
from mcore_rl.convert.copying.writers import DistWriter
from mcore_rl.convert.hf.model import HfModel, Mtp, check_copies, open_hf_model
from mcore_rl.convert.megatron.files import finish as write_marker_file
from mcore_rl.convert.megatron.files import write_common, write_format, write_metadata
from mcore_rl.convert.megatron.layouts import Keys, Layers, Layout, Relaid, native
from mcore_rl.families.weight_map import WeightMap
from mcore_rl.parallel.mesh import Mesh

Dtype = Literal["keep", "bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What of the output is the user's choice."""

    dtype: Dtype = "keep"
    mtp: Mtp = "keep"
    keys: Keys = "te"
    layers: Layers | None = None
    """None: as our training has them."""
    vocab_multiple: int = 0
    """0: as our config has it."""


def plan_import(source: Path, folder: Path, options: ImportOptions, settings: Settings) -> Conversion:
    """The import of a Hugging Face folder to `folder/iter_0000000`. CheckpointError or ConfigError by name."""
    found = open_hf_model(source, mtp=options.mtp, vocab_multiple=options.vocab_multiple)
    layout = Layout(options.keys, options.layers or native(found.model).layers)
    weights = Relaid(found.model, layout).weights(found.weights)
    weights.prove()
    check_copies(found)
    targets = import_targets(found, weights, options.dtype)
    tasks = tasks_of(
        (chunk for target in targets for chunk in chunks_of(target)), settings.task_bytes, "numbered"
    )
    return Conversion(
        title="import",
        final=path_of_step(folder, 0),
        targets=targets,
        tasks=tasks,
        open_source=found.source,
        writer=DistWriter(),
        identity=f"import {options} {found.model} {files_identity(found.folder.path, sorted(found.folder.files))}",
        finish=partial(_finish, found, layout),
        publish=publish_checkpoint,
        notes=_notes(found, layout),
    )


def import_targets(found: HfModel, weights: WeightMap, dtype: Dtype) -> list[Target]:
    """Megatron's tensors, in the order of the rules."""
    pairs = import_pairs(weights.blocks)
    return [
        Target(
            name=key,
            shape=shape,
            dtype=_dtype(found, weights, key, pairs[key], dtype),
            pairs=tuple(pairs[key]),
        )
        for key, shape in weights.mcore_shapes.items()
    ]


def single_rank_common(model: Any, step: int, ours: Mapping[str, Any]) -> dict[str, Any]:
    """What a run of one rank would write beside its tensors."""
    one = SimpleNamespace(size=1)
    mesh = cast(Mesh, SimpleNamespace(tp=one, pp=one, dp=one, world=one))
    return common_state(model, mesh, step, dict(ours))


def _dtype(found: HfModel, weights: WeightMap, key: str, pairs: Sequence[Pair], dtype: Dtype) -> torch.dtype:
    if key in weights.fp32_keys:
        return torch.float32
    if dtype != "keep":
        return DTYPES[dtype]
    return one_dtype(key, {pair.source: found.dtype(pair.source) for pair in pairs})


def _notes(found: HfModel, layout: Layout) -> list[str]:
    notes = [f"{found.model.family}: {len(found.weights.hf_shapes)} tensors, {layout}"]
    if found.dropped:
        notes.append(f"left out, as --mtp drop says: {len(found.dropped)} tensors of MTP layers")
    return notes


def _finish(
    found: HfModel, layout: Layout, folder: Path, plan: str, done: Sequence[tuple[Task, list[Record]]]
) -> None:
    write_metadata(folder, done, {})
    write_format(folder)
    write_common(folder, single_rank_common(found.model, 0, {}))
    facts = {
        "kind": "import",
        "family": found.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
        "left_out": list(found.dropped),
    }
    write_manifest(folder, plan, facts, hf_sources(found.folder, done), done)
    write_marker_file(folder, found.model, 0)


def publish_checkpoint(written: Path, final: Path) -> None:
    """As a training run does it; what an import replaces is not kept."""
    before = set(final.parent.glob(f"{DELETING}*"))
    publish(written, final)
    delete(sorted(set(final.parent.glob(f"{DELETING}*")) - before))
