"""The experts of a layer with their weights stacked, in the place of Megatron's SequentialMLP and TEGroupedMLP."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn

from mcore_rl.errors import ConfigError
from mcore_rl.model.layers.expert_blocks import assign_routed, assign_sorted, swiglu_experts
from mcore_rl.model.layers.expert_checkpoint import ExpertShards, sharded_experts


class StackedWeight(nn.Module):
    """One weight of every expert, `[e, O, I]`.

    The weight is read through a call: Megatron waits for a gathered parameter before the forward of the module
    that owns it, so that reading the attribute from elsewhere would train on the values of the last step.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """The weight."""
        return self.weight


class GroupedExperts(MegatronModule):
    """This rank's experts: gate * fc2(activation(fc1(x))) for each row, by grouped matrix products.

    Called, saved and initialized like Megatron's own experts; with expert tensor parallelism each rank holds a
    part of the inner width, and the token dispatcher sums the outputs.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert submodules is None and pg_collection is not None
        _refuse_unsupported(config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        width, inner = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        if config.moe_latent_size:
            width = config.moe_latent_size
        self.linear_fc1 = self._weight(inner * (2 if config.gated_linear_unit else 1), width, split_axis=1)
        self.linear_fc2 = self._weight(width, inner, split_axis=2)
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    @property
    def is_blockwise(self) -> bool:
        """Whether the experts run block by block on a CPU, which is for SwiGLU as it is everywhere today."""
        config = self.config
        return (
            self.linear_fc1.weight.device.type == "cpu"
            and config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0.0
        )

    def forward(self, sorted_ND: Tensor, tokens_per_expert: Tensor, gates_N: Tensor) -> tuple[Tensor, None]:
        """`[N, D]` of rows sorted by expert, and no bias."""
        if self.config.moe_apply_probs_on_input:
            sorted_ND = (sorted_ND * gates_N[:, None]).to(sorted_ND.dtype)
            gates_N = torch.ones_like(gates_N)
        fc1, fc2 = self.linear_fc1(), self.linear_fc2()
        if self.is_blockwise:
            assignment = assign_sorted(tokens_per_expert.tolist())
            return swiglu_experts(sorted_ND, gates_N, fc1, fc2, assignment), None
        ends = tokens_per_expert.to(device=sorted_ND.device).cumsum(0).to(torch.int32)
        return self._grouped(sorted_ND, gates_N[:, None], (fc1, fc2), ends), None

    def routed(self, input_TD: Tensor, probs_TE: Tensor, routed_TE: Tensor) -> Tensor:
        """`[T, D]`: every token's sum over its experts, all of which this rank holds whole."""
        assignment = assign_routed(routed_TE)
        return swiglu_experts(input_TD, probs_TE, self.linear_fc1(), self.linear_fc2(), assignment)

    def _grouped(
        self, rows_ND: Tensor, gates_N1: Tensor, weights: tuple[Tensor, Tensor], ends: Tensor
    ) -> Tensor:
        fc1, fc2 = weights
        if not len(rows_ND):
            # Without a row the weights must still get a gradient: overlapped reduction waits for every parameter.
            return rows_ND @ fc1[0].t()[:, : fc2.shape[2]] @ fc2[0].t() + 0.0 * (fc1.sum() + fc2.sum())
        hidden_NF = F.grouped_mm(rows_ND, fc1.transpose(1, 2), offs=ends)
        if self.recomputes_activation:
            checkpoint = CheckpointWithoutOutput(fp8=None)
            active_NF = checkpoint.checkpoint(self._activate, hidden_NF, gates_N1)
            output_ND = F.grouped_mm(active_NF, fc2.transpose(1, 2), offs=ends)
            checkpoint.discard_output_and_register_recompute(output_ND)
        else:
            output_ND = F.grouped_mm(self._activate(hidden_NF, gates_N1), fc2.transpose(1, 2), offs=ends)
        return _DenseGradient.apply(output_ND)

    def _activate(self, hidden_NF: Tensor, gates_N1: Tensor) -> Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return (config.activation_func(hidden_NF) * gates_N1).to(hidden_NF.dtype)
        gate, up = hidden_NF.chunk(2, -1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        active = config.activation_func(gate) * (up + config.glu_linear_offset)
        return (active * gates_N1).to(hidden_NF.dtype)

    def backward_dw(self) -> None:
        """Weight gradients are not put off: nothing to do."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same tensors, expert by expert, as Megatron's own experts save."""
        shards = ExpertShards(
            num_local=self.num_local_experts,
            ep_group=self.ep_group,
            tp_group=self.tp_group,
            dp_group=self.dp_group,
            is_singleton=(metadata or {}).get("singleton_local_shards", False),
        )
        is_gated = self.config.gated_linear_unit
        weights = {"linear_fc1": self.linear_fc1.weight, "linear_fc2": self.linear_fc2.weight}
        return sharded_experts(weights, shards, prefix, tuple(sharded_offsets), is_gated)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [key for key in state_dict if key.startswith(prefix) and "_extra_state" in key]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _weight(self, num_out: int, num_in: int, split_axis: int) -> StackedWeight:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        stacked = torch.empty(
            self.num_local_experts, num_out, num_in, dtype=config.params_dtype, device=device
        )
        if config.perform_initialization:
            init = config.init_method if split_axis == 1 else config.output_layer_init_method
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for weight in stacked:
                    init(weight)
        owner = StackedWeight(stacked)
        set_tensor_model_parallel_attributes(owner.weight, True, split_axis, 1)
        # Expert gradients are summed over the expert-data-parallel ranks, on every mesh.
        owner.weight.allreduce = False  # type: ignore[attr-defined]
        return owner


class _DenseGradient(torch.autograd.Function):
    """The identity; its gradient is laid out densely, which the backward of grouped_mm requires."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _refuse_unsupported(config: TransformerConfig) -> None:
    refused = {
        "add_bias_linear": config.add_bias_linear,
        "fp8": bool(config.fp8),
        "fp4": bool(getattr(config, "fp4", None)),
        "moe_apply_probs_on_input with moe_router_topk > 1": config.moe_apply_probs_on_input
        and config.moe_router_topk > 1,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"experts without TransformerEngine do not have {setting}. Switch it off, or use "
                'platform.layers="te".'
            )
