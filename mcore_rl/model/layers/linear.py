"""Linear layers that are replicated on every tensor-parallel rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import layer_groups


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis, in fp32, rounded once (arXiv 1910.07467), built as Megatron's."""

    eps: float

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        # Under sequence parallelism a rank only sees its part: the mark makes Megatron sum the weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(RMSNorm):
    """`RMSNorm` by one plus the parameter, for models with Megatron's `layernorm_zero_centered_gamma`."""

    def reset_parameters(self) -> None:
        """Set the parameter to zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input with the same shape and dtype."""
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class FullQueryNorm(nn.Module):
    """x / rms(x) * weight in fp32, with rms over the heads of all tensor-parallel ranks. Every rank has the whole
    weight: Megatron sums the gradient of norms of this name over the ranks, which would mix the parts of a sharded
    weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.tp_group = layer_groups("tp").tp
        self.width, self.eps = self.num_heads(config) * hidden_size, eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(self.width, dtype=config.params_dtype, device=device))

    @staticmethod
    def num_heads(config: TransformerConfig) -> int:
        """Return the total number of heads on all ranks."""
        return int(config.num_attention_heads)

    def forward(self, heads_SBND: Tensor) -> Tensor:
        """Collective over the tensor-parallel group: return the normalized heads with the same shape and dtype."""
        wide = heads_SBND.flatten(-2).float()
        total, weight = wide.square().sum(-1, keepdim=True), self.weight
        if self.tp_group.size() > 1:
            total = _Sum.apply(total, self.tp_group)  # type: ignore[no-untyped-call]
            weight = weight.chunk(self.tp_group.size())[self.tp_group.rank()]
        normalized = wide * (total / self.width + self.eps).rsqrt() * weight
        return normalized.to(heads_SBND.dtype).view_as(heads_SBND)


class FullKeyNorm(FullQueryNorm):
    """Norm of keys, like `FullQueryNorm`."""

    @staticmethod
    def num_heads(config: TransformerConfig) -> int:
        """Return the total number of heads on all ranks."""
        return int(config.num_query_groups)


class _Sum(torch.autograd.Function):
    """Sum over the ranks. Each rank uses the sum for its own heads, so the gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()  # all_reduce works in place, and the part may be saved for a backward pass
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which can defer its product until the logits are used."""

    is_deferred = False
    """Whether the layer returns the hidden states `[s, B, D]` of all positions instead of the logits `[s, B, v]`."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Collective over the tensor-parallel ranks: return the logits, or the hidden states, and None for a bias."""
        # A deferred product needs this call too: Megatron waits for a gathered weight before the forward of its module.
        if not self.is_deferred:
            result: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return result
        # Each rank's slice of the vocabulary gives a part of the gradient: the backward pass sums the parts.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's logits `[N, v]` for hidden states `[N, D]`, computed as in `forward`."""
        return linear(rows, weight)


def sharded_weights(
    layer: Any, prefix: str, axes: dict[str, int], offsets: Any, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the state of a layer as shards; the tensors named in `axes` are split over its tensor-parallel ranks."""
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
    return sharded


class ReplicatedLinear(nn.Module):
    """`input @ weight.T` with one weight on all tensor-parallel ranks, saved like Megatron's layers. Under sequence
    parallelism it is marked so that Megatron sums its gradient over the ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        **options: Any,
    ) -> None:
        super().__init__()
        assert not options.get("bias") and not options.get("is_expert"), "no bias, not inside an expert"
        self.tp_group = options.get("tp_group")
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            # Megatron's data-parallel random state is equal on all ranks of a TP group.
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """Return the product, and None for a bias, as Megatron's linear layers do."""
        return nn.functional.linear(input, self.weight), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass, not later."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a single tensor, replicated over the ranks of a TP group."""
        return sharded_weights(self, prefix, {}, sharded_offsets, metadata)

    def get_extra_state(self) -> None:
        """Return None. TransformerEngine's layers save an extra state, so checkpoints of both need the key."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state of TransformerEngine's layer."""


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with its down-projections replicated: sharded, they lose a part of the rotary key's
    gradient. They are replaced after construction, as Megatron accepts only its own classes in a spec.
    """

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            assert getattr(submodules, name) is ColumnParallelLinear, f"{name} is replaced afterwards"
        super().__init__(config, submodules, *args, **kwargs)
        if self.tp_group.size() > 1 and not config.sequence_parallel:
            raise ConfigError(
                f"multi-head latent attention with tp={self.tp_group.size()} needs mesh.sequence_parallel=true: "
                "without it the gradient of the rotary key misses the other ranks' heads."
            )
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = self._down(config.q_lora_rank)
        self.linear_kv_down_proj = self._down(config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def _down(self, size: int) -> ReplicatedLinear:
        config = self.config
        return ReplicatedLinear(
            config.hidden_size, size, config=config, init_method=config.init_method, tp_group=self.tp_group
        )
