"""The layers of torch, as a provider for Megatron's specs."""

from typing import Any, ClassVar

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.patches.found import as_experts_entry
from mcore_rl.model.layers.attention import SDPAttention
from mcore_rl.model.layers.experts import GroupedExperts
from mcore_rl.model.layers.linear import OutputLayer, RMSNorm, ZeroCenteredRMSNorm


class TorchSpecProvider(LocalSpecProvider):
    """Provider of Megatron's linear layers with our norm, attention and experts, for CPUs and CUDA without TE."""

    norm: ClassVar[type[RMSNorm]] = RMSNorm
    zero_centered_norm: ClassVar[type[ZeroCenteredRMSNorm]] = ZeroCenteredRMSNorm
    attention: ClassVar[type[SDPAttention]] = SDPAttention
    self_attention: ClassVar[type[SelfAttention]] = SelfAttention
    output_layer: type[OutputLayer] = OutputLayer

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Return our norm, which marks its weight for sequence parallelism."""
        return self.zero_centered_norm if self.config.layernorm_zero_centered_gamma else self.norm

    def core_attention(self) -> type:
        """Return attention with all features that families need."""
        return self.attention

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        """Return experts that use grouped matrix products."""
        return as_experts_entry(GroupedExperts)
