"""The losses of routers as sums over tokens, and experts' capacity as a number of tokens of the whole micro-batch.

A group of T tokens (a micro-batch, a sequence, the batch) has the balance loss L = E sum_e f_e P_e, where f_e is the
share of the group's choices that went to expert e and P_e its mean score: L is 1 for an even load. Training adds
coefficient * (sum of T L) / (sum of T) to its loss, and likewise the z-loss as a mean over tokens. Padding is not
counted; all other routed tokens are, whether or not the loss mask counts them.

Each rank adds T L for its own tokens. The schedule divides every gradient by the number of tokens that the loss mask
counts; `router.loss_weight`, set before the pass, is therefore that number over the sum of T.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RouterMethod = Callable[..., tuple[Tensor, Tensor]]
BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def losses_as_sums(routing: RouterMethod) -> RouterMethod:
    """`TopKRouter.routing`, with the losses and the capacity of this module instead of Megatron's."""

    @functools.wraps(routing)
    def wrapped(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        config = router.config
        if (spans_T := _spans(router)) is not None:
            # Megatron 0.16 hands no mask to MTP layers, and 0.19 one that is moved by a token.
            padding_mask = (spans_T < 0).view(logits.shape[:2])
        is_token_T = None if padding_mask is None else ~padding_mask.reshape(-1)
        learns = router.training and torch.is_grad_enabled()
        kinds = [kind for kind in BALANCE_LOSSES if learns and router.get_aux_loss_coeff(kind)]
        if learns and config.moe_z_loss_coeff:
            logits = _with_z_loss(router, logits, is_token_T)
        # Without losses, and without a capacity that drops tokens.
        router.config = plain = copy.copy(config)
        plain.moe_aux_loss_coeff, plain.moe_z_loss_coeff, plain.moe_expert_capacity_factor = 0.0, None, None
        try:
            gates_TE, routed_TE = routing(router, logits, padding_mask=padding_mask)
        finally:
            router.config = config
        if config.moe_expert_capacity_factor is not None:
            gates_TE, routed_TE = _within_capacity(router, gates_TE, routed_TE, is_token_T)
        for kind in kinds:
            gates_TE = _with_balance_loss(router, kind, gates_TE, logits, is_token_T)
        if learns:
            _sums(router)[2] += logits.shape[0] * logits.shape[1] if is_token_T is None else is_token_T.sum()
        return gates_TE, routed_TE

    return wrapped


def scale_as_scalar(set_loss_scale: Callable[[Tensor], None]) -> Any:
    """`MoEAuxLossAutoScaler.set_loss_scale` that stores a scalar, whatever shape it is given."""

    def scaled(scale: Tensor) -> None:
        set_loss_scale(scale.squeeze())

    return staticmethod(scaled)


def padding_counts_no_tokens(apply_expert_bias: Callable[..., None]) -> Callable[..., None]:
    """`TopKRouter._apply_expert_bias` that takes the mask of tokens as a column next to the experts."""

    def wrapped(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        column = None if padding_mask is None else padding_mask[:, None]
        apply_expert_bias(self, routing_map, padding_mask=column)

    return wrapped


def loads_in_float32(maintain_float32: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TopKRouter._maintain_float32_expert_bias` that keeps the counts of tokens of each expert in float32 too."""

    def wrapped(self: Any) -> None:
        maintain_float32(self)
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.float()

    return wrapped


def padding_cut_on_every_stage(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """`GPTModel._preprocess` that cuts the mask of padding `[B, s]` for sequence parallelism on later stages too."""

    def wrapped(self: Any, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:
            from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

            whole_sB = padding_mask.transpose(0, 1).contiguous()
            padding_mask = scatter_to_sequence_parallel_region(whole_sB).transpose(0, 1).contiguous()
        return preprocess(self, *args, padding_mask=padding_mask, **kwargs)

    return wrapped


def take_loss_sums(router: Any) -> Tensor | None:
    """Return float64 `[3]` over this rank's tokens since the last call, which are then forgotten; None if none were
    routed: balance loss and z-loss, without coefficients, and the number of tokens.
    """
    sums: Tensor | None = router.__dict__.pop("loss_sums", None)
    return sums


def _spans(router: Any) -> Tensor | None:
    """Return the index of each token's sequence in a packed row, -1 at padding; None if rows are sequences."""
    spans_T: Tensor | None = getattr(router, "packed_spans_T", None)
    return spans_T


def _with_z_loss(router: Any, logits: Tensor, is_token_T: Tensor | None) -> Tensor:
    """Return the logits, with the gradient of the squares of log sum_e exp(logit_e) (arXiv 2202.08906)."""
    squares_T = logits.float().logsumexp(-1).square().reshape(-1)
    if is_token_T is not None:
        squares_T = squares_T * is_token_T
    total = squares_T.sum()
    _sums(router)[1] += total.detach()
    return _with_gradient_of(router, router.config.moe_z_loss_coeff * total, logits)


def _with_balance_loss(router: Any, kind: str, gates_TE: Tensor, logits: Tensor, is_token_T: Tensor | None) -> Tensor:
    """Collective over the ranks of the group: return the gates, with the gradient of this rank's T L."""
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    num_experts = logits.shape[-1]
    # By the scores only, as in the papers: without groups of experts, expert bias or replayed choices.
    routed_TE, scores_TE = compute_routing_scores_for_aux_loss(
        logits.view(-1, num_experts),
        router.topk,
        router.score_function,
        fused=router.config.moe_router_fusion,
        padding_mask=None if is_token_T is None else ~is_token_T,
    )
    if kind == "seq_aux_loss":
        # Without packing the tokens are in the order [s, B].
        rows = logits.shape[1]
        if (spans_T := _spans(router)) is None:
            group_T, num_groups = torch.arange(rows, device=logits.device).repeat(logits.shape[0]), rows
        else:
            group_T, num_groups = spans_T.clamp(min=0), router.num_packed_spans
        choices_NE, scores_NE = (
            values_TE.new_zeros(num_groups, num_experts).index_add(0, group_T, values_TE)
            for values_TE in (routed_TE.float(), scores_TE)
        )
    else:
        choices_NE, scores_NE = routed_TE.float().sum(0, keepdim=True), scores_TE.sum(0, keepdim=True)
    if kind == "global_aux_loss":
        choices_NE = _summed(choices_NE, router.tp_dp_cp_group)
        # The step's micro-batches so far (arXiv 2501.11873); finalize_model_grads clears the buffer. In float32 also
        # in a model in bfloat16, which would round the counts.
        router.global_tokens_per_expert = router.global_tokens_per_expert.float() + choices_NE[0]
        choices_NE = router.global_tokens_per_expert[None]
    else:
        choices_NE = _summed(choices_NE, router.tp_cp_group)
    # f_e = choices_e / choices, and T P_e is the sum of scores.
    shares_NE = choices_NE / choices_NE.sum(1, keepdim=True).clamp(min=1)
    total = num_experts * (shares_NE * scores_NE).sum()
    _sums(router)[0] += total.detach()
    return _with_gradient_of(router, router.get_aux_loss_coeff(kind) * total, gates_TE)


def _within_capacity(
    router: Any, gates_TE: Tensor, routed_TE: Tensor, is_token_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Collective over the ranks that share the micro-batch: drop the choices for which an expert has no room.

    Room is the expert's even share of the micro-batch's tokens times the capacity factor; Megatron drops on each rank
    by itself, so that more ranks drop more.
    """
    group = router.tp_cp_group
    if is_token_T is not None:
        routed_TE = routed_TE & is_token_T[:, None]
    # -1 comes behind every gate, as no gate is negative.
    competing_TE = gates_TE.detach().float().masked_fill(~routed_TE, -1.0).contiguous()
    everywhere_TE = competing_TE
    if group.size() > 1:
        everywhere_TE = competing_TE.new_empty(group.size() * len(competing_TE), competing_TE.shape[1])
        dist.all_gather_into_tensor(everywhere_TE, competing_TE, group=group)
    factor = router.config.moe_expert_capacity_factor
    # In float32 a count of more than 2^24 choices would be rounded.
    capacity = ((everywhere_TE >= 0).sum().double() / everywhere_TE.shape[1] * factor).ceil()
    # Stable: equal gates keep the order of their tokens, on every rank the same.
    order_TE = everywhere_TE.argsort(dim=0, descending=True, stable=True)
    places_T = torch.arange(len(order_TE), device=order_TE.device)
    place_TE = torch.empty_like(order_TE).scatter_(0, order_TE, places_T[:, None].expand_as(order_TE))
    routed_TE = routed_TE & (place_TE.chunk(group.size())[group.rank()] < capacity)
    return gates_TE * routed_TE, routed_TE


def _with_gradient_of(router: Any, loss: Tensor, activation: Tensor) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    weighed = loss * getattr(router, "loss_weight", 1.0)
    attached: Tensor = MoEAuxLossAutoScaler.apply(activation, weighed)
    return attached


def _sums(router: Any) -> Tensor:
    if "loss_sums" not in router.__dict__:
        router.loss_sums = torch.zeros(3, dtype=torch.float64, device=router.weight.device)
    sums: Tensor = router.loss_sums
    return sums


def _summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts
