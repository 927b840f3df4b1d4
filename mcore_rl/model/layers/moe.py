"""Megatron's Mixture-of-Experts layer, with a shorter path where no token leaves its rank."""

from typing import Any

from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.model.layers.experts import GroupedExperts


class MoELayer(moe_layer.MoELayer):
    """Megatron's layer, with the same router, shared experts, recomputation and numbers.

    Where a rank holds all experts whole, they gather and sum the tokens themselves. Megatron's dispatchers copy top-k
    times the batch six times to sort it, even if nothing is sent, and read on the host how many tokens each expert
    gets, so that a GPU is drained once a layer. Everywhere else this is Megatron's layer unchanged.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _is_local(self.config, self.experts):
            self.token_dispatcher = LocalDispatcher(self.config, self.experts)

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads numbers from a GPU in the layer's forward pass."""
        return not isinstance(self.token_dispatcher, LocalDispatcher) or not self.experts.is_queued

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the routed experts' output, and no bias."""
        dispatcher = self.token_dispatcher
        if isinstance(dispatcher, LocalDispatcher):
            return self.experts.routed(hidden_states, probs, dispatcher.take_routes()), None
        return super().routed_experts_compute(hidden_states, probs)


class LocalDispatcher(MoETokenDispatcher):
    """Dispatcher that leaves all tokens on their rank."""

    def __init__(self, config: TransformerConfig, experts: GroupedExperts) -> None:
        self.config = config
        self.ep_group, self.tp_group = experts.ep_group, experts.tp_group
        self.ep_size = self.tp_size = 1
        self.shared_experts = None

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens as rows `[T, D]`, and the router's probabilities `[T, E]`."""
        self._shape, self._routed_TE = tokens.shape, routing_map
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arguments: nothing is sent."""
        return hidden_states, probs

    def take_routes(self) -> Tensor:
        """Return the router's map `[T, E]` of the forward pass in progress, and forget it."""
        routed_TE = self._routed_TE
        del self._routed_TE
        return routed_TE

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the argument: nothing is received."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the rows in the shape of the tokens."""
        return hidden_states.view(self._shape)


def _is_local(config: TransformerConfig, experts: Any) -> bool:
    return (
        isinstance(experts, GroupedExperts)
        # On a GPU each token has its top-k rows, computed or not: a capacity would save nothing.
        and (experts.is_blockwise or (experts.is_on_gpu and config.moe_expert_capacity_factor is None))
        and experts.ep_group.size() == experts.tp_group.size() == 1
        and config.moe_token_dispatcher_type in ("alltoall", "allgather")
        and not config.moe_pad_expert_input_to_capacity
        and not config.moe_router_padding_for_quantization
        and not config.moe_shared_expert_overlap
        and not config.moe_apply_probs_on_input
    )
