"""Megatron's Mixture-of-Experts layer, with a shorter path if no token leaves its rank."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_layer, router
from torch import Tensor

from mcore_rl.megatron.routers import best_in_groups, own_group_score
from mcore_rl.model.layers.experts import GroupedExperts


class Router(router.TopKRouter):
    """Megatron's router; unlike Megatron's, it does not check in each pass whether its weights are on the device."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits `[s, B, E]` of `input` `[s, B, D]`, float32."""
        logits: Tensor = router.router_gating_linear(input, self.weight, self.bias, torch.float32)
        return logits


class GroupRouter(Router):
    """A router that ranks groups of experts as the model's family does, which is not Megatron's way."""

    experts_in_score: int
    """Number of best experts that rank a group."""
    router_replay: Any
    """Object that is asked for the experts; None for this router's choice."""

    def routing(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return gates and map of the chosen experts, both `[T, E]`, for logits `[s, B, E]`."""
        hook = self.router_replay
        self.router_replay = GroupChoice(self.experts_in_score, hook)
        try:
            routed: tuple[Tensor, Tensor] = super().routing(logits, *args, **options)
        finally:
            self.router_replay = hook
        return routed


class GroupChoice:
    """Object that a router asks for its experts instead of the replay hook; it passes the question on to the hook."""

    def __init__(self, experts_in_score: int, hook: Any) -> None:
        """`hook` is an object with the same method; None if nothing is recorded or imposed."""
        self._experts_in_score, self._hook = experts_in_score, hook

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices `[T, K]` of the chosen experts; Megatron's router calls this by name."""
        if self._hook is None:
            return self._choice(scores, topk, num_groups, group_topk)
        replayed: tuple[Tensor, Tensor] = self._hook.get_replay_topk(scores, topk, num_groups, group_topk, self._choice)
        return replayed

    def _choice(self, scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
        return best_in_groups(
            scores, topk, num_groups=num_groups, top_groups=group_topk, experts_in_score=self._experts_in_score
        )


class MoELayer(moe_layer.MoELayer):
    """Megatron's layer, with the same router, shared experts, recomputation and results.

    If a rank has all experts unsplit, the experts gather and sum the tokens themselves: Megatron's dispatchers would
    copy top-k times the batch six times to sort it, and read counts on the host, which drains the GPU's queue in every
    layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert type(self.router) is router.TopKRouter
        self.router.__class__ = Router
        if (best := own_group_score(self.config)) is not None:
            self.router.__class__, self.router.experts_in_score = GroupRouter, best
        self.is_local: bool = (
            isinstance(self.experts, GroupedExperts)
            # With top-k rows per token, dropped or not, a capacity would save nothing.
            and (self.experts.skips_dropped or self.config.moe_expert_capacity_factor is None)
            and self.experts.ep_group.size() == self.experts.tp_group.size() == 1
            and self.config.moe_token_dispatcher_type in ("alltoall", "allgather")
            and not self.config.moe_shared_expert_overlap
        )
        """True if no token leaves its rank."""

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads numbers from a GPU in the layer's forward pass."""
        return not self.is_local or not self.experts.is_queued

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the output `[s, B, D]` of `[s, B, D]`, and no bias; `padding_mask` `[B, s]` is true at padding."""
        if not self.is_local:
            output: tuple[Tensor, None] = super().forward(hidden_states, intermediate_tensors, padding_mask)
            return output
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._routed, False, hidden_states, padding_mask), None
        return self._routed(hidden_states, padding_mask), None

    def _routed(self, hidden_sBD: Tensor, is_padding_sB: Tensor | None) -> Tensor:
        shared_sBD = self.shared_experts_compute(hidden_sBD) if self.use_shared_expert else None
        gates_TE, routed_TE = self.router(hidden_sBD, is_padding_sB)
        tokens_TD = hidden_sBD.reshape(-1, hidden_sBD.shape[-1])
        output_sBD: Tensor = self.experts.routed(tokens_TD, gates_TE, routed_TE).view(hidden_sBD.shape)
        return output_sBD if shared_sBD is None else output_sBD + shared_sBD
