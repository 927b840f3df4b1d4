"""Low-rank adapters as a folder of the library peft (0.21)."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, target_of
from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.tensors import OUTPUT_DTYPES, OutputDtype, TargetTensor, is_finite, tasks_of
from mcore_rl.convert.exporting import as_json, finish_folder, shift_notes
from mcore_rl.convert.hf.folder import ADAPTER_CONFIG
from mcore_rl.convert.hf.writer import SafetensorsWriter
from mcore_rl.convert.megatron.model import EXPERTS, MTP, open_dist_model
from mcore_rl.convert.megatron.tensors import WEIGHT, StoredAdapter, adapter_of, stored_lora
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of, score_config, weight_map
from mcore_rl.families.rules import packed_rows
from mcore_rl.families.weight_map import AxisRange, Copies, Region, RegionCopy, Shape, WeightBlock, WeightMap, listed
from mcore_rl.storage.checkpoint import SCORE_WEIGHT
from mcore_rl.storage.files import POINTER_REMEDY, is_lfs_pointer
from mcore_rl.storage.folders import read_json

AdapterLayout = Literal["each", "fused"]
"""Modules of experts: a module for each expert, or as in peft's `target_parameters` a single module per layer."""
KIND = "export --adapter"
"""Kind of this conversion in its manifest and for people."""
TENSORS = "adapter_model.safetensors"
LINEAR = re.compile(r"\.(linear_\w+)\.weight$")
PREFIX = "base_model.model."
HEAD = "score"
"""Module of transformers' scalar head, which peft saves whole."""
HEADS = {HEAD, "classifier"}
"""Names in `modules_to_save` of a model with such a head: peft adds its own, some twice."""
PLAIN: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
    "peft_type": "LORA",
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "layer_replication": None,
}
"""Fields of adapter_config.json with which a layer would compute something else of A and B, with their plain values."""
OF_OTHER_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")
"""Beginnings of peft's `init_lora_weights` for adapters of other weights than the base's."""


