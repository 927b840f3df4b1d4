"""A gated delta net, which replaces a layer's self-attention (arXiv 2412.06464)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from mcore_rl.megatron.kernels import delta_kernel, gated_delta_by
from mcore_rl.megatron.mesh import layer_groups
from mcore_rl.megatron.platform import to_device
from mcore_rl.model.layers.attention import PackedParams, gathered_order
from mcore_rl.model.layers.cache import NO_TOKENS, StepTokens

CHUNK = 64
"""Largest number of positions in a chunk."""
UNIT_EPSILON = 1e-6
"""Epsilon under the square root when queries and keys are normalized, as in the published models."""


class ChunkGrid(NamedTuple):
    """Where a packed row's tokens are in a grid of chunks `[N, C]`, ordered by depth, then by descending length."""

    lengths: tuple[int, ...]
    """Number of tokens of each of the R sequences."""
    chunk: int
    """Positions per chunk, C."""
    num_chunks: int
    """Number of chunks, N."""
    active: tuple[int, ...]
    """Number of sequences with a chunk at each depth."""
    cells_T: Tensor
    """Index of each token in the flattened grid."""
    order_R: Tensor
    """Indices of the sequences, by descending number of chunks."""
    rows_T: Tensor
    """Index of each token's sequence."""
    bounds_R1: Tensor
    """Index of each sequence's first token, then the number of tokens."""

    def scatter(self, tokens: Tensor) -> Tensor:
        """Arrange `[T, H, ...]` as `[N, H, C, ...]`; cells without a token are zero, which does not change states."""
        cells = tokens.new_zeros(self.num_chunks * self.chunk, *tokens.shape[1:])
        filled = cells.index_copy(0, self.cells_T, tokens)
        return filled.view(-1, self.chunk, *tokens.shape[1:]).transpose(1, 2)

    def gather(self, cells: Tensor) -> Tensor:
        """Arrange `[N, H, C, D]` as `[T, H, D]`; the inverse of `scatter`."""
        return cells.transpose(1, 2).flatten(0, 1).index_select(0, self.cells_T)


