"""What ranks do with converted checkpoints. Apart from the test, so that ranks need not import transformers."""

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
    """On a rank: by name, the logits of each row, where the rank has the last stage."""
    settings = PlatformConfig()
    platform, mesh = start(settings), build_mesh(mesh_config)
    found = {}
    for name, (model, path) in checkpoints.items():
        seed_ranks(1)
        chunks = build_model(model, mesh, platform, settings)
        load_weights(chunks, mesh, model, path)
        for chunk in chunks:
            chunk.eval()
        rows = [
            Microbatch(
                tokens_BS=row_S[None],
                labels_BS=row_S[None],
                loss_mask_BS=torch.ones(1, len(row_S)),
                position_ids_BS=torch.arange(len(row_S))[None],
            )
            for row_S in tokens_BS
        ]
        with torch.no_grad():
            microbatches = [localize(row, mesh.cp, platform.device) for row in rows]
            kept = run_pass(chunks, microbatches, LogitsHead(mesh), backward=False)
        found[name] = [entry["logits"] for entry in kept]
    return found


def weight_bytes(mesh_config: MeshConfig, models: dict[str, ModelConfig]) -> dict[str, tuple[int, int]]:
    """On a rank: its pipeline stage, and the bytes of its weights, of each model."""
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
