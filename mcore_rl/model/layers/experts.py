"""A layer's experts with stacked weights, which replace Megatron's SequentialMLP and TEGroupedMLP."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import pad


class SortedRoutes(NamedTuple):
    """K rows of every token, sorted by expert, then by token; all tensors are on the device."""

    experts_TK: Tensor
    """Experts of each token, ascending."""
    order_N: Tensor
    """Index in `experts_TK` (flat) of each of the T * K rows."""
    row_TK: Tensor
    """Row of each index in `experts_TK`: the inverse of `order_N`."""
    counts_E: Tensor


def sort_routes(probs_TE: Tensor, routed_TE: Tensor, top_k: int) -> SortedRoutes:
    """Return the rows for a router's choice of `top_k` experts per token, `routed_TE`, with gates `probs_TE`. A token
    with fewer, as damaged routes can have, gets more with a gate of zero: the host would have to read the number of
    rows.
    """
    num_tokens, num_experts = routed_TE.shape
    gates_TE = probs_TE.detach().float().masked_fill(~routed_TE, -1.0)
    experts_TK = gates_TE.topk(top_k).indices.sort(1).values
    flat_N = experts_TK.flatten()
    order_N = flat_N.argsort(stable=True)
    rows_N = torch.arange(len(order_N), device=order_N.device)
    row_TK = torch.empty_like(order_N).scatter_(0, order_N, rows_N).view(num_tokens, top_k)
    experts_E = torch.arange(num_experts, device=order_N.device)
    # torch.bincount would read the largest expert on the host.
    ends_E = torch.searchsorted(flat_N[order_N], experts_E, right=True)
    return SortedRoutes(experts_TK, order_N, row_TK, ends_E.diff(prepend=ends_E.new_zeros(1)))


def routed_experts(
    input_TD: Tensor,
    probs_TE: Tensor,
    routed_TE: Tensor,
    top_k: int,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return every token's sum over its experts, `[T, D]`. `compute` maps rows `[N, D]` sorted by expert, their gates
    `[N]` and the rows per expert `[E]` to the experts' output times the gates, `[N, D]`.
    """
    routes = sort_routes(probs_TE, routed_TE, top_k)
    rows_ND: Tensor = _Spread.apply(input_TD, routes.order_N, routes.row_TK)  # type: ignore[no-untyped-call]
    gates_NK: Tensor = probs_TE.gather(1, routes.experts_TK).view(-1, 1)
    gates_N1: Tensor = _Spread.apply(gates_NK, routes.order_N, routes.row_TK.view(-1, 1))  # type: ignore[no-untyped-call]
    output_ND = compute(rows_ND, gates_N1[:, 0], routes.counts_E)
    summed_TD: Tensor = _Summed.apply(output_ND, routes.order_N, routes.row_TK)  # type: ignore[no-untyped-call]
    return summed_TD


