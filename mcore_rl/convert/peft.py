"""Low-rank adapters as a folder of the library peft (0.21)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.conversion import Conversion, CopySettings, RecordedTask
from mcore_rl.convert.copying.manifest import file_checksums, write_manifest
from mcore_rl.convert.copying.plan import TargetTensor, chunks_of, tasks_of
from mcore_rl.convert.hf.folder import ADAPTER_CONFIG
from mcore_rl.convert.hf.writer import SafetensorsWriter
from mcore_rl.convert.importing import OUTPUT_DTYPES, OutputDtype
from mcore_rl.convert.megatron.adapters import WEIGHT, StoredAdapter, stored_lora
from mcore_rl.convert.megatron.layouts import EXPERTS
from mcore_rl.convert.megatron.model import DistModel, open_dist_model
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of
from mcore_rl.families.regions import RegionCopy
from mcore_rl.families.weight_map import AxisRange, Region, WeightBlock

AdapterLayout = Literal["each", "fused"]
"""A module for each expert, or one for all experts of a layer, as peft's `target_parameters` has."""
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of peft's names of tensors."""


def plan_adapter_export(
    source: Path,
    folder: Path,
    layout: AdapterLayout,
    reference: Path | None,
    dtype: OutputDtype,
    settings: CopySettings,
) -> Conversion:
    """Plan the export of a checkpoint's low-rank adapters, without the weights, to the folder `folder`.

    Raises:
        CheckpointError: The checkpoint has no adapters, or peft has no place for them.
    """
    dist_model = open_dist_model(source, reference, adapters="apart")
    lora = stored_lora(dist_model.folder)
    if lora is None:
        raise CheckpointError(
            f"{dist_model.folder.path} has no low-rank adapters. Export the model, without --adapter."
        )
    targets = list(adapter_targets(dist_model, layout, dtype))
    files = {TENSORS: targets}
    chunks = (chunk for target in targets for chunk in chunks_of(target))
    config = adapter_config(dist_model, lora, layout, reference)
    return Conversion(
        title="export of adapters",
        final=folder,
        sources=[("the source", source), ("the checkpoint", dist_model.folder.path)]
        + ([("--reference", reference)] if reference is not None else []),
        targets=targets,
        tasks=tasks_of(chunks, settings.task_bytes, {target.name: TENSORS for target in targets}),
        open_source=dist_model.source,
        writer=SafetensorsWriter(files),
        identity=f"adapters {layout} {dtype} {config} {dist_model.folder.digest}",
        read=dist_model.folder.stamps,
        finish=partial(_finish, dist_model, config),
        notes=[
            f"{dist_model.model.family}, step {dist_model.folder.step}: {len(targets)} tensors of adapters",
            *_unread(lora, dist_model.model),
        ],
    )


