"""RMSNorm over the hidden size."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in fp32 and rounded once (arXiv 1910.07467).

    The weight is one plus the parameter when Megatron's config has `layernorm_zero_centered_gamma`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism a rank only sees its part: the mark makes Megatron sum the weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input with the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return nn.functional.rms_norm(input, (self.hidden_size,), weight, self.eps)

    def extra_repr(self) -> str:
        """Return size and epsilon for printing."""
        return f"{self.hidden_size}, eps={self.eps}"
