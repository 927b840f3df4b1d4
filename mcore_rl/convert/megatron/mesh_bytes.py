"""Bytes of weights on each rank of a mesh, from the shapes of Megatron's tensors."""

import math
from collections.abc import Iterator, Mapping

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.progress import readable_bytes
from mcore_rl.errors import ConfigError
from mcore_rl.families.weight_map import Shape
from mcore_rl.plan.weights import layers_by_stage

CUT_BY_TP = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_fc1.weight",
    "linear_fc1.bias", "linear_fc2.weight", "softmax_offset", "eh_proj.weight", "in_proj.weight.query",
    "in_proj.weight.key", "in_proj.weight.value", "in_proj.weight.z", "in_proj.weight.beta", "in_proj.weight.alpha",
    "conv1d.weight.query", "conv1d.weight.key", "conv1d.weight.value", "A_log", "dt_bias", "out_proj.weight",
)  # fmt: skip
"""Key suffixes of tensors that tensor parallelism splits; all other tensors are replicated on its ranks."""
EXPERTS = ".experts.experts."


def mesh_lines(
    model: ModelConfig, tensors: Mapping[str, tuple[Shape, int]], mesh: MeshConfig
) -> Iterator[str]:
    """Yield a line for each pipeline stage: the bytes of weights on each of its ranks.

    Args:
        model: The model's config.
        tensors: Shape, and bytes of an element, of Megatron's tensors under the keys of training.
        mesh: The mesh.

    Raises:
        ConfigError: The model cannot be divided over the mesh.
    """
    violations = list(mesh_violations(model, mesh, seq_length=_length_that_divides(mesh)))
    if violations:
        raise ConfigError("\n".join(f"- {violation}" for violation in violations))
    for stage, size in enumerate(bytes_by_stage(model, tensors, mesh)):
        yield f"pipeline stage {stage}: {readable_bytes(size)} of weights on each rank"


def bytes_by_stage(
    model: ModelConfig, tensors: Mapping[str, tuple[Shape, int]], mesh: MeshConfig
) -> list[int]:
    """Return, for each pipeline stage, the size in bytes of weights and buffers on each of its ranks."""
    stages = [0] * mesh.pp
    stage_of = {layer: stage for stage, layers in enumerate(layers_by_stage(model, mesh)) for layer in layers}
    for key, (shape, itemsize) in tensors.items():
        size = math.prod(shape) * itemsize // _ranks_sharing(model, key, mesh)
        if key.startswith("decoder.layers."):
            layer_or_name = key.split(".")[2]
            layers = [int(layer_or_name)] if layer_or_name.isdigit() else range(model.num_layers)
            for layer in layers:
                stages[stage_of[layer]] += size // len(layers)
        elif key.startswith("embedding."):
            # The last stage has its own copy if the output is tied to it, or an MTP layer needs it.
            for stage in {0, *([mesh.pp - 1] if model.tied_embeddings or model.mtp_layers else [])}:
                stages[stage] += size
        else:
            stages[-1] += size
    return stages


def _length_that_divides(mesh: MeshConfig) -> int:
    """Return a sequence length that the mesh can divide; the check needs a length, but weights do not depend on it."""
    # 2: context parallelism gives each rank two slices of a sequence.
    return 2 * mesh.tp * mesh.cp


def _ranks_sharing(model: ModelConfig, key: str, mesh: MeshConfig) -> int:
    """Return how many parts a tensor is split into within a stage."""
    if EXPERTS in key:
        return mesh.ep * mesh.etp
    if not key.endswith(CUT_BY_TP):
        return 1
    return mesh.tp
