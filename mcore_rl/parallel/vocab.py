"""The output's vocabulary, of which each tensor-parallel rank has an equal slice."""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.parallel.mesh import Axis


@torch.no_grad()
def gather_logits(logits_BSv: Tensor, tp: Axis) -> Tensor:
    """Collective over `tp`: logits `[B, S, V]` from the slices of all its ranks, without gradient."""
    if tp.size == 1:
        return logits_BSv.detach()
    slices = [torch.empty_like(logits_BSv) for _ in range(tp.size)]
    dist.all_gather(slices, logits_BSv.contiguous(), group=tp.group)
    return torch.cat(slices, dim=-1)