def adapter_targets(
    dist_model: DistModel, layout: AdapterLayout, dtype: OutputDtype
) -> Iterator[TargetTensor]:
    """Yield the tensors of peft's adapter: of the modules in the order of the family's rules, then of fused experts."""
    fused: dict[str, list[_Matrix]] = {}
    for matrix in _matrices(dist_model):
        if matrix.is_expert and layout == "fused":
            fused.setdefault(_wrapper(matrix, dist_model.model), []).append(matrix)
        else:
            yield from _of_each_projection(matrix, dist_model, dtype)
    for name, matrices in fused.items():
        yield from _of_all_experts(name, matrices, dist_model, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """One matrix of Megatron's with an adapter."""

    adapter: StoredAdapter
    lead: Region
    """Layer and expert in Megatron's tensors."""
    parts: tuple[tuple[str, tuple[WeightBlock, ...]], ...]
    """Hugging Face's modules that it packs, in the order of its rows, with the blocks of each."""
    is_expert: bool


def _matrices(dist_model: DistModel) -> Iterator[_Matrix]:
    grouped: dict[tuple[str, Region], dict[str, list[WeightBlock]]] = {}
    for block in sorted(dist_model.weights.blocks, key=lambda block: block.mcore_where[-2:][0].start):
        if block.mcore_key in dist_model.adapters:
            if block.transposed or not block.hf_name.endswith(WEIGHT):
                raise CheckpointError(
                    f"peft has no adapter for {block.hf_name}, which {dist_model.model.family} has transposed. Export "
                    "the model with --merge."
                )
            modules = grouped.setdefault((block.mcore_key, block.mcore_where[:-2]), {})
            modules.setdefault(block.hf_name.removesuffix(f".{WEIGHT}"), []).append(block)
    for key, lead in dict.fromkeys(
        (block.mcore_key, block.mcore_where[:-2])
        for block in dist_model.weights.blocks
        if block.mcore_key in dist_model.adapters
    ):
        yield _Matrix(
            adapter=dist_model.adapters[key],
            lead=lead,
            parts=tuple((name, tuple(blocks)) for name, blocks in grouped[key, lead].items()),
            is_expert=EXPERTS in key,
        )


def _of_each_projection(matrix: _Matrix, dist_model: DistModel, dtype: OutputDtype) -> Iterator[TargetTensor]:
    """Yield A and B of each module that a matrix packs; an A that they share is written for each."""
    adapter, lead = matrix.adapter, matrix.lead
    ranks, inputs = AxisRange(0, adapter.rank), AxisRange(0, adapter.num_inputs)
    for projection, (name, blocks) in enumerate(matrix.parts):
        copy_a = RegionCopy((ranks, inputs), adapter.key_a, (*lead, adapter.block(projection), inputs))
        copies_b = [
            RegionCopy(
                (block.hf_where[0], ranks), adapter.key_b, (*lead, block.mcore_where[len(lead)], ranks)
            )
            for block in blocks
        ]
        num_rows = dist_model.weights.hf_shapes[f"{name}.{WEIGHT}"][0]
        yield _target(name, "A", (adapter.rank, adapter.num_inputs), [copy_a], dist_model, dtype)
        yield _target(name, "B", (num_rows, adapter.rank), copies_b, dist_model, dtype)


def _wrapper(matrix: _Matrix, model: ModelConfig) -> str:
    """Return peft's name of one of the two adapters of all experts of a layer: the second wraps the first."""
    before = matrix.parts[0][0].partition(family_of(model).moe_names.prefix)[0]
    return f"{before}mlp.experts" + (".base_layer" if ".linear_fc1." in matrix.adapter.key_a else "")


def _of_all_experts(
    name: str, matrices: Sequence[_Matrix], dist_model: DistModel, dtype: OutputDtype
) -> Iterator[TargetTensor]:
    """Yield A `[experts * rank, inputs]`, expert by expert, and B `[outputs, rank * experts]`, rank by rank."""
    adapter, count = matrices[0].adapter, len(matrices)
    if adapter.num_blocks > 1:
        raise CheckpointError(
            f'{name}: gate and up-projection have an A each (lora.expert_gate_up="split"), and peft\'s fused experts '
            "share one. Write a module for each expert: --adapter each."
        )
    rank, num_rows = adapter.rank, len(adapter.projection_of_row)
    ranks, inputs, rows = AxisRange(0, rank), AxisRange(0, adapter.num_inputs), AxisRange(0, num_rows)
    copies_a, copies_b = [], []
    for expert, matrix in enumerate(matrices):
        into_a = (AxisRange(expert * rank, (expert + 1) * rank), inputs)
        copies_a.append(RegionCopy(into_a, adapter.key_a, (*matrix.lead, ranks, inputs)))
        # Expert by expert in steps: the columns of a rank are those of all experts.
        into_b = (rows, AxisRange(expert, rank * count, count))
        copies_b.append(RegionCopy(into_b, adapter.key_b, (*matrix.lead, rows, ranks)))
    yield _target(name, "A", (count * rank, adapter.num_inputs), copies_a, dist_model, dtype)
    yield _target(name, "B", (num_rows, rank * count), copies_b, dist_model, dtype)


def _target(
    name: str,
    part: Literal["A", "B"],
    shape: tuple[int, int],
    copies: Sequence[RegionCopy],
    dist_model: DistModel,
    dtype: OutputDtype,
) -> TargetTensor:
    stored = dist_model.dtype(copies[0].source)
    return TargetTensor(
        name=f"{PREFIX}{name}.lora_{part}.{WEIGHT}",
        shape=shape,
        dtype=stored if dtype == "keep" else OUTPUT_DTYPES[dtype],
        copies=tuple(copies),
    )


def adapter_config(
    dist_model: DistModel, lora: LoraConfig, layout: AdapterLayout, reference: Path | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Of experts apart peft 0.21 reads no rank but the common one, so that the other modules then have their rank by name.
    It doubles rank and alpha of gate and up-projection together, which with `use_rslora` would be another scale: here
    the scale is always alpha over the rank.
    """
    model = dist_model.model
    ranks: dict[str, int] = {}
    for matrix in _matrices(dist_model):
        if not matrix.is_expert:
            for name, _ in matrix.parts:
                ranks[".".join(name.split(".")[-2:])] = matrix.adapter.rank
    has_experts = "experts" in lora.targets_in(model)
    expert_rank = lora.rank_of("experts", model) if has_experts else 0
    modules = {name.rpartition(".")[2] for name in ranks}
    parameters = None
    if has_experts and layout == "each":
        names = family_of(model).moe_names
        modules |= {names.gate, names.up, names.down}
        common = expert_rank
    else:
        common = lora.rank or 0
        if has_experts:
            parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            ranks |= {"experts.gate_up_proj": expert_rank, "experts.down_proj": expert_rank}
    others = {name: rank for name, rank in sorted(ranks.items()) if rank != common}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(reference) if reference is not None else None,
        "r": common,
        "lora_alpha": lora.scale_of(common) * common,
        "use_rslora": False,
        "rank_pattern": others,
        "alpha_pattern": {name: lora.scale_of(rank) * rank for name, rank in others.items()},
        "target_modules": sorted(modules),
        "target_parameters": parameters,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _unread(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Return a note where peft leaves adapters of a model out without a word."""
    dropped = [name for name in ("mlp", "shared_experts") if name in lora.targets_in(model)]
    if not model.is_moe or not dropped:
        return []
    return [f"peft 0.21 leaves out the adapters of {' and '.join(dropped)} of a model with experts"]


def _finish(
    dist_model: DistModel,
    config: dict[str, Any],
    folder: Path,
    plan: str,
    done: Sequence[RecordedTask],
) -> None:
    """Add adapter_config.json and the manifest to the tensors."""
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    description = {
        "kind": "adapter",
        "family": dist_model.model.family,
        "step": dist_model.folder.step,
        "files": file_checksums(folder, done),
    }
    sources = {"metadata_sha256": dist_model.folder.digest, "files": dist_model.folder.files}
    write_manifest(folder, plan, description, sources, done)
