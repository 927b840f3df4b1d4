"""The same three Adam steps on any mesh, with weights and gradients in global coordinates.

The matrices of numerics run with torch's layers, which GPUs have too; tests/unit/model/layers/test_cpu.py holds the
compiled layers of CPUs to them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, RunConfig, TrainConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.schedule import HeadOutput, run_pass
from mcore_rl.model.build import copy_in, local_shards, unwrap
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.ranks import run_ranks

Tensors = dict[str, Tensor]
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MESHES = {
    "1": MeshConfig(),
    "tp2": MeshConfig(tp=2),
    "tp2-nosp": MeshConfig(tp=2, sequence_parallel=False),
    "tp4": MeshConfig(tp=4),
    "pp2": MeshConfig(pp=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "pp4-vpp2": MeshConfig(pp=4, vpp=2),
    "pp2-uneven": MeshConfig(pp=2, first_stage_layers=1, last_stage_layers=3),
    "pp2-layout": MeshConfig(pp=2, pp_layout=(4, 0)),
    "pp2-vpp2-balanced": MeshConfig(pp=2, vpp=2, pp_layout="balanced"),  # of 4 layers: 1, 2, 1 and none
    "ep2": MeshConfig(ep=2, dp=2),
    "etp2": MeshConfig(etp=2, dp=2),
    "cp2": MeshConfig(cp=2),
    "dp2": MeshConfig(dp=2),
    "dp2-overlapped": MeshConfig(dp=2, **OVERLAPPED),
    "ep2-overlapped": MeshConfig(ep=2, dp=2, **OVERLAPPED),
    "tp2-pp2": MeshConfig(tp=2, pp=2),
    "tp2-pp2-vpp2": MeshConfig(tp=2, pp=2, vpp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
    "tp2-etp2": MeshConfig(tp=2, etp=2),
    "tp2-cp2": MeshConfig(tp=2, cp=2),
    "tp2-dp2": MeshConfig(tp=2, dp=2),
    "tp2-dp2-overlapped": MeshConfig(tp=2, dp=2, **OVERLAPPED),
    "tp2-ep2-shared-overlapped": MeshConfig(tp=2, ep=2, overlap_shared_experts=True),
    "tp2-etp2-ep2": MeshConfig(tp=2, etp=2, ep=2, dp=2),
    "pp2-ep2": MeshConfig(pp=2, ep=2, dp=2),
    "pp2-vpp2-dp2-overlapped": MeshConfig(pp=2, vpp=2, dp=2, **OVERLAPPED),
    "cp2-ep2": MeshConfig(cp=2, ep=2),
    "cp2-dp2": MeshConfig(cp=2, dp=2),
    "cp2-dp2-overlapped": MeshConfig(cp=2, dp=2, **OVERLAPPED),
    "cp2-pp2": MeshConfig(cp=2, pp=2),
    "cp2-pp2-ep2": MeshConfig(cp=2, pp=2, ep=2),
}
"""The meshes of the tests by name, of two ranks to eight."""


def set_up_plain(config: RunConfig) -> TrainState:
    """Return `set_up` of a config that asks for torch's layers."""
    platform = start(config.platform)
    assert platform.layers == "torch", 'platform.layers="torch" is missing'
    return set_up(config, platform)


class LogitsHead:
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


