"""RMSNorm of queries or keys over all heads at once, across tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcore_rl.megatron.mesh import layer_groups


class FullQueryNorm(nn.Module):
    """x / rms(x) * weight in fp32, where rms is taken over the heads of all tensor-parallel ranks.

    It replaces Megatron's norm of each head. Every rank has the whole weight and uses the part for its own heads: by
    the attribute's name Megatron sums the gradient of these norms over the ranks, which would mix the parts of a
    sharded weight.
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
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