class _Spread(torch.autograd.Function):
    """K rows of each token, by expert; the gradient is deterministic, as it reads rows instead of adding to them."""

    @staticmethod
    def forward(ctx: Any, input_TD: Tensor, order_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return input_TD.index_select(0, order_N // row_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sum_of_rows(grad_ND, row_TK), None, None


class _Summed(torch.autograd.Function):
    """The inverse direction: each token's sum over its rows."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = row_TK.shape[1]
        return _sum_of_rows(rows_ND, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return grad_TD.index_select(0, order_N // ctx.top_k), None, None


def _sum_of_rows(rows_ND: Tensor, row_TK: Tensor) -> Tensor:
    rows_TKD = rows_ND.index_select(0, row_TK.flatten()).view(*row_TK.shape, -1)
    return rows_TKD.sum(1)


class LowRank(NamedTuple):
    """The low-rank adapter of a linear layer of all experts, which adds scale * B A to each weight."""

    a_ERI: Tensor
    """A of each expert: a single block of rows, or a block for each projection, concatenated."""
    b_EOr: Tensor
    """B of each expert; r is the rank of a single block."""
    scale: float


class Linear(NamedTuple):
    """A linear layer of all experts."""

    weight_EOI: Tensor
    bias_EO: Tensor | None
    adapter: LowRank | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that may get a gradient."""
        yield self.weight_EOI
        if self.bias_EO is not None:
            yield self.bias_EO
        if self.adapter is not None:
            yield from (self.adapter.a_ERI, self.adapter.b_EOr)


GROUPED_ALIGNMENT_BYTES = 16
"""grouped_mm needs row sizes that are multiples of this, in bytes."""
# Older versions of torch lack grouped_mm: a loop over the experts then computes the same.
HAS_GROUPED_MM = hasattr(torch.nn.functional, "grouped_mm")


def grouped_experts(
    rows_ND: Tensor, gates_N: Tensor, fc1: Linear, fc2: Linear, counts_E: Tensor, config: TransformerConfig
) -> Tensor:
    """Return gate * fc2(activation(fc1(x))) of rows `[N, D]` sorted by expert; fc1 has gates above up rows."""
    if not len(rows_ND):
        # Gates and weights need a gradient even without any row: ranks exchange the gates' gradients in the backward
        # pass and would wait for this rank, and overlapped reduction waits for every parameter.
        used = (gates_N, *fc1.tensors(), *fc2.tensors())
        return rows_ND + 0.0 * sum(tensor.sum() for tensor in used)
    activate = partial(_activate, config=config)
    hidden_NF, gates_N1 = _adapted(rows_ND, fc1, counts_E), gates_N[:, None]
    if fc1.bias_EO is not None:
        hidden_NF = hidden_NF + _of_each_row(fc1.bias_EO, counts_E, len(rows_ND))
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        checkpoint = CheckpointWithoutOutput(fp8=None)
        active_NF = checkpoint.checkpoint(activate, hidden_NF, gates_N1)
        output_ND = _adapted(active_NF, fc2, counts_E)
        # The activation is freed after fc2 has read it, and recomputed before fc2's backward pass.
        checkpoint.discard_output_and_register_recompute(output_ND)
    else:
        output_ND = _adapted(activate(hidden_NF, gates_N1), fc2, counts_E)
    if fc2.bias_EO is not None:
        # The activations already include the gate, the biases do not.
        biases_ND = _of_each_row(fc2.bias_EO, counts_E, len(rows_ND)) * gates_N1
        output_ND = output_ND + biases_ND.to(output_ND.dtype)
    return output_ND


def _adapted(rows_NI: Tensor, layer: Linear, counts_E: Tensor) -> Tensor:
    """Return each row times the transposed weight of its expert, plus the adapter's part, if any."""
    output_NO = _products(rows_NI, layer.weight_EOI, counts_E)
    if layer.adapter is None:
        return output_NO
    a_ERI, b_EOr, scale = layer.adapter
    if missing := -b_EOr.shape[-1] % (GROUPED_ALIGNMENT_BYTES // b_EOr.element_size()):
        a_ERI = torch.cat([pad(block, (0, 0, 0, missing)) for block in a_ERI.split(b_EOr.shape[-1], 1)], 1)
        b_EOr = pad(b_EOr, (0, missing))
    lows = _products(rows_NI, a_ERI, counts_E).split(b_EOr.shape[-1], 1)
    parts = b_EOr.chunk(len(lows), 1)
    branches = [_products(low, part, counts_E) for low, part in zip(lows, parts, strict=True)]
    return torch.add(output_NO, torch.cat(branches, 1), alpha=scale)


def _of_each_row(bias_EO: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the bias of each row's expert, `[N, O]`."""
    return bias_EO.repeat_interleave(counts_E.to(bias_EO.device), 0, output_size=num_rows)


def _products(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    if HAS_GROUPED_MM:
        ends = counts_E.to(rows_NI.device).cumsum(0).to(torch.int32)
        product_NO = torch.nn.functional.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=ends)
        dense: Tensor = _DenseGradient.apply(product_NO)  # type: ignore[no-untyped-call]
        return dense
    parts = zip(rows_NI.split(counts_E.tolist()), weight_EOI.unbind(0), strict=True)
    return torch.cat([rows @ weight.t() for rows, weight in parts])


def _activate(hidden_NF: Tensor, gates_N1: Tensor, config: TransformerConfig) -> Tensor:
    gate, up = hidden_NF.chunk(2, -1)
    if (limit := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    active_NF: Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
    return (active_NF * gates_N1).to(hidden_NF.dtype)


class _DenseGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient, which the backward pass of grouped_mm requires."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


Offsets = tuple[tuple[int, int, int], ...]
"""Leading axes of a global tensor, as (axis, index, size), that select a layer or an expert."""
SPLIT_AXIS = {
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
    "linear_fc1.bias": 0,
    "linear_fc2.bias": 0,
    "linear_fc1.adapter.A": None,
    "linear_fc1.adapter.B": 0,
    "linear_fc2.adapter.A": 1,
    "linear_fc2.adapter.B": None,
}
"""Axis of an expert's parameter that expert tensor parallelism splits; None if it is replicated. Experts with biases
are not split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShards:
    """The part of a layer's experts that this rank holds."""

    num_local: int
    ep_group: ProcessGroup
    tp_group: ProcessGroup
    dp_group: ProcessGroup
    is_singleton: bool
    """Whether each expert is a tensor of its own, such as `experts.7.linear_fc1`, not a slice along an expert axis."""

    def prefix_and_offsets(self, expert: int, outer: Offsets) -> tuple[str, Offsets]:
        """Return the prefix of the weight's name, and its offsets, for local expert `expert`."""
        global_index = self.ep_group.rank() * self.num_local + expert
        if self.is_singleton:
            return f"experts.{global_index}.", outer
        return "experts.", (*outer, (len(outer), global_index, self.ep_group.size() * self.num_local))


def sharded_experts(weights: Mapping[str, Tensor], shards: ExpertShards, prefix: str, outer: Offsets) -> dict[str, Any]:
    """Return a factory of a sharded tensor per expert for each `[e, ...]`, and Megatron's empty extra states."""
    tp_rank, dp_rank = shards.tp_group.rank(), shards.dp_group.rank()
    state: dict[str, Any] = {}
    for name, weight in weights.items():
        is_split = SPLIT_AXIS[name] is not None
        halves = 2 if is_split and "linear_fc1" in name else 1
        stack = _Stack(shards=shards, name=name, outer=outer, halves=halves)
        state[f"{prefix}{name}"] = ShardedTensorFactory(
            f"{prefix}{stack.suffix}", weight, stack.build, stack.merge, (0, 0 if is_split else tp_rank, dp_rank)
        )
    for layer in dict.fromkeys(name.partition(".")[0] for name in weights):
        for expert in range(shards.num_local):
            before, offsets = shards.prefix_and_offsets(expert, outer)
            shape = tuple(count for _, _, count in offsets) or (1,)
            place = tuple(index for _, index, _ in offsets) or (0,)
            state[f"{prefix}{layer}._extra_state{expert}"] = ShardedObject(
                f"{prefix}{before}{layer}._extra_state", None, shape, place, replica_id=(0, tp_rank, dp_rank)
            )
    return state


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Splits a stacked parameter, or its optimizer state, into sharded tensors, and joins them again."""

    shards: ExpertShards
    name: str
    outer: Offsets
    halves: int
    """2 for fc1: gate and up-projection are saved separately, for the same global tensor at every ETP size."""

    @property
    def suffix(self) -> str:
        return f"experts.{self.name}"

    def build(self, key: str, stacked: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        """Return the sharded tensors of `stacked` under `key`, which includes the prefixes of layers and optimizer."""
        assert flattened_range is None, "optimizer state is saved in whole tensors"
        tp_rank, tp_size = self.shards.tp_group.rank(), self.shards.tp_group.size()
        lead = key.removesuffix(self.suffix)
        parts = []
        for expert, weight in enumerate(stacked):
            before, offsets = self.shards.prefix_and_offsets(expert, self.outer)
            axis = SPLIT_AXIS[self.name]
            for half, part in enumerate(weight.chunk(self.halves)):
                expert_key = f"{lead}{before}{self.name}"
                split: Offsets = ()
                if self.shards.is_singleton and self.halves == 2:
                    assert axis is not None
                    expert_key += ("_w", "_v")[half]
                    split = ((len(offsets) + axis, tp_rank, tp_size),)
                elif axis is not None:
                    split = ((len(offsets) + axis, tp_rank + half * tp_size, self.halves * tp_size),)
                parts.append(
                    ShardedTensor.from_rank_offsets(
                        expert_key, part, *offsets, *split, replica_id=replica_id, prepend_axis_num=len(offsets)
                    )
                )
        return parts

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Join the parts that `build` returned into the stacked tensor."""
        with torch.no_grad():
            experts = [torch.cat(parts[i : i + self.halves]) for i in range(0, len(parts), self.halves)]
            return torch.stack(experts)


class StackedLinear(nn.Module):
    """A weight of every expert, `[e, O, I]`, and optionally its bias, `[e, O]`. Read them by calling the module:
    Megatron waits for gathered parameters before its forward pass, and other reads might see the previous step's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self) -> Linear:
        """Return weight and bias."""
        return Linear(self.weight, self.bias)


class GroupedExperts(MegatronModule):
    """This rank's experts: gate * fc2(activation(fc1(x))) by grouped matrix products; saved and initialized like
    Megatron's. With expert tensor parallelism a rank has a part of the inner width, and the dispatcher sums.
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
        """Whether no number is read on the host: torch has one kernel for bf16 on Hopper and Blackwell only."""
        weight = self.linear_fc1.weight
        if not HAS_GROUPED_MM or not weight.is_cuda or weight.dtype != torch.bfloat16:
            return False
        return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def forward(self, sorted_ND: Tensor, tokens_per_expert: Tensor, gates_N: Tensor) -> tuple[Tensor, None]:
        """Return the output `[N, D]` of rows sorted by expert, and no bias."""
        fc1, fc2 = self.linear_fc1(), self.linear_fc2()
        return grouped_experts(sorted_ND, gates_N, fc1, fc2, tokens_per_expert, self.config), None

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
        stacked = torch.empty(self.num_local_experts, num_out, num_in, dtype=config.params_dtype, device=device)
        if config.perform_initialization:
            init = config.init_method if split_axis == 1 else config.output_layer_init_method
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for weight in stacked:
                    init(weight)
        owner = StackedLinear(stacked, stacked.new_zeros(stacked.shape[:2]) if config.add_bias_linear else None)
        for param in owner.parameters():
            # Makes Megatron sum the gradients over the expert-data-parallel ranks, on every mesh.
            param.allreduce = False  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(param, True, split_axis if param.dim() == 3 else 1, 1)
        return owner
