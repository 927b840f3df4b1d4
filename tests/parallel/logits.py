"""A forward pass on any mesh. Apart from its test, so that ranks need not import transformers."""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron.mesh import Axis, Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.schedule import HeadOutput, run_pass
from mcore_rl.model.build import build_model
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.model.inputs import LocalMicrobatch, localize
from tests.hf_weights import to_global

Tensors = dict[str, Tensor]


class LogitsHead:
    """Keeps the whole logits of a microbatch."""

    wants_losses = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        logits_BSV = gather_positions(gather_vocabulary(output, self._mesh.tp), self._mesh.cp)
        nothing = output.new_zeros(())
        return HeadOutput(loss=nothing, count=nothing.int(), outputs={"logits": logits_BSV})


def gather_vocabulary(local: Tensor, tp: Axis) -> Tensor:
    """Collective over `tp`."""
    shards = [torch.empty_like(local) for _ in range(tp.size)]
    dist.all_gather(shards, local.detach().contiguous(), group=tp.group)
    return torch.cat(shards, dim=-1)


def unzigzag(shards: list[Tensor], dim: int = 1) -> Tensor:
    """The full sequence from the shards of all context-parallel ranks, in rank order: the inverse of `zigzag`."""
    # Rank r has chunks r and 2*cp-1-r: the second chunks come in descending order of ranks.
    first, second = zip(*(shard.chunk(2, dim=dim) for shard in shards), strict=True)
    return torch.cat([*first, *reversed(second)], dim=dim) if len(shards) > 1 else shards[0]


def gather_positions(local: Tensor, cp: Axis) -> Tensor:
    """Collective over `cp`."""
    shards = [torch.empty_like(local) for _ in range(cp.size)]
    dist.all_gather(shards, local.contiguous(), group=cp.group)
    return unzigzag(shards)


def logits_on(
    mesh_config: MeshConfig, models: dict[str, tuple[ModelConfig, Tensors]], tokens_BS: Tensor
) -> dict[str, list[Tensor]]:
    """On a rank: for each model the logits of each row, where the rank has the last stage."""
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(mesh_config)
    return {name: _logits(mesh, model, tensors, tokens_BS) for name, (model, tensors) in models.items()}


def _logits(mesh: Mesh, model: ModelConfig, tensors: Tensors, tokens_BS: Tensor) -> list[Tensor]:
    settings = PlatformConfig(layers="torch")
    platform = start(settings)
    seed_ranks(1)
    chunks = build_model(model, mesh, platform, settings)
    copy_in(chunks, to_global(tensors, model))
    microbatches = [
        localize(
            Microbatch(
                tokens_BS=row_S[None],
                labels_BS=row_S[None],
                loss_mask_BS=torch.ones(1, len(row_S)),
                position_ids_BS=torch.arange(len(row_S))[None],
            ),
            mesh.cp,
            platform.device,
        )
        for row_S in tokens_BS
    ]
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        return [
            outputs["logits"] for outputs in run_pass(chunks, microbatches, LogitsHead(mesh), backward=False)
        ]
