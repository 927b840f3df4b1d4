"""The losses that Megatron's modules add and record by themselves: balance, router z, multi-token prediction."""

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from mcore_rl.backend.patches.table import router_loss_report
from mcore_rl.model.build import unwrap
from mcore_rl.obs.metrics import Metric
from mcore_rl.train.state import TrainState

BALANCE_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def take_auxiliary_losses(state: TrainState, num_microbatches: int) -> list[Metric]:
    """Collective over the world: means over the step's microbatches and layers; Megatron's records are cleared."""
    losses: dict[str, Tensor] = {}
    moe, device = state.config.model.moe, state.platform.device
    names = [BALANCE_NAMES[moe.balance]] if moe.balance != "none" and moe.aux_loss_coeff else []
    names += ["z_loss"] if moe.z_loss_coeff else []
    if state.config.model.is_moe and names:
        config = unwrap(state.chunks[0]).config
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
    wanted = {"moe/z_loss" if name == "z_loss" else "moe/aux_loss": losses.get(name) for name in names}
    if state.config.model.mtp_layers:
        wanted["mtp/loss_nats"] = _mtp_loss(state, num_microbatches)
    if not wanted:
        return []
    zero = torch.zeros((), device=device)
    values = torch.stack([zero if value is None else value.detach().to(device) for value in wanted.values()])
    # Ranks that saw other tokens recorded another z-loss; the balance loss is already the same on all.
    dist.all_reduce(values, group=state.mesh.world.group)
    return [
        Metric(name, value / state.mesh.world.size)
        for name, value in zip(wanted, values.tolist(), strict=True)
    ]


def _mtp_loss(state: TrainState, num_microbatches: int) -> Tensor | None:
    """The mean over the MTP layers, multiplied so that the mean over all pipeline stages is that of the last."""
    losses: dict[str, Tensor] = {}
    if not state.mesh.is_last_stage:
        return None
    MTPLossLoggingHelper.track_mtp_metrics(
        1 / num_microbatches, state.progress.step, None, total_loss_dict=losses
    )
    means = [value for name, value in losses.items() if name.startswith("mtp_") and name.endswith("loss")]
    return torch.stack(means).mean() * state.mesh.pp.size if means else None
