"""Numbers of weights on each rank of a mesh, from the shapes of a checkpoint's tensors: for closed forms to equal."""

import math

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.families import weight_map
from mcore_rl.planning.weights import layers_by_stage

CUT_BY_TP = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_fc1.weight",
    "linear_fc1.bias", "linear_fc2.weight", "softmax_offset", "eh_proj.weight", "in_proj.weight.query",
    "in_proj.weight.key", "in_proj.weight.value", "in_proj.weight.z", "in_proj.weight.beta", "in_proj.weight.alpha",
    "conv1d.weight.query", "conv1d.weight.key", "conv1d.weight.value", "A_log", "dt_bias", "out_proj.weight",
)  # fmt: skip
"""Key suffixes of tensors that tensor parallelism splits; all other tensors are replicated on its ranks."""
EXPERTS = ".experts.experts."


def numbers_by_stage(model: ModelConfig, mesh: MeshConfig) -> list[int]:
    """Return the weights, and the buffers that a checkpoint has, on each rank of every pipeline stage."""
    stages = [0] * mesh.pp
    stage_of = {layer: stage for stage, layers in enumerate(layers_by_stage(model, mesh)) for layer in layers}
    for key, shape in weight_map(model).mcore_shapes.items():
        size = math.prod(shape) // _ranks_sharing(key, mesh)
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


def _ranks_sharing(key: str, mesh: MeshConfig) -> int:
    """Return how many parts a tensor is split into within a stage."""
    if EXPERTS in key:
        return mesh.ep * mesh.etp
    return mesh.tp if key.endswith(CUT_BY_TP) else 1
