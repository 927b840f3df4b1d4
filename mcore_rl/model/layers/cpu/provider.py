"""The compiled layers for CPUs, as a provider for Megatron's specs."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.patches.found import as_experts_entry
from mcore_rl.model.layers.cpu.experts import (
    CompiledExperts,
    CompiledRMSNorm,
    CompiledZeroCenteredRMSNorm,
    RoundedColumnLinear,
    RoundedOutputLayer,
    RoundedRowLinear,
)
from mcore_rl.model.layers.cpu.self_attention import CompiledAttention, FusedSelfAttention
from mcore_rl.model.layers.provider import TorchSpecProvider


class CpuSpecProvider(TorchSpecProvider):
    """Provider of the layers for `platform.layers = "cpu"`; layers without a compiled form are torch's."""

    norm = CompiledRMSNorm
    zero_centered_norm = CompiledZeroCenteredRMSNorm
    attention = CompiledAttention
    self_attention = FusedSelfAttention

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.rounds_products:
            self.output_layer = RoundedOutputLayer

    def column_parallel_linear(self) -> type:
        """Return Megatron's layer, or ours with `platform.bf16_products`."""
        layer: type = RoundedColumnLinear if self.config.rounds_products else super().column_parallel_linear()
        return layer

    def row_parallel_linear(self) -> type:
        """Return Megatron's layer, or ours with `platform.bf16_products`."""
        layer: type = RoundedRowLinear if self.config.rounds_products else super().row_parallel_linear()
        return layer

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        """Return experts that the compiled library computes block by block."""
        return as_experts_entry(CompiledExperts)