@lru_cache(8)
def chunk_grid(lengths: tuple[int, ...], device: torch.device) -> ChunkGrid:
    """Return the grid for sequences of these lengths; it is cached, as all layers of a pass share it."""
    chunk = min(CHUNK, max(lengths))
    lengths_R = torch.tensor(lengths)
    counts_R = (lengths_R + chunk - 1) // chunk
    order_R = counts_R.argsort(descending=True, stable=True)
    active = tuple(int((counts_R > depth).sum()) for depth in range(int(counts_R.max())))
    first_of_depth = torch.tensor((0, *active)).cumsum(0)
    rank_R = torch.empty_like(order_R)
    rank_R[order_R] = torch.arange(len(lengths))
    rows_T = torch.arange(len(lengths)).repeat_interleave(lengths_R)
    places_T = torch.arange(len(rows_T)) - (lengths_R.cumsum(0) - lengths_R)[rows_T]
    cells_T = (first_of_depth[places_T // chunk] + rank_R[rows_T]) * chunk + places_T % chunk
    return ChunkGrid(
        lengths=lengths,
        chunk=chunk,
        num_chunks=int(first_of_depth[-1]),
        active=active,
        cells_T=to_device(cells_T, device),
        order_R=to_device(order_R, device),
        rows_T=to_device(rows_T, device),
        bounds_R1=to_device(torch.tensor((0, *lengths)).cumsum(0), device),
    )


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    grid: ChunkGrid,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[T, H, V]` in the values' dtype, and the states `[R, H, K, V]` after the last tokens, fp32.

    Args:
        query: `[T, G, K]`, not normalized; H is a multiple of G.
        key: `[T, G, K]`, not normalized.
        value: `[T, H, V]`.
        decay_TH: Logarithm of the decay, at most 0.
        beta_TH: Written share of the value, between 0 and 1.
        grid: The sequences.
        states: State of each sequence before its first token `[R, H, K, V]`; None for zeros.
    """
    dtype, repeat = value.dtype, value.shape[1] // key.shape[1]
    query, key = (unit(heads.float()).repeat_interleave(repeat, 1) for heads in (query, key))
    query = query * query.shape[-1] ** -0.5
    operands = query, key, value.float(), decay_TH.float(), beta_TH.float()
    query, key, value, decay, beta = map(grid.scatter, operands)
    total = decay.cumsum(-1)  # since the chunk's beginning
    seen_CC = torch.ones(grid.chunk, grid.chunk, dtype=torch.bool, device=query.device).tril()
    # Mask before exp: differences above the diagonal are positive and may overflow, and the gradient of inf * 0 is NaN.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen_CC, -torch.inf).exp()
    written_keys = beta[..., None] * key
    system = (written_keys @ key.mT) * between
    # Solve for two right-hand sides at once: writes into an empty state, and reads from the state before the chunk.
    sides = torch.cat([beta[..., None] * value, written_keys * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    wrote, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside, query = (query @ key.mT) * between, query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    if states is None:
        states = value.new_zeros(len(grid.lengths), value.shape[1], key.shape[-1], value.shape[-1])
    state, outputs, ended, begin = states.float().index_select(0, grid.order_R), [], [], 0
    for count in grid.active:
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        at = slice(begin, begin + count)
        new = wrote[at] - read[at] @ state
        outputs.append(query[at] @ state + inside[at] @ new)
        state = left[at] * state + key[at].mT @ new
        begin += count
    after = torch.cat([state, *reversed(ended)])
    after = after.index_select(0, grid.order_R.argsort())
    return grid.gather(torch.cat(outputs)).to(dtype), after


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay_BH: Tensor, beta_BH: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, H, V]` of one token for each of B states `[B, H, K, V]`, fp32, and the states after it.

    Tokens are described as in `gated_delta`.
    """
    repeat = value.shape[1] // key.shape[1]
    query, key = (unit(heads.float()).repeat_interleave(repeat, 1) for heads in (query, key))
    states = decay_BH.float().exp()[..., None, None] * states
    new = beta_BH.float()[..., None] * (value.float() - (key[..., None, :] @ states)[..., 0, :])
    states = states + key[..., None] * new[..., None, :]
    # Scaled although of unit length: so are those of transformers' torch_recurrent_gated_delta_rule.
    query = query * query.shape[-1] ** -0.5
    return (query[..., None, :] @ states)[..., 0, :].to(value.dtype), states


def unit(heads: Tensor) -> Tensor:
    """Normalize heads to unit length, with an epsilon under the square root."""
    return heads * (heads.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()


def causal_conv(
    inputs_TC: Tensor, weight_CW: Tensor, grid: ChunkGrid, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu of a depthwise causal convolution `[T, C]` of each sequence, and its last inputs `[R, W - 1, C]`.

    Args:
        inputs_TC: The packed sequences.
        weight_CW: The taps of each channel; the last tap applies to the current token.
        grid: The sequences.
        before: Inputs before the first token of each sequence `[R, W - 1, C]`; None for zeros.
    """
    (num_tokens, channels), back = inputs_TC.shape, weight_CW.shape[1] - 1
    # Put W - 1 rows before each sequence.
    places_T = torch.arange(num_tokens, device=inputs_TC.device) + back * (grid.rows_T + 1)
    wide = inputs_TC.new_zeros(num_tokens + back * len(grid.lengths), channels).index_copy(0, places_T, inputs_TC)
    ends_R = grid.bounds_R1[1:] + back * torch.arange(1, len(grid.lengths) + 1, device=wide.device)
    last_RW = ends_R[:, None] + torch.arange(-back, 0, device=wide.device)
    if before is not None:
        wide = wide.index_copy(0, (last_RW - grid.bounds_R1.diff()[:, None]).flatten(), before.flatten(0, 1))
    length = num_tokens + back * (len(grid.lengths) - 1)
    total = wide[back : back + length] * weight_CW[:, back]
    for tap in range(back):
        total = total + wide[tap : tap + length] * weight_CW[:, tap]
    return silu(total.index_select(0, places_T - back)), wide[last_RW]


def causal_conv_step(inputs_BC: Tensor, weight_CW: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return `causal_conv` for one token of each of B sequences, given their last inputs `[B, W - 1, C]`."""
    window = torch.cat([before, inputs_BC[:, None]], 1)
    return silu((window * weight_CW.T).sum(1)), window[:, 1:]


PARTS = ("query", "key", "value", "z", "beta", "alpha")
"""Parts of the input projection, in the order of its rows on each rank; checkpoints have a tensor for each part."""
NUM_CONVOLVED = 3
"""Number of leading parts that pass through the convolution."""


@dataclass(frozen=True, slots=True)
class DeltaSubmodules:
    """The classes of a gated delta net's linear layers."""

    in_proj: type
    out_proj: type


@dataclass(slots=True)
class DeltaCache:
    """The cache of a gated delta net; its size does not depend on the length of completions."""

    inputs: Tensor
    """Last inputs of the convolution, `[slots, W - 1, C]`."""
    states: Tensor
    """`[slots, H, K, V]`, fp32."""
    step: StepTokens = NO_TOKENS
    """Tokens that the layer is computing."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy slot `source` to the slots `targets`. `length` must be all of its positions: states cannot rewind."""
        self.inputs[targets] = self.inputs[source]
        self.states[targets] = self.states[source]


class NamedWeight(nn.Module):
    """A weight that is in checkpoints under the name of a module."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class HeadWeights(NamedTuple):
    """The weights between the projections, for the heads that a rank computes."""

    conv_CW: Tensor
    decay_H: Tensor
    """Logarithm of the decay rate (`A_log`)."""
    decay_bias_H: Tensor
    norm_V: Tensor


class GatedDeltaNet(MegatronModule):
    """Projection, convolution, gated delta rule, gated norm, projection.

    Tensor parallelism splits the key heads, each with its value heads. With context parallelism a rank exchanges its
    positions of all its heads for all positions of a share of the heads, and back. Checkpoint keys are the same as for
    Megatron's own layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        groups = layer_groups("tp", "cp") if pg_collection is None else pg_collection
        self.tp_group, self.cp_group, self.layer_number = groups.tp, groups.cp, layer_number
        self.cache: DeltaCache | None = None
        """Cache of earlier positions, set only while generating."""
        tp = self.tp_group.size()
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        query, value = (config.linear_num_key_heads // tp * key_dim, config.linear_num_value_heads // tp * value_dim)
        self.num_heads = config.linear_num_value_heads // tp
        self.sizes = (query, query, value, value, self.num_heads, self.num_heads)
        """Rows of `PARTS` on this rank."""
        self.widths = (key_dim, key_dim, value_dim)
        """Head widths of the convolved parts."""
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.sizes) * tp,
            gather_output=False,
            init_method=config.init_method,
            skip_bias_add=False,
            **linear,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            value * tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        channels = sum(self.sizes[:NUM_CONVOLVED])
        self.conv1d = NamedWeight(torch.empty(channels, 1, config.linear_conv_kernel_dim, **made))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, **made))
        self.dt_bias = nn.Parameter(torch.ones(self.num_heads, **made))
        self.out_norm = NamedWeight(torch.ones(value_dim, **made))
        for weight in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
        if config.perform_initialization:
            with torch.no_grad(), tensor_parallel.get_cuda_rng_tracker().fork():
                # As torch initializes a depthwise convolution, and with the published models' decay rates.
                bound = config.linear_conv_kernel_dim**-0.5
                self.conv1d.weight.uniform_(-bound, bound)
                self.A_log.uniform_(0.01, 16.0).log_()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output `[s, B, D]`, and no bias; the layer is causal.

        Args:
            hidden_states: Hidden states `[s, B, D]` of this rank's positions.
            attention_mask: None or a causal mask.
            packed_seq_params: Sequences of a packed row.
            **_: Megatron's other arguments of attention.
        """
        projected, _bias = self.in_proj(hidden_states)
        if self.cache is not None:
            return self._projected(self._cached(projected[:, 0], self.cache)[:, None])
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        length, num_rows = projected.shape[0] * ranks, projected.shape[1]
        of_row: tuple[int, ...] = (length,)
        if packed_seq_params is not None:
            of_row = packed_seq_params.lengths
        if ranks > 1:
            forth, back = zigzag(of_row, ranks, projected.device)
            projected = self._exchanged(projected, forth)
        tokens_TP = projected.transpose(0, 1).flatten(0, 1)  # rows are concatenated
        outputs = partial(self._outputs, grid=chunk_grid(of_row * num_rows, tokens_TP.device))
        operands = tokens_TP, *self._weights(rank, ranks)
        # Without recomputation the rule would keep fifty times the size of its inputs for the backward pass.
        mixed_TU = (
            tensor_parallel.checkpoint(outputs, False, *operands) if torch.is_grad_enabled() else outputs(*operands)
        )
        mixed = mixed_TU.unflatten(0, (num_rows, length)).transpose(0, 1)
        if ranks > 1:
            mixed = self._returned(mixed, back)
        return self._projected(mixed)

    def _projected(self, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        output: Tensor
        output, bias = self.out_proj(mixed)
        return output, bias

    def new_cache(self, num_slots: int) -> DeltaCache:
        """Return an empty cache."""
        weight = self.conv1d.weight
        inputs = weight.new_zeros(num_slots, weight.shape[-1] - 1, weight.shape[0])
        shape = num_slots, self.num_heads, self.widths[0], self.widths[2]
        return DeltaCache(inputs, inputs.new_zeros(shape, dtype=torch.float32))

    def _weights(self, rank: int = 0, ranks: int = 1) -> HeadWeights:
        """Return the weights of the heads that context-parallel rank `rank` of `ranks` computes.

        The remaining heads get no gradient on that rank; the reduction over all context- and data-parallel ranks sums
        the parts.
        """
        conv_CW: Tensor = self.conv1d.weight[:, 0]
        decay_H: Tensor = self.A_log
        bias_H: Tensor = self.dt_bias
        if ranks > 1:
            parts = conv_CW.split(self.sizes[:NUM_CONVOLVED])
            conv_CW = torch.cat([part.chunk(ranks)[rank] for part in parts])
            decay_H, bias_H = decay_H.chunk(ranks)[rank], bias_H.chunk(ranks)[rank]
        # The norm is replicated, and each tensor-parallel rank only sees its own heads: sum its gradients here, because
        # Megatron sums gradients of marked weights only under sequence parallelism.
        norm_V = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        return HeadWeights(conv_CW, decay_H, bias_H, norm_V)

    def _outputs(self, tokens_TP: Tensor, *weights: Tensor, grid: ChunkGrid) -> Tensor:
        """Return the gated outputs `[T, U]` of packed sequences of projected tokens."""
        heads = HeadWeights(*weights)
        convolved, z, beta, alpha = self._split(tokens_TP)
        mixed_TC, _ = causal_conv(convolved, heads.conv_CW, grid)
        mixed, _ = self._rule(mixed_TC, beta, alpha, heads, grid, None)
        return self._gated(mixed, z, heads.norm_V)

    def _split(self, tokens_TP: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the convolved parts (concatenated), z, beta and alpha, for all heads or a rank's share of them."""
        sizes = [size * tokens_TP.shape[-1] // sum(self.sizes) for size in self.sizes]
        convolved, z, beta, alpha = tokens_TP.split([sum(sizes[:NUM_CONVOLVED]), *sizes[NUM_CONVOLVED:]], -1)
        return convolved, z, beta, alpha

    def _heads(self, mixed_TC: Tensor) -> list[Tensor]:
        """Return queries, keys and values `[T, heads, width]`."""
        share = [size * mixed_TC.shape[-1] // sum(self.sizes[:NUM_CONVOLVED]) for size in self.sizes[:NUM_CONVOLVED]]
        parts = zip(mixed_TC.split(share, -1), self.widths, strict=True)
        return [part.unflatten(-1, (-1, width)) for part, width in parts]

    def _rule(
        self, mixed_TC: Tensor, beta: Tensor, alpha: Tensor, heads: HeadWeights, grid: ChunkGrid, states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value = self._heads(mixed_TC)
        decay_TH, beta_TH = gates(alpha, beta, heads)
        kernel = delta_kernel(value, deterministic=self.config.deterministic_mode)
        if kernel is not None:
            return gated_delta_by(kernel, query, key, value, decay_TH, beta_TH, grid.bounds_R1, states)
        return gated_delta(query, key, value, decay_TH, beta_TH, grid, states)

    def _gated(self, mixed: Tensor, z: Tensor, norm_V: Tensor) -> Tensor:
        """Return the normalized heads times their gates, concatenated; this norm's weight is never zero-centered."""
        wide = mixed.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon).rsqrt()
        gated = norm_V * wide.to(mixed.dtype) * silu(z.unflatten(-1, (-1, self.widths[2])).float())
        flat: Tensor = gated.to(mixed.dtype).flatten(-2)
        return flat

    def _exchanged(self, projected: Tensor, order: Tensor) -> Tensor:
        """Collective over the context-parallel group: return all positions of this rank's share of the heads."""
        ranks = self.cp_group.size()
        parts = [part.unflatten(-1, (ranks, -1)) for part in projected.split(self.sizes, -1)]
        by_rank = torch.cat(parts, -1).permute(2, 0, 1, 3).contiguous()
        whole: Tensor = tensor_parallel.all_to_all(self.cp_group, by_rank)
        return whole.flatten(0, 1).index_select(0, order)

    def _returned(self, mixed: Tensor, order: Tensor) -> Tensor:
        """Collective over the context-parallel group: return this rank's positions of all heads."""
        parts = mixed.index_select(0, order).unflatten(0, (self.cp_group.size(), -1)).contiguous()
        own: Tensor = tensor_parallel.all_to_all(self.cp_group, parts)
        return own.permute(1, 2, 0, 3).flatten(2)

    def _cached(self, projected_TP: Tensor, cache: DeltaCache) -> Tensor:
        """Return the gated outputs `[T, U]` of a step's tokens, zeros for padding, and update the slots."""
        step, heads = cache.step, self._weights()
        mixed = projected_TP.new_zeros(len(projected_TP), self.sizes[NUM_CONVOLVED])
        if step.num_decode:
            mixed[: step.num_decode] = self._newest(projected_TP[: step.num_decode], cache, heads)
        if step.spans:
            begin, end = step.spans[0].begin, step.spans[-1].end
            mixed[begin:end] = self._prefills(projected_TP[begin:end], cache, heads)
        return mixed

    def _newest(self, projected_BP: Tensor, cache: DeltaCache, heads: HeadWeights) -> Tensor:
        """Return the output of each decoding slot's token, without a device synchronization."""
        count = len(projected_BP)
        slots_B, is_new_B = cache.step.slots_T[:count], cache.step.positions_T[:count] == 0
        # A slot's first token starts from zeros, not from an earlier completion's state.
        before = cache.inputs[slots_B].masked_fill(is_new_B[:, None, None], 0)
        states = cache.states[slots_B].masked_fill(is_new_B[:, None, None, None], 0)
        convolved, z, beta, alpha = self._split(projected_BP)
        mixed_BC, cache.inputs[slots_B] = causal_conv_step(convolved, heads.conv_CW, before)
        query, key, value = self._heads(mixed_BC)
        mixed, cache.states[slots_B] = gated_delta_step(query, key, value, *gates(alpha, beta, heads), states)
        return self._gated(mixed, z, heads.norm_V)

    def _prefills(self, projected_TP: Tensor, cache: DeltaCache, heads: HeadWeights) -> Tensor:
        """Return the outputs of the prefills, which are consecutive in the step."""
        spans, device = cache.step.spans, projected_TP.device
        lengths = tuple(span.end - span.begin for span in spans)
        slots_R = to_device(torch.tensor([span.slot for span in spans]), device)
        is_new = [span.stop == length for span, length in zip(spans, lengths, strict=True)]
        is_new_R = to_device(torch.tensor(is_new), device)
        before = cache.inputs[slots_R].masked_fill(is_new_R[:, None, None], 0)
        states = cache.states[slots_R].masked_fill(is_new_R[:, None, None, None], 0)
        grid = chunk_grid(lengths, device)
        convolved, z, beta, alpha = self._split(projected_TP)
        mixed_TC, cache.inputs[slots_R] = causal_conv(convolved, heads.conv_CW, grid, before)
        mixed, cache.states[slots_R] = self._rule(mixed_TC, beta, alpha, heads, grid, states)
        return self._gated(mixed, z, heads.norm_V)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass, not later."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as Megatron's own layer does, with a tensor for each part of the projection."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        linears = {"in_proj": self.in_proj, "out_proj": self.out_proj}
        own = {
            name: weight
            for name, weight in self.state_dict(prefix="", keep_vars=True).items()
            if name.partition(".")[0] not in linears
        }
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in linears.items():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        for key, count in (("in_proj.weight", len(PARTS)), ("conv1d.weight", NUM_CONVOLVED)):
            whole = sharded[prefix + key]
            sharded[prefix + key] = self._in_parts(whole, self.sizes[:count], tuple(sharded_offsets))
        return sharded

    def _in_parts(self, whole: ShardedTensor, sizes: Sequence[int], offsets: tuple[Any, ...]) -> ShardedTensorFactory:
        """Return a factory of this rank's parts: the optimizer identifies the parameter by its whole tensor."""

        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None, "optimizers save whole tensors"
            cut = len(offsets), self.tp_group.rank(), self.tp_group.size()
            return [
                ShardedTensor.from_rank_offsets(
                    f"{key}.{name}", part, *offsets, cut, replica_id=replica_id, prepend_axis_num=len(offsets)
                )
                for name, part in zip(PARTS, tensor.split(list(sizes)), strict=False)
            ]

        return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def gates(alpha: Tensor, beta: Tensor, heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the written share of the value, fp32 `[T, H]`."""
    rate_H = -heads.decay_H.float().exp()
    return rate_H * softplus(alpha.float() + heads.decay_bias_H.float()), beta.float().sigmoid()


@lru_cache(8)
def zigzag(lengths: tuple[int, ...], ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of each position of a row in the concatenated zig-zag parts of the context-parallel ranks, and
    the index in the row of each position of these; they are cached, as all layers of a pass share them.
    """
    order_T = gathered_order(lengths, ranks)
    return to_device(order_T, device), to_device(order_T.argsort(), device)
