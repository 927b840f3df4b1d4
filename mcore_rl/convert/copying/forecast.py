"""A conversion on paper: each tensor from where to where, disk, memory, and bytes by rank on a mesh."""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.conversion import Conversion, Settings, memory_forecast, workers_within
from mcore_rl.convert.copying.plan import Target
from mcore_rl.convert.copying.progress import shown
from mcore_rl.errors import ConfigError
from mcore_rl.families.weight_map import Shape
from mcore_rl.plan.weights import layers_by_stage

CUT_BY_TP = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_fc1.weight",
    "linear_fc1.bias", "linear_fc2.weight", "softmax_offset", "eh_proj.weight",
)  # fmt: skip
"""Ends of the keys of tensors that tensor parallelism cuts; the others are whole on every one of its ranks."""
EXPERTS = ".experts.experts."


def plan_lines(conversion: Conversion, settings: Settings) -> Iterator[str]:
    """What the conversion would do."""
    width = max((len(target.name) for target in conversion.targets), default=0)
    for target in conversion.targets:
        shape = "x".join(map(str, target.shape)) or "scalar"
        dtype = str(target.dtype).removeprefix("torch.")
        yield f"{target.name:<{width}}  {dtype:<8} {shape:<22} {shown(target.num_bytes):>11}  <- {_origin(target)}"
    workers = workers_within(conversion, settings)
    yield f"output: {conversion.final}, {len(conversion.targets)} tensors, {shown(conversion.num_bytes)} on disk"
    yield (
        f"memory: at most {shown(memory_forecast(conversion, workers))} with {workers} worker(s); the largest chunk is "
        f"{shown(conversion.largest_chunk_bytes)}"
    )


def mesh_lines(
    model: ModelConfig, tensors: Mapping[str, tuple[Shape, int]], mesh: MeshConfig
) -> Iterator[str]:
    """Bytes of weights that a rank of each pipeline stage holds; ConfigError when the mesh cannot hold the model.

    `tensors`: shape and bytes an element of Megatron's tensors, under the keys of our training.
    """
    violations = list(mesh_violations(model, mesh, seq_length=sequence_that_fits(mesh)))
    if violations:
        raise ConfigError("\n".join(f"- {violation}" for violation in violations))
    for stage, size in enumerate(bytes_by_stage(model, tensors, mesh)):
        yield f"pipeline stage {stage}: {shown(size)} of weights on each rank"


def bytes_by_stage(
    model: ModelConfig, tensors: Mapping[str, tuple[Shape, int]], mesh: MeshConfig
) -> list[int]:
    """Of the weights and buffers of one rank, for each pipeline stage."""
    stages = [0] * mesh.pp
    stage_of = {layer: stage for stage, layers in enumerate(layers_by_stage(model, mesh)) for layer in layers}
    for key, (shape, itemsize) in tensors.items():
        size = math.prod(shape) * itemsize // _ranks_sharing(model, key, mesh)
        if key.startswith("decoder.layers."):
            number = key.split(".")[2]
            layers = [int(number)] if number.isdigit() else range(model.num_layers)
            for layer in layers:
                stages[stage_of[layer]] += size // len(layers)
        elif key.startswith("embedding."):
            # The last stage has its own copy where the output is tied to it, or an MTP layer needs it.
            for stage in {0, *([mesh.pp - 1] if model.tied_embeddings or model.mtp_layers else [])}:
                stages[stage] += size
        else:
            stages[-1] += size
    return stages


def sequence_that_fits(mesh: MeshConfig) -> int:
    """A length of sequences that every mesh can cut."""
    return 2 * mesh.tp * mesh.cp


def _ranks_sharing(model: ModelConfig, key: str, mesh: MeshConfig) -> int:
    """Into how many parts a tensor is cut within a stage."""
    if EXPERTS in key:
        return mesh.ep * mesh.etp
    if not key.endswith(CUT_BY_TP):
        return 1
    return mesh.tp


def _origin(target: Target) -> str:
    """The sources, the numbers in their names as ranges."""
    names = [name for name, _ in groupby(pair.source for pair in target.pairs)]
    unique = list(dict.fromkeys(names))
    return unique[0] + (f" and {len(unique) - 1} more, to {unique[-1]}" if len(unique) > 1 else "")
