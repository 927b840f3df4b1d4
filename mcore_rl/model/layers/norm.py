"""RMSNorm over the hidden size."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's x / rms(x) * weight over the last axis, computed in fp32 and rounded once (arXiv 1910.07467), built as
    Megatron builds norms.
    """

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
