"""One update of the weights, and one evaluation: the same pass with and without a backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.schedule import MAX, Head, PassInput, Routing, free_routing, run_pass
from mcore_rl.train.state import TrainState

Input = TypeVar("Input", bound=PassInput)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did, equal on all ranks."""

    loss: float
    """Mean over the world's counted tokens; not finite when the step was skipped for that."""
    count: int
    """Counted tokens."""
    sums: dict[str, float]
    """What the head kept, summed over the world's microbatches."""
    grad_norm: float
    """Global, before clipping; nan when the step was skipped."""
    learning_rate: float
    """That was used."""
    skipped: bool
    """The gradient was not finite: weights, optimizer and schedule are as before."""


def train_step(
    state: TrainState,
    microbatches: Sequence[Input],
    head: Head[Input],
    *,
    routing: Routing = free_routing,
) -> StepReport:
    """Collective over the mesh: gradients of `head` over all ranks' microbatches, and one optimizer step."""
    for chunk in state.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    learning_rate = current_learning_rate(state)
    with state.timers.phase("forward_backward"):
        kept = run_pass(state.chunks, microbatches, head, backward=True, routing=routing)
    with state.timers.phase("optimizer"):
        updated, grad_norm, _ = state.optimizer.step()
    if updated:
        state.schedule.step(1)
    state.progress.step += 1
    state.progress.skipped_steps += int(not updated)
    sums = world_sums(kept, state.mesh, state.platform.device)
    return StepReport(
        loss=sums["loss"] / max(sums["count"], 1.0),
        count=int(sums["count"]),
        sums=sums,
        grad_norm=float(grad_norm) if updated else math.nan,
        learning_rate=learning_rate,
        skipped=not updated,
    )


@torch.no_grad()
def evaluate(
    state: TrainState, microbatches: Sequence[LocalMicrobatch], head: Head[LocalMicrobatch]
) -> dict[str, float]:
    """Collective over the mesh: what `head` kept, summed over all ranks' microbatches, without dropout."""
    for chunk in state.chunks:
        chunk.eval()
    kept = run_pass(state.chunks, microbatches, head, backward=False)
    for chunk in state.chunks:
        chunk.train()
    return world_sums(kept, state.mesh, state.platform.device)


def current_learning_rate(state: TrainState) -> float:
    """The rate that the next step uses."""
    return float(state.optimizer.param_groups[0]["lr"])


def world_sums(kept: Sequence[dict[str, Tensor]], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Collective over the mesh: each kept scalar summed over microbatches and data- and context-parallel ranks; of
    those whose name begins with MAX the largest.
    """
    values: dict[str, float] = {}
    if mesh.is_last_stage:
        names = sorted(kept[0])
        sums = [name for name in names if not name.startswith(MAX)]
        maxima = [name for name in names if name.startswith(MAX)]
        for chosen, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            if chosen:
                table = torch.stack([torch.stack([k[name].double() for name in chosen]) for k in kept])
                totals = (table.sum(0) if operation == dist.ReduceOp.SUM else table.amax(0)).to(device)
                dist.all_reduce(totals, op=operation, group=mesh.dp_cp.group)
                values |= dict(zip(chosen, totals.tolist(), strict=True))
    if mesh.pp.size == 1:
        return values
    box = [values if mesh.is_last_stage else None]
    dist.broadcast_object_list(box, group=mesh.pp.group, group_src=mesh.pp.size - 1, device=device)
    assert box[0] is not None
    return box[0]
