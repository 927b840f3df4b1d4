"""A layer's experts with stacked weights, which replace Megatron's SequentialMLP and TEGroupedMLP."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn

from mcore_rl.model.layers.expert_checkpoint import ExpertShards, sharded_experts
from mcore_rl.model.layers.experts_grouped import HAS_GROUPED_MM, Linear, grouped_experts
from mcore_rl.model.layers.experts_sorted import routed_experts


class StackedLinear(nn.Module):
    """A weight of every expert, `[e, O, I]`, and optionally its bias, `[e, O]`.

    Read the parameters by calling the module: Megatron waits for gathered parameters before the forward pass of the
    module that owns them. Reading an attribute from elsewhere could train on the previous step's values.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self) -> Linear:
        """Return weight and bias."""
        return Linear(self.weight, self.bias)


class GroupedExperts(MegatronModule):
    """This rank's experts, which compute gate * fc2(activation(fc1(x))) of each row by grouped matrix products.

    They are called, saved and initialized like Megatron's own. With expert tensor parallelism each rank has a part of
    the inner width, and the token dispatcher sums the outputs.
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
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        width, inner = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        self.linear_fc1 = self._weight(2 * inner, width, split_axis=1)
        self.linear_fc2 = self._weight(width, inner, split_axis=2)

    @property
    def skips_dropped(self) -> bool:
        """Whether `routed` computes only the routed rows; else each token has top-k rows, dropped or not."""
        return False

    @property
    def is_queued(self) -> bool:
        """Whether `routed` queues its work on a GPU without reading numbers on the host.

        torch has a single kernel for all experts in bf16 on Hopper and Blackwell; elsewhere it multiplies expert by
        expert, with sizes read on the host.
        """
        weight = self.linear_fc1.weight
        if not HAS_GROUPED_MM or not weight.is_cuda or weight.dtype != torch.bfloat16:
            return False
        return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def forward(self, sorted_ND: Tensor, tokens_per_expert: Tensor, gates_N: Tensor) -> tuple[Tensor, None]:
        """Return the output `[N, D]` of rows sorted by expert, and no bias."""
        return self._sorted(sorted_ND, gates_N, tokens_per_expert), None

    def _sorted(self, sorted_ND: Tensor, gates_N: Tensor, tokens_per_expert: Tensor) -> Tensor:
        fc1, fc2 = self.linear_fc1(), self.linear_fc2()
        return grouped_experts(sorted_ND, gates_N, fc1, fc2, tokens_per_expert, self.config)

    def routed(self, input_TD: Tensor, probs_TE: Tensor, routed_TE: Tensor) -> Tensor:
        """Return every token's sum over its experts, `[T, D]`, on a rank that has all experts unsplit."""
        fc1, fc2 = self.linear_fc1(), self.linear_fc2()

        def compute(rows_ND: Tensor, gates_N: Tensor, counts_E: Tensor) -> Tensor:
            return grouped_experts(rows_ND, gates_N, fc1, fc2, counts_E, self.config)

        return routed_experts(input_TD, probs_TE, routed_TE, self.config.moe_router_topk, compute)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass, not later."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the same tensors as Megatron's own experts, expert by expert."""
        shards = ExpertShards(
            num_local=self.num_local_experts,
            ep_group=self.ep_group,
            tp_group=self.tp_group,
            dp_group=self.dp_group,
            is_singleton=(metadata or {}).get("singleton_local_shards", False),
        )
        return sharded_experts(dict(self.named_parameters()), shards, prefix, tuple(sharded_offsets))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints of TransformerEngine's experts have extra states; stacked experts have none.
        for name in [key for key in state_dict if key.startswith(prefix) and "_extra_state" in key]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _weight(self, num_out: int, num_in: int, split_axis: int) -> StackedLinear:
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
        owner = StackedLinear(
            stacked, stacked.new_zeros(stacked.shape[:2]) if config.add_bias_linear else None
        )
        for param in owner.parameters():
            # Makes Megatron sum the gradients over the expert-data-parallel ranks, on every mesh.
            param.allreduce = False  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(param, True, split_axis if param.dim() == 3 else 1, 1)
        return owner
