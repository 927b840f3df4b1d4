"""Linear layers that are replicated on every tensor-parallel rank."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from mcore_rl.errors import ConfigError


class ReplicatedLinear(nn.Module):
    """`input @ weight.T` with the same weight on all tensor-parallel ranks; called and saved like Megatron's layers.

    Under sequence parallelism each rank sees its part of the sequence; the weight is marked so that Megatron sums its
    gradient over the ranks.
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
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
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
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return sharded

    def get_extra_state(self) -> None:
        """Return None. TransformerEngine's layers save an extra state, so checkpoints of both need the key."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state of TransformerEngine's layer."""


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with its down-projections replicated.

    Without TransformerEngine, Megatron shards them, which loses a part of the rotary key's gradient under tensor
    parallelism. Megatron only accepts its own classes in a spec, so the layers are replaced after construction.
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
