"""Megatron's Muon for matrices and its Adam for the rest, with whole states on every data-parallel rank.

Only runs that train with Muon import this module: Megatron-Core has these optimizers since 0.19.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, emerging_optimizers, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor

from mcore_rl.config.optim import OptimConfig
from mcore_rl.megatron.agree import world_max

NAME = "muon_by_matrix"


class MuonByMatrix(emerging_optimizers.TensorParallelMuon):
    """Megatron's Muon, which also takes a layer's experts, stacked in `[e, m, n]`, as a matrix each."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **settings: Any) -> Tensor:
        """Collective over the tensor-parallel ranks that share a matrix: return the update of `p` on this rank."""
        if p.dim() == 2:
            update: Tensor = super().orthogonalize(p, grad, **settings)
            return update
        # Counted from the end, the axis that tensor parallelism splits is that of a matrix.
        axis: int = p.partition_dim - p.dim()  # type: ignore[attr-defined]
        matrices: Tensor = self.scaled_orthogonalize_fn(grad, self.pg_collection.expt_tp, axis)
        return matrices


class FiniteSteps(ChainedOptimizer):
    """Megatron's chain of optimizers, which skips a step if a gradient is not finite: outside of its distributed
    optimizer, Megatron looks neither at fp32 gradients nor at Muon's.
    """

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Collective over the world: put gradients in place, and return whether one of any rank is not finite."""
        super().prepare_grads()
        norms = torch._foreach_norm([param.grad for param in self.get_parameters() if param.grad is not None])
        is_finite = not norms or bool(torch.stack(norms).isfinite().all())
        return world_max(int(not is_finite)) > 0


def build_muon(
    config: OptimConfig,
    settings: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    overrides: dict[ParamKey, Any],
    rest: ParamKey,
) -> FiniteSteps:
    """Collective over the world: build Muon for the weights of `chunks`, but Adam for the `rest`. `settings` are what
    both have in common, and `overrides` the weights that do not decay.
    """
    # Megatron refuses overrides of the optimizer, but for those that an entry of this table has.
    emerging_optimizers._EMERGING_OPTIMIZERS[NAME] = emerging_optimizers.EmergingOptimizerEntry(
        optimizer_cls=MuonByMatrix,
        config_to_kwargs=emerging_optimizers._muon_config_to_kwargs,
        default_param_overrides={rest: {"optimizer": "adam"}},
    )
    settings.optimizer = NAME
    # The other modes orthogonalize the part of a matrix that a rank has, or sum in an order that depends on the mesh.
    settings.muon_tp_mode = "duplicated"
    for name in set(type(config.muon).model_fields) - {"router"}:
        setattr(settings, f"muon_{name}", getattr(config.muon, name))
    optimizer = get_megatron_optimizer(settings, list(chunks), config_overrides=overrides)
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            # Megatron leaves queries, keys and values in one matrix, without a word, if it cannot take them apart.
            assert not name.endswith("linear_qkv.weight") or param.is_qkv or not param.requires_grad, name
    return FiniteSteps(optimizer.chained_optimizers)
