"""Functions of ranks for tests of converted checkpoints; in this file, ranks do not import transformers."""

from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.backend.platform import start
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.model.build import build_model
from mcore_rl.model.global_tensors import local_shards
from mcore_rl.model.inputs import localize
from mcore_rl.parallel.mesh import build_mesh, seed_ranks
from mcore_rl.parallel.schedule import run_pass
from tests.parallel.logits import LogitsHead


def logits_of_checkpoints(
    mesh_config: MeshConfig, checkpoints: dict[str, tuple[ModelConfig, Path]], tokens_BS: Tensor
) -> dict[str, list[Tensor]]:
    """On a rank: return, by name, the logits of each sequence, where the rank has the last stage."""
    settings = PlatformConfig()
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, (model, path) in checkpoints.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        load_weights(chunks, mesh, model, path)
        for chunk in chunks:
            chunk.eval()
        sequences = [
            Microbatch(
                tokens_BS=tokens_S[None],
                labels_BS=tokens_S[None],
                loss_mask_BS=torch.ones(1, len(tokens_S)),
                position_ids_BS=torch.arange(len(tokens_S))[None],
            )
            for tokens_S in tokens_BS
        ]
        with torch.no_grad():
            microbatches = [localize(sequence, mesh.cp, platform.device) for sequence in sequences]
            outputs = run_pass(chunks, microbatches, LogitsHead(mesh), backward=False)
        found[name] = [entry["logits"] for entry in outputs]
    return found


def weight_bytes(mesh_config: MeshConfig, models: dict[str, ModelConfig]) -> dict[str, tuple[int, int]]:
    """On a rank: return, by model, its pipeline stage and the bytes of its weights."""
    settings = PlatformConfig()
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, model in models.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        storages = {
            shard.data.untyped_storage().data_ptr(): shard.data.untyped_storage().nbytes()
            for shard in local_shards(chunks)
        }
        found[name] = (mesh.pp.rank, sum(storages.values()))
    return found
