"""Losses that Megatron's modules add and record: load balancing, router z-loss, multi-token prediction."""

import torch
import torch.distributed as dist

from mcore_rl.backend.patches.router_losses import take_loss_sums
from mcore_rl.model.build import unwrap
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.routers import routers
from mcore_rl.train.state import TrainState


def take_auxiliary_losses(state: TrainState) -> list[Metric]:
    """Collective over the world: return the losses since the last call and clear their records.

    Returns:
        Balancing and z-loss as means over tokens and layers, and multi-token-prediction loss as the mean over tokens
        and depths. Losses that no training pass has computed are left out.
    """
    return [*_router_losses(state), *_mtp_losses(state)]


def _router_losses(state: TrainState) -> list[Metric]:
    """Collective over the world: return means over tokens, then over layers."""
    model = state.config.model
    has_balance = model.moe.balance != "none" and model.moe.aux_loss_coeff > 0
    if not (model.is_moe and (has_balance or model.moe.z_loss_coeff)):
        return []
    sums_L3 = torch.zeros(
        model.num_layers + model.mtp_layers, 3, dtype=torch.float64, device=state.platform.device
    )
    for chunk in state.chunks:
        for layer, router in routers(chunk):
            sums_3 = take_loss_sums(router)
            if sums_3 is not None:
                sums_L3[layer] += sums_3
    # Every rank recorded its own tokens in its own layers.
    dist.all_reduce(sums_L3, group=state.mesh.world.group)
    sums_L3 = sums_L3[sums_L3[:, 2] > 0]
    if not len(sums_L3):
        return []
    balance, z = (sums_L3[:, :2] / sums_L3[:, 2:]).mean(0).tolist()
    metrics = [Metric("moe/aux_loss", balance)] if has_balance else []
    return metrics + ([Metric("moe/z_loss", z)] if model.moe.z_loss_coeff else [])


def _mtp_losses(state: TrainState) -> list[Metric]:
    """Collective over the world: return the cross entropy per token, averaged over depths."""
    depth = state.config.model.mtp_layers
    if not depth:
        return []
    totals = torch.zeros(depth, 2, dtype=torch.float64, device=state.platform.device)
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