STEPS, SEQUENCES, LENGTH = 3, 8, 32
"""With 4 sequences the embedding of olmoe differed by 1e-4 after five steps on two meshes: the fewer tokens there are,
the more of Adam's first steps are signs of gradients near zero. With 8 all are within the bound."""
ROWS = 2
"""Sequences of a microbatch: four microbatches, or two on each of two replicas."""
WIDE_ROWS = 4
"""Sequences of a microbatch where there are neither stages nor replicas to share the batch: two microbatches. Ranks
mostly wait for each other, and half as many microbatches have half the messages.
"""
Sabotage = Callable[[TrainState], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Three steps: what a mesh computed, independent of how it was laid out."""

    losses: list[float]
    grad_norms: list[float]
    gradients: Tensors
    weights: Tensors


def config_of(
    model: ModelConfig, mesh: MeshConfig, platform: PlatformConfig | None = None, lora: LoraConfig | None = None
) -> PretrainConfig:
    """A config with a clip norm that is always active and a constant rate."""
    return PretrainConfig(
        model=model,
        mesh=mesh,
        lora=lora or LoraConfig(),
        platform=platform or PlatformConfig(layers="torch", precision="fp32"),
        optim=OptimConfig(lr=1e-3, schedule="constant", clip_grad=0.3, beta2=0.999, weight_decay=0.01),
        train=TrainConfig(steps=STEPS, global_batch=SEQUENCES),
    )


def run(
    config: PretrainConfig,
    num_ranks: int,
    initial: Tensors | None = None,
    sabotage: Sabotage | None = None,
    length: int = LENGTH,
    rows: int = ROWS,
) -> Outcome:
    """The steps of `config` on `num_ranks` ranks, from `initial` weights or random ones."""
    ranks = run_ranks(training_steps, num_ranks, config, initial, sabotage, length, rows)
    return Outcome(
        losses=ranks[0]["losses"],
        grad_norms=ranks[0]["grad_norms"],
        gradients=assembled([rank["gradients"] for rank in ranks]),
        weights=assembled([rank["weights"] for rank in ranks]),
    )


def random_weights(config: PretrainConfig) -> Tensors:
    """Initial weights, made on one rank."""
    return assembled(run_ranks(fresh_weights, 1, config))


def fresh_weights(config: PretrainConfig) -> list[Any]:
    return owned(set_up_plain(config))


def training_steps(
    config: PretrainConfig, initial: Tensors | None, sabotage: Sabotage | None, length: int, rows: int = ROWS
) -> dict[str, Any]:
    """On a rank: Adam steps on three batches, and the gradients of the first one."""
    state = set_up_plain(config)
    if initial is not None:
        copy_in(state.chunks, initial)
        state.optimizer.reload_model_params()
    if sabotage is not None:
        sabotage(state)
    with whole_gradients(state) as gradients:
        reports = [train_step(state, batch(state, 0, length, rows), NextTokenHead())]
    reports += [train_step(state, batch(state, step, length, rows), NextTokenHead()) for step in range(1, STEPS)]
    for chunk in state.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    return {
        "losses": [report.loss for report in reports],
        "grad_norms": [report.grad_norm for report in reports],
        "gradients": gradients,
        "weights": owned(state),
    }


def batch(state: TrainState, step: int, length: int = LENGTH, rows: int = ROWS) -> list[LocalMicrobatch]:
    """This rank's microbatches of a random batch with an uneven loss mask, the same on every mesh."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, state.config.model.vocab_size, (SEQUENCES, length + 1), generator=generator)
    mask = (torch.rand(SEQUENCES, length, generator=generator) < 0.8).float()
    mask[-1, length // 2 :] = 0.0
    share = SEQUENCES // state.mesh.dp.size
    mine = range(state.mesh.dp.rank * share, (state.mesh.dp.rank + 1) * share, rows)
    return [
        localize(
            Microbatch(
                tokens_BS=tokens[row : row + rows, :-1],
                labels_BS=tokens[row : row + rows, 1:],
                loss_mask_BS=mask[row : row + rows],
                position_ids_BS=torch.arange(length).expand(rows, -1),
            ),
            state.mesh.cp,
            state.platform.device,
        )
        for row in mine
    ]


def gradients_of(state: TrainState, microbatches: Sequence[LocalMicrobatch]) -> list[Any]:
    """On a rank: the finished gradients of one batch, in the pieces of the weights."""
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    with whole_gradients(state) as gradients:
        run_pass(state.chunks, microbatches, NextTokenHead(), backward=True)
    return gradients


@contextmanager
def whole_gradients(state: TrainState) -> Iterator[list[Any]]:
    """On a rank: a list that the backward pass inside fills with its gradients, in the pieces of the weights."""
    config = unwrap(state.chunks[0]).config
    finalize = config.finalize_model_grads_func
    pieces: list[Any] = []

    def finalize_and_keep(*args: Any, **kwargs: Any) -> None:
        # The distributed optimizer leaves each rank a shard; an all-reduce gives every rank the whole gradient.
        finalize_model_grads(*args, **(kwargs | {"force_all_reduce": True}))
        params = [param for chunk in state.chunks for param in chunk.parameters()]
        kept = [param.detach().clone() for param in params]
        rest = [param.main_grad.clone() if param.requires_grad else torch.zeros_like(param) for param in params]
        parts = []
        with torch.no_grad():
            # What weights of 16 bits have lost of a gradient follows in two further parts.
            for _ in range(1 if params[0].dtype == torch.float32 else 3):
                for param, left in zip(params, rest, strict=True):
                    param.copy_(left)
                    left.sub_(param)
                parts.append(owned(state))
            pieces.extend((*place, sum(part.float() for part in data)) for *place, data in joined(parts))
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)

    config.finalize_model_grads_func = finalize_and_keep
    try:
        yield pieces
    finally:
        config.finalize_model_grads_func = finalize


def joined(parts: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """The pieces of several passes: key, place, shape, and the data of each pass."""
    for pieces in zip(*parts, strict=True):
        yield *pieces[0][:3], [piece[3] for piece in pieces]


def owned(state: TrainState) -> list[Any]:
    """On a rank: the pieces that it is the main replica of."""
    return [
        (shard.key, shard.where, shard.global_shape, shard.data.detach().clone())
        for shard in local_shards(state.chunks)
        if shard.is_main
    ]


def assembled(ranks: Sequence[Sequence[Any]]) -> Tensors:
    """Global tensors from the pieces of all ranks; every element must be there."""
    tensors: Tensors = {}
    for key, where, shape, data in (piece for rank in ranks for piece in rank):
        tensors.setdefault(key, torch.full(shape, torch.nan, dtype=data.dtype))[where] = data
    holes = [key for key, tensor in tensors.items() if tensor.isnan().any()]
    assert not holes, f"no rank owns part of {holes}"
    return tensors


def assert_equal_training(outcome: Outcome, reference: Outcome) -> None:
    """Gradients to 1e-5 relative in every tensor; weights after three steps to 3e-5 and 1e-7 rms; losses to 1e-6.

    Adam divides a gradient by its own size, so a value whose gradient is rounding noise may move by a step:
    hence a looser largest difference beside a tight rms. With torch's layers that is 7.7e-8 for qwen3_moe on tp2-pp2,
    where gradients agree to 4.9e-7, and at most 2.5e-8 on 36 other meshes.
    """
    worst = relative_errors(outcome.gradients, reference.gradients)
    assert max(worst.values()) <= 1e-5, f"gradients differ: {largest(worst)}"
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6), (outcome.losses, reference.losses)
    norms = outcome.grad_norms, reference.grad_norms
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), norms
    distances = {key: distance(outcome.weights[key], value) for key, value in reference.weights.items()}
    assert max(d.abs().max().item() for d in distances.values()) <= 3e-5, largest(
        {key: d.abs().max().item() for key, d in distances.items()}
    )
    total = torch.cat([d.flatten() for d in distances.values()])
    assert total.pow(2).mean().sqrt().item() <= 1e-7


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """The elementwise difference in float64."""
    return ours.double() - theirs.double()


def relative_errors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor the norm of the difference over the norm."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {
        key: (distance(ours[key], value).norm() / value.double().norm().clamp_min(1e-12)).item()
        for key, value in theirs.items()
    }


def largest(errors: Mapping[str, float]) -> list[tuple[str, float]]:
    """The five worst, for the message."""
    return sorted(errors.items(), key=lambda item: -item[1])[:5]
