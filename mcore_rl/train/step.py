"""Optimizer step and evaluation: the same pass, with and without a backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.errors import TrainingError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import routers
from mcore_rl.megatron.schedule import MAX, SIGNAL, Head, HeadOutput, PassInput, Routing, free_routing, run_pass
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import unwrap
from mcore_rl.model.inputs import LocalMicrobatch
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


Input = TypeVar("Input", bound=PassInput)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Result of one optimizer step, equal on all ranks."""

    loss: float
    """Mean loss over the world's counted tokens; not finite if that is why the step was skipped."""
    count: int
    """Number of counted tokens in the world."""
    sums: dict[str, float]
    """Outputs of the head, reduced over the world's microbatches by `world_sums`."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping; nan when the step was skipped."""
    learning_rate: float
    """Learning rate of the step."""
    skipped: bool
    """Whether the gradient was not finite: weights, expert biases, optimizer and schedule are then unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients of a batch in the model's buffers, before the optimizer step."""

    outputs: Sequence[dict[str, Tensor]]
    """Outputs of the head for each microbatch, scalars; [] before the last pipeline stage."""
    biases: Sequence[tuple[Tensor, Tensor]]
    """Each expert bias of this rank, with its values before the pass: Megatron updates biases from the experts' load
    before the optimizer checks the gradient."""

    def discard(self) -> None:
        """Restore the model to its state before the pass, to take no optimizer step on these gradients."""
        for bias, before in self.biases:
            bias.copy_(before)


def train_step(state: TrainState, microbatches: Sequence[Input], head: Head[Input]) -> StepReport:
    """Collective over the mesh: take one optimizer step on this data-parallel rank's share of the batch, the same
    number of microbatches on every rank. Weights, optimizer, schedule and `progress.step` change.
    """
    return optimizer_step(state, compute_gradients(state, microbatches, head))


def compute_gradients(
    state: TrainState, microbatches: Sequence[Input], head: Head[Input], *, routing: Routing = free_routing
) -> Gradients:
    """Collective over the mesh: run this data-parallel rank's share of a batch forward and backward, which is as many
    microbatches on every rank. Pass the result to `optimizer_step`, or discard it.
    """
    for chunk in state.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    # Copies: the pass moves the biases, before anybody knows whether the step will be skipped.
    biases = [
        (router.expert_bias, router.expert_bias.clone())
        for chunk in state.chunks
        for _, router in routers(chunk)
        if router.expert_bias is not None
    ]
    with state.timers.phase("forward_backward"):
        outputs = run_pass(state.chunks, microbatches, head, backward=True, routing=routing)
    return Gradients(outputs=outputs, biases=biases)


def optimizer_step(state: TrainState, gradients: Gradients) -> StepReport:
    """Collective over the mesh: update weights, optimizer, schedule and `progress.step` from the gradients."""
    learning_rate = float(state.optimizer.param_groups[0]["lr"])
    with state.timers.phase("optimizer"):
        updated, grad_norm, _ = state.optimizer.step()
    # A skipped step does not advance the schedule: the next step uses the same learning rate.
    if updated:
        state.schedule.step(1)
    else:
        gradients.discard()
    state.progress.step += 1
    state.progress.skipped_steps += int(not updated)
    state.progress.skipped_in_a_row = 0 if updated else state.progress.skipped_in_a_row + 1
    sums = world_sums(gradients.outputs, state.mesh, state.platform.device)
    return StepReport(
        loss=sums["loss"] / max(sums["count"], 1.0),
        count=int(sums["count"]),
        sums=sums,
        grad_norm=float(grad_norm) if updated else math.nan,
        learning_rate=learning_rate,
        skipped=not updated,
    )


@torch.no_grad()
def evaluate(state: TrainState, microbatches: Sequence[Input], head: Head[Input]) -> dict[str, float]:
    """Collective over the mesh: return the outputs of `head`, reduced by `world_sums`, without dropout."""
    for chunk in state.chunks:
        chunk.eval()
    outputs = run_pass(state.chunks, microbatches, head, backward=False)
    for chunk in state.chunks:
        chunk.train()
    return world_sums(outputs, state.mesh, state.platform.device)


def world_sums(outputs: Sequence[dict[str, Tensor]], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Collective over the mesh: reduce scalars over microbatches and data- and context-parallel ranks to float64 sums,
    or maxima for names that begin with MAX, the same on all ranks. `outputs` is [] before the last pipeline stage.
    """
    values: dict[str, float] = {}
    if mesh.is_last_stage:
        # Sorted: a collective reduces by position, and the dict's order may differ between ranks.
        names = sorted(outputs[0])
        sums = [name for name in names if not name.startswith(MAX)]
        maxima = [name for name in names if name.startswith(MAX)]
        for chosen, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            if chosen:
                table = torch.stack([torch.stack([k[name].double() for name in chosen]) for k in outputs])
                totals = (table.sum(0) if operation == dist.ReduceOp.SUM else table.amax(0)).to(device)
                dist.all_reduce(totals, op=operation, group=mesh.dp_cp.group)
                values |= dict(zip(chosen, totals.tolist(), strict=True))
    if mesh.pp.size == 1:
        return values
    # Only the last stage has logits: it sends the sums to the stages before it.
    box = [values if mesh.is_last_stage else None]
    dist.broadcast_object_list(box, group=mesh.pp.group, group_src=mesh.pp.size - 1, device=device)
    assert box[0] is not None
    return box[0]


def refuse_no_gradient(report: StepReport, step: int) -> None:
    """Raise a TrainingError if the gradient is zero although the loss has a signal, as a cross entropy always has. A
    policy's gradient is rightly 0 without advantages or with all tokens clipped: the output SIGNAL is then 0.
    """
    if report.grad_norm == 0 and report.sums.get(SIGNAL, report.loss):
        raise TrainingError(
            f"step {step} has a loss of {report.loss:.4g}, a mean over {report.count}, and a "
            "gradient of exactly 0: nothing is trained. Most likely no parameter that the loss depends on is "
            "trainable (requires_grad), or the output of a changed module is detached (detach(), torch.no_grad)."
        )


class NextTokenHead:
    """Cross entropy of the next token, summed over tokens in the loss mask."""

    wants_losses = True

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        """Return the number of tokens in the loss mask."""
        return microbatch.loss_mask_Bs.sum().to(torch.int)

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        """Return the loss in nats and the number of tokens; `output` is the loss of each token, `[B, s]`."""
        mask_Bs = microbatch.loss_mask_Bs.float()
        loss = (output.float() * mask_Bs).sum()
        outputs = {"loss": loss.detach(), "count": mask_Bs.sum()}
        return HeadOutput(loss=loss, count=self.count(microbatch), outputs=outputs)