def plan_adapter_export(
    source: Path,
    folder: Path,
    layout: AdapterLayout,
    reference: Path | None,
    dtype: OutputDtype,
    settings: CopySettings,
) -> Conversion:
    """Plan the export of low-rank adapters alone; CheckpointError or ConfigError if there are none for peft."""
    dist_model = open_dist_model(source, reference, adapters="apart")
    lora = stored_lora(dist_model.folder)
    if lora is None:
        raise CheckpointError(
            f"{dist_model.folder.path} has no low-rank adapters. Export the model, without --adapter."
        )
    if dist_model.model.head == "score":
        score_config(dist_model.model)
    adapted = AdaptedModel(
        model=dist_model.model, weights=dist_model.weights, adapters=dist_model.adapters, dtype=dist_model.dtype
    )
    targets = list(adapter_targets(adapted, layout, dtype))
    files = {TENSORS: targets}
    config = adapter_config(adapted, lora, layout, reference)
    unread = [name for name in ("mlp", "shared_experts") if name in lora.targets_in(dist_model.model)]
    return Conversion(
        title=KIND,
        final=folder,
        sources=[("the source", source), ("the checkpoint", dist_model.folder.path)]
        + ([("--reference", reference)] if reference is not None else []),
        targets=targets,
        tasks=tasks_of(files, settings.task_bytes),
        open_source=dist_model.source,
        writer=SafetensorsWriter(files),
        identity=f"adapters {layout} {dtype} {config} {dist_model.folder.digest}",
        read=dist_model.folder.stamps,
        finish=partial(
            finish_folder,
            {},
            {ADAPTER_CONFIG: as_json(config)},
            {"kind": KIND, "family": dist_model.model.family, "step": dist_model.folder.step},
            lambda _: dist_model.folder.described,
        ),
        notes=[
            f"{dist_model.model.family}, step {dist_model.folder.step}: {len(targets)} tensors of adapters",
            *(
                [f"peft 0.21 leaves out the adapters of {' and '.join(unread)} of a model with experts"]
                if dist_model.model.is_moe and unread
                else ()
            ),
            *shift_notes(dist_model),
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """A model with low-rank adapters, in a checkpoint or in memory."""

    model: ModelConfig
    weights: WeightMap
    adapters: Mapping[str, StoredAdapter]
    dtype: Callable[[str], torch.dtype]
    """Gives the type of a tensor."""


def write_served_adapter(folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, model: ModelConfig) -> int:
    """Write a peft folder for an inference server, with a module for each expert. Returns the tensors' size in bytes.
    `tensors` are whole adapters by Megatron's keys. Servers ignore the patterns and apply the scale `lora_alpha / r` to
    all modules: it is 1 here, and each module's own scale is multiplied into its B.
    """
    weights = weight_map(model.model_copy(update={"mtp_layers": 0}), "each")
    adapters = dict(_wanted(weights, lora, model))
    adapted = AdaptedModel(model=model, weights=weights, adapters=adapters, dtype=lambda key: tensors[key].dtype)
    scales = {adapter.key_b: adapter.scale for adapter in adapters.values()}
    found = {}
    for target in adapter_targets(adapted, "each", "keep"):
        whole = found[target.name] = torch.empty(target.shape, dtype=target.dtype)
        for copy in target.copies:
            part = tensors[copy.source][_slices(copy.where)].float() * scales.get(copy.source, 1.0)
            into = whole[_slices(copy.into)]
            into.copy_(part.view(into.shape))
    rank = max(adapter.rank for adapter in adapters.values())
    plain = {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}}
    folder.mkdir()
    save_file(found, folder / TENSORS)
    config = adapter_config(adapted, lora, "each", None) | plain
    (folder / ADAPTER_CONFIG).write_bytes(as_json(config))
    return sum(tensor.nbytes for tensor in found.values())


def _slices(where: Region) -> tuple[slice, ...]:
    return tuple(slice(*axis) for axis in where)


def adapter_targets(adapted: AdaptedModel, layout: AdapterLayout, dtype: OutputDtype) -> Iterator[TargetTensor]:
    """Yield the tensors of peft's adapter: modules in the order of the family's rules, fused experts, a scalar head."""
    fused: dict[str, list[_Matrix]] = {}
    for matrix in _matrices(adapted.weights, adapted.adapters, adapted.model):
        if matrix.is_expert and layout == "fused":
            fused.setdefault(_wrapper(matrix, adapted.model), []).append(matrix)
        else:
            yield from _of_each_projection(matrix, adapted, dtype)
    for name, matrices in fused.items():
        yield from _of_all_experts(name, matrices, adapted, dtype)
    if adapted.model.head == "score":
        shape = adapted.weights.hf_shapes[SCORE_WEIGHT]
        where = tuple(AxisRange(0, size) for size in shape)
        yield _target(HEAD, shape, [RegionCopy(where, SCORE_WEIGHT, where)], adapted, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    adapter: StoredAdapter
    lead: Region
    """Layer and expert in Megatron's tensors."""
    parts: tuple[tuple[str, tuple[WeightBlock, ...]], ...]
    """Hugging Face's modules that it packs, in the order of its rows, with the blocks of each."""
    is_expert: bool


def _matrices(weights: WeightMap, adapters: Mapping[str, StoredAdapter], model: ModelConfig) -> Iterator[_Matrix]:
    grouped: dict[tuple[str, Region], dict[str, list[WeightBlock]]] = {}
    for block in sorted(weights.blocks, key=lambda block: block.mcore_where[-2:][0].start):
        if block.mcore_key in adapters:
            if block.transposed or not block.hf_name.endswith(WEIGHT):
                raise CheckpointError(
                    f"peft has no adapter for {block.hf_name}, which {model.family} has transposed. Export "
                    "the model with --merge."
                )
            modules = grouped.setdefault((block.mcore_key, block.mcore_where[:-2]), {})
            modules.setdefault(block.hf_name.removesuffix(f".{WEIGHT}"), []).append(block)
    for key, lead in dict.fromkeys(
        (block.mcore_key, block.mcore_where[:-2]) for block in weights.blocks if block.mcore_key in adapters
    ):
        yield _Matrix(
            adapter=adapters[key],
            lead=lead,
            parts=tuple((name, tuple(blocks)) for name, blocks in grouped[key, lead].items()),
            is_expert=EXPERTS in key,
        )


def _of_each_projection(matrix: _Matrix, adapted: AdaptedModel, dtype: OutputDtype) -> Iterator[TargetTensor]:
    adapter, lead = matrix.adapter, matrix.lead
    ranks, inputs = AxisRange(0, adapter.rank), AxisRange(0, adapter.num_inputs)
    for projection, (name, blocks) in enumerate(matrix.parts):
        copy_a = RegionCopy((ranks, inputs), adapter.key_a, (*lead, adapter.block(projection), inputs))
        copies_b = [
            RegionCopy((block.hf_where[0], ranks), adapter.key_b, (*lead, block.mcore_where[len(lead)], ranks))
            for block in blocks
        ]
        num_rows = adapted.weights.hf_shapes[f"{name}.{WEIGHT}"][0]
        yield _target(f"{name}.lora_A", (adapter.rank, adapter.num_inputs), [copy_a], adapted, dtype)
        yield _target(f"{name}.lora_B", (num_rows, adapter.rank), copies_b, adapted, dtype)


def _wrapper(matrix: _Matrix, model: ModelConfig) -> str:
    """Return peft's name for the adapter of fc1 or fc2 of all experts of a layer: the second wraps the first."""
    before = matrix.parts[0][0].partition(family_of(model).moe_names.prefix)[0]
    return f"{before}mlp.experts" + (".base_layer" if ".linear_fc1." in matrix.adapter.key_a else "")


def _of_all_experts(
    name: str, matrices: Sequence[_Matrix], adapted: AdaptedModel, dtype: OutputDtype
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
        # In steps: the columns of all experts at a rank index are adjacent.
        into_b = (rows, AxisRange(expert, rank * count, count))
        copies_b.append(RegionCopy(into_b, adapter.key_b, (*matrix.lead, rows, ranks)))
    yield _target(f"{name}.lora_A", (count * rank, adapter.num_inputs), copies_a, adapted, dtype)
    yield _target(f"{name}.lora_B", (num_rows, rank * count), copies_b, adapted, dtype)


def _target(
    name: str, shape: Shape, copies: Sequence[RegionCopy], adapted: AdaptedModel, dtype: OutputDtype
) -> TargetTensor:
    stored = adapted.dtype(copies[0].source)
    return TargetTensor(
        name=f"{PREFIX}{name}.{WEIGHT}",
        shape=shape,
        dtype=stored if dtype == "keep" else OUTPUT_DTYPES[dtype],
        copies=Copies(copies),
    )


def read_peft(folder: Path, lora: LoraConfig, model: ModelConfig) -> dict[str, Tensor]:
    """Return the adapters in a folder of peft, and the scalar head of a model with one, by Megatron's keys. Raises
    CheckpointError, with names, if they are damaged, of another kind, or do not fit `lora` and the model.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    if not (folder / TENSORS).is_file():
        raise CheckpointError(f"{folder} has no {TENSORS}. Name a folder that peft's save_pretrained wrote.")
    if model.head == "score" and {*(config.get("modules_to_save") or ())} <= HEADS:
        config["modules_to_save"] = None
    odd = [f"{name}={config[name]}" for name, plain in PLAIN.items() if config.get(name, plain) not in (plain, [])]
    if odd:
        raise CheckpointError(f"{folder}: {', '.join(odd)} in {ADAPTER_CONFIG} is more than A and B. It is not read.")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(OF_OTHER_WEIGHTS):
        raise CheckpointError(
            f'{folder}: init_lora_weights="{initial}" in {ADAPTER_CONFIG}: these adapters began with a part of the '
            "weights, which peft takes out of the base, and would add it twice to the base itself. Save them as plain "
            "ones: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        remedy = POINTER_REMEDY if is_lfs_pointer(folder / TENSORS) else "Copy it again."
        raise CheckpointError(f"{folder / TENSORS} cannot be read: {error}. {remedy}") from error
    if broken := [name for name, tensor in tensors.items() if not is_finite(tensor.float())]:
        raise CheckpointError(
            f"{folder / TENSORS} has values that are infinite or NaN:\n{listed(broken)}\nTake another copy."
        )
    weights = weight_map(model, "each")
    adapters = dict(_wanted(weights, lora, model))
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    faults: list[str] = []
    for matrix in _matrices(weights, adapters, model):
        adapter, lead = matrix.adapter, tuple(axis.start for axis in matrix.lead)
        stack = weights.mcore_shapes[adapter.key_a.removesuffix("adapter.A") + WEIGHT][: len(lead)]
        shape_a = (adapter.num_blocks * adapter.rank, adapter.num_inputs)
        whole_a = found.setdefault(adapter.key_a, torch.zeros(*stack, *shape_a))
        whole_b = found.setdefault(adapter.key_b, torch.zeros(*stack, len(adapter.projection_of_row), adapter.rank))
        faults += _fill(matrix, whole_a[lead], whole_b[lead], tensors, used, config, model)
    if model.head == "score" and (head := f"{PREFIX}{SCORE_WEIGHT}") in tensors:
        found[SCORE_WEIGHT] = tensors[head].reshape(weights.mcore_shapes[SCORE_WEIGHT])
        used.add(head)
    faults += [f"{name} belongs to nothing that has an adapter here" for name in sorted(tensors.keys() - used)]
    if faults:
        raise CheckpointError(
            f"the adapters in {folder} are not those of the section `lora`:\n{listed(faults)}\nSet lora.targets, rank, "
            "alpha and expert_rank as in its adapter_config.json."
        )
    return found


def _wanted(weights: WeightMap, lora: LoraConfig, model: ModelConfig) -> Iterator[tuple[str, StoredAdapter]]:
    for key, shape in weights.mcore_shapes.items():
        target = target_of(key)
        match = LINEAR.search(key)
        if match is None or target not in lora.targets_in(model) or key.startswith(MTP):
            continue
        rank, rows = lora.rank_of(target, model), packed_rows(match[1], shape[-2], model)
        num_blocks = 1 if target == "experts" and lora.expert_gate_up == "fused" else len(rows.sizes)
        yield key, adapter_of(key.removesuffix(WEIGHT), rank, shape[-1], rows, num_blocks, lora)


def _fill(
    matrix: _Matrix,
    into_a: Tensor,
    into_b: Tensor,
    tensors: Mapping[str, Tensor],
    used: set[str],
    config: Mapping[str, Any],
    model: ModelConfig,
) -> Iterator[str]:
    adapter = matrix.adapter
    wrapper = f"{PREFIX}{_wrapper(matrix, model)}" if matrix.is_expert else ""
    if f"{wrapper}.lora_A.{WEIGHT}" in tensors:
        names = [f"{wrapper}.lora_{part}.{WEIGHT}" for part in "AB"]
        used.update(names)
        stacked_a, stacked_b = (tensors[name] for name in names)
        count, index = model.moe.num_experts, matrix.lead[-1].start
        parameter = "gate_up_proj" if ".linear_fc1." in adapter.key_a else "down_proj"
        module = f"{wrapper.removesuffix('.base_layer')}.{parameter}"
        yield from _scale_faults(module, stacked_a.shape[0] // count, adapter, config)
        if stacked_a.shape != (count * adapter.rank, adapter.num_inputs) or adapter.num_blocks > 1:
            yield f"{names[0]} has shape {tuple(stacked_a.shape)}, not {count} x {tuple(into_a.shape)}"
            return
        if stacked_b.shape != (shape_b := (len(into_b), adapter.rank * count)):
            yield f"{names[1]} has shape {tuple(stacked_b.shape)}, not {shape_b}"
            return
        into_a.copy_(stacked_a.view(count, adapter.rank, -1)[index])
        into_b.copy_(stacked_b.view(len(into_b), adapter.rank, count)[:, :, index])
        return
    for projection, (name, blocks) in enumerate(matrix.parts):
        names = [f"{PREFIX}{name}.lora_{part}.{WEIGHT}" for part in "AB"]
        if missing := [name for name in names if name not in tensors]:
            yield f"{missing[0]} is missing"
            return
        used.update(names)
        weight_a, weight_b = (tensors[name] for name in names)
        yield from _scale_faults(name, weight_a.shape[0], adapter, config)
        block = adapter.block(projection)
        if weight_a.shape != (adapter.rank, adapter.num_inputs):
            yield f"{names[0]} has shape {tuple(weight_a.shape)}, not {(adapter.rank, adapter.num_inputs)}"
            return
        shape_b = max(part.hf_where[0].stop for part in blocks), adapter.rank
        if weight_b.shape != shape_b:
            yield f"{names[1]} has shape {tuple(weight_b.shape)}, not {shape_b}"
            return
        if adapter.num_blocks == 1 and projection and not torch.equal(into_a, weight_a.to(into_a.dtype)):
            yield f'{names[0]} differs from that of the gate, which lora.expert_gate_up="fused" shares'
        into_a[block.start : block.stop].copy_(weight_a)
        for part in blocks:
            into_b[slice(*part.mcore_where[-2])].copy_(weight_b[slice(*part.hf_where[0])])


def _scale_faults(module: str, rank: int, adapter: StoredAdapter, config: Mapping[str, Any]) -> Iterator[str]:

    def of_pattern(patterns: Mapping[str, Any], default: Any) -> Any:
        # As peft matches them.
        found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, default)

    alpha = of_pattern(config.get("alpha_pattern") or {}, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
        yield f"{module} has rank {rank} and the scale {scale:g}, {adapter.rank} and {adapter.scale:g} here"


def adapter_config(
    adapted: AdaptedModel, lora: LoraConfig, layout: AdapterLayout, reference: Path | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    For a module per expert, peft 0.21 only reads the common rank, so the ranks of all other modules are then set by
    name. For fused gate and up-projections it doubles rank and alpha, which with `use_rslora` would change the scale:
    this package's scale is always alpha divided by rank.
    """
    model = adapted.model
    ranks: dict[str, int] = {}
    for matrix in _matrices(adapted.weights, adapted.adapters, adapted.model):
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
        "task_type": "SEQ_CLS" if model.head == "score" else "CAUSAL_LM",
        "modules_to_save": [HEAD] if model.head == "score" else None,
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
