"""The loss of multi-token prediction, as a metric."""

import torch
import torch.distributed as dist

from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import unwrap
from mcore_rl.train.state import TrainState


def take_mtp_losses(state: TrainState) -> list[Metric]:
    """Collective over the world, for a model with MTP layers: return the cross entropy since the last call as the mean
    over tokens and depths, and clear its records; no metric if no training pass has computed it.
    """
    totals = torch.zeros(state.config.model.mtp_layers, 2, dtype=torch.float64, device=state.platform.device)
    for chunk in map(unwrap, state.chunks):
        if hasattr(chunk, "mtp_sums"):  # the chunk with the last stage's head, once it has trained
            totals += chunk.mtp_sums
            chunk.mtp_sums.zero_()
    # All tensor-parallel ranks have the same sums and counts, which does not change the ratio.
    dist.all_reduce(totals, group=state.mesh.world.group)
    losses, counts = totals.unbind(1)
    if not counts.any():
        return []
    return [Metric("mtp/loss_nats", (losses / counts.clamp(min=1)).mean().item())]
