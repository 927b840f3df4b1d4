"""The losses that Megatron's modules add and record by themselves: balance, router z, multi-token prediction."""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.backend.patches.versions import router_loss_report
from mcore_rl.model.build import unwrap
from mcore_rl.obs.metrics import Metric
from mcore_rl.train.state import TrainState

BALANCE_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def take_auxiliary_losses(state: TrainState, num_microbatches: int) -> list[Metric]:
    """Collective over the world: the losses since the last call, whose records are cleared.

    Args:
        state: The model in training.
        num_microbatches: Microbatches of this rank since the last call.

    Returns:
        Balance and z-loss as means over microbatches and layers, the loss of multi-token prediction as the mean over
        tokens and depths.
    """
    return [*_router_losses(state, num_microbatches), *_mtp_losses(state)]


def _router_losses(state: TrainState, num_microbatches: int) -> list[Metric]:
    """Collective over the world: means over microbatches, layers and ranks."""
    moe = state.config.model.moe
    names = [BALANCE_NAMES[moe.balance]] if moe.balance != "none" and moe.aux_loss_coeff else []
    names += ["z_loss"] if moe.z_loss_coeff else []
    if not (state.config.model.is_moe and names):
        return []
    config = unwrap(state.chunks[0]).config
    losses: dict[str, Tensor] = {}
    router_loss_report()(
        1 / num_microbatches,
        state.progress.step,
        total_loss_dict=losses,
        force_initialize=True,
        track_names=names,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
    )
    zero = torch.zeros((), device=state.platform.device)
    means = torch.stack([losses.get(name, zero).detach().to(zero.device) for name in names])
    # Ranks that saw other tokens recorded another z-loss; the balance loss is already the same on all.
    dist.all_reduce(means, group=state.mesh.world.group)
    return [
        Metric("moe/z_loss" if name == "z_loss" else "moe/aux_loss", mean / state.mesh.world.size)
        for name, mean in zip(names, means.tolist(), strict=True)
    ]


def _mtp_losses(state: TrainState) -> list[Metric]:
    """Collective over the world: cross entropy per token, the mean over the depths."""
    depth = state.config.model.mtp_layers
    if not depth:
        return []
    totals = torch.zeros(depth, 2, dtype=torch.float64, device=state.platform.device)
    for chunk in map(unwrap, state.chunks):
        if hasattr(chunk, "mtp_sums"):  # the chunk with the last stage's head, once it has trained
            totals += chunk.mtp_sums
            chunk.mtp_sums.zero_()
    # Tensor-parallel ranks all hold the same sums and counts: their ratio does not change.
    dist.all_reduce(totals, group=state.mesh.world.group)
    losses, counts = totals.unbind(1)
    return [Metric("mtp/loss_nats", (losses / counts.clamp(min=1)).mean().item())]
