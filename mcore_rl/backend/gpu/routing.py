"""The gates of chosen experts, with their gradient, in a kernel each; and the choice itself where logits decide on it.

The choice is what a tape records and imposes: it is made by the very scores that torch's router compares. Where these
are the logits, a kernel finds the largest; with scores of a softmax or a sigmoid, whose rounding could exchange two
experts, torch computes and compares them. Gates are made of the logits at the chosen experts, whoever chose them.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.gpu.kernels import RouterKernels

ELEMENTS_PER_PROGRAM = 2048
"""Numbers of the rows that one program has in registers."""
NUM_WARPS = 4
TOP, WHOLE, SIGMOID = 0, 1, 2
"""The score: a softmax of the chosen logits, a softmax of all, or a sigmoid of each."""


def route(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    router_replay: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return gates `[T, E]`, 0 where an expert is not chosen, and the map `[T, E]` of the chosen ones.

    Arguments and results are those of Megatron's `topk_routing_with_score_function`, which calls it.
    """
    assert score_function in ("softmax", "sigmoid"), score_function
    score = SIGMOID if score_function == "sigmoid" else WHOLE if use_pre_softmax else TOP
    choose = _chooser(score, expert_bias if score == SIGMOID else None)
    with torch.no_grad():
        scores_TE = logits.detach()
        if router_replay is None:
            _, experts_TK = choose(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            # The hook hands the logits on to `choose` where a live choice is wanted, and reads nothing of them itself.
            _, experts_TK = router_replay.get_replay_topk(scores_TE, topk, num_groups, group_topk, choose)
    found: tuple[Tensor, Tensor] = _Gates.apply(logits, experts_TK, score, scaling_factor or 1.0)
    return found


KERNELS = RouterKernels(route=route)


def _chooser(score: int, expert_bias_E: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function from logits to the scores and indices of the chosen experts, both `[T, K]`."""

    def choose(
        logits_TE: Tensor, top_k: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        scores_TE = logits_TE
        if score == WHOLE:
            scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).type_as(logits_TE)
        elif score == SIGMOID:
            scores_TE = torch.sigmoid(logits_TE.float()).type_as(logits_TE)
            if expert_bias_E is not None:
                scores_TE = scores_TE + expert_bias_E
        if group_topk:
            from megatron.core.transformer.moe.moe_utils import group_limited_topk

            grouped: tuple[Tensor, Tensor] = group_limited_topk(
                scores=scores_TE,
                topk=top_k,
                num_tokens=len(scores_TE),
                num_experts=scores_TE.shape[1],
                num_groups=num_groups,
                group_topk=group_topk,
            )
            return grouped
        return top(scores_TE, top_k) if score == TOP else torch.topk(scores_TE, k=top_k, dim=1)

    return choose


def top(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest numbers of each row and their columns, largest first; of equal ones the leftmost."""
    scores_TE = scores_TE.contiguous()
    num_tokens, num_experts = scores_TE.shape
    values_TK = scores_TE.new_empty((num_tokens, top_k))
    experts_TK = torch.empty_like(values_TK, dtype=torch.int64)
    rows, padded = _block(num_experts)
    if num_tokens:
        _top_kernel[(triton.cdiv(num_tokens, rows),)](
            scores_TE, values_TK, experts_TK, num_tokens, num_experts,
            top_k=top_k, ROWS=rows, EXPERTS=padded, num_warps=NUM_WARPS,
        )  # fmt: skip
    return values_TK, experts_TK


class _Gates(torch.autograd.Function):
    """Function that saves the logits and the chosen experts; its backward computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, experts_TK: Tensor, score: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        logits_TE, experts_TK = logits_TE.contiguous(), experts_TK.contiguous()
        num_tokens, num_experts = logits_TE.shape
        gates_TE = torch.empty_like(logits_TE)
        routed_TE = torch.empty_like(logits_TE, dtype=torch.uint8)
        rows, padded = _block(num_experts)
        if num_tokens:
            _gates_kernel[(triton.cdiv(num_tokens, rows),)](
                logits_TE, experts_TK, gates_TE, routed_TE, num_tokens, num_experts, scaling,
                top_k=experts_TK.shape[1], score=score, ROWS=rows, EXPERTS=padded, num_warps=NUM_WARPS,
            )  # fmt: skip
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.score, ctx.scaling = score, scaling
        is_routed_TE = routed_TE.view(torch.bool)
        ctx.mark_non_differentiable(is_routed_TE)
        return gates_TE, is_routed_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits_TE, experts_TK = ctx.saved_tensors
        num_tokens, num_experts = logits_TE.shape
        grad_logits_TE = torch.empty_like(logits_TE)
        rows, padded = _block(num_experts)
        if num_tokens:
            _gates_backward_kernel[(triton.cdiv(num_tokens, rows),)](
                logits_TE, experts_TK, grad_TE.contiguous(), grad_logits_TE, num_tokens, num_experts, ctx.scaling,
                top_k=experts_TK.shape[1], score=ctx.score, ROWS=rows, EXPERTS=padded, num_warps=NUM_WARPS,
            )  # fmt: skip
        return grad_logits_TE, None, None, None


def _block(num_experts: int) -> tuple[int, int]:
    """Return the rows and columns of a program: columns are a power of two, as Triton has it."""
    padded = max(16, triton.next_power_of_2(num_experts))
    return max(1, ELEMENTS_PER_PROGRAM // padded), padded


@triton.jit
def _top_kernel(
    scores, values, experts, num_tokens, num_experts,
    top_k: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the largest scores of each row and their columns."""
    row_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert_E = tl.arange(0, EXPERTS)
    is_inside_TE = (row_T < num_tokens)[:, None] & (expert_E < num_experts)[None, :]
    score_TE = tl.load(
        scores + row_T[:, None] * num_experts + expert_E[None, :], mask=is_inside_TE, other=float("-inf")
    )
    # torch takes what is no number first; and no column is taken twice, not even of -inf.
    left_TE = tl.where(score_TE != score_TE, float("inf"), score_TE)
    is_left_TE = is_inside_TE
    for choice in range(top_k):
        highest_T = tl.max(tl.where(is_left_TE, left_TE, float("-inf")), 1)
        is_highest_TE = is_left_TE & (left_TE == highest_T[:, None])
        column_T = tl.min(tl.where(is_highest_TE, expert_E[None, :], EXPERTS), 1)
        is_column_TE = expert_E[None, :] == column_T[:, None]
        value_T = tl.sum(tl.where(is_column_TE, score_TE, 0.0), 1)
        tl.store(values + row_T * top_k + choice, value_T, mask=row_T < num_tokens)
        tl.store(experts + row_T * top_k + choice, column_T.to(tl.int64), mask=row_T < num_tokens)
        is_left_TE = is_left_TE & (is_column_TE == 0)


@triton.jit
def _dense_logits(logits, row_T, num_tokens, num_experts, EXPERTS: tl.constexpr):
    """Return the logits of rows, -inf beyond the last expert, and the offsets and mask of their tile."""
    expert_E = tl.arange(0, EXPERTS)
    offset_TE = row_T[:, None] * num_experts + expert_E[None, :]
    is_inside_TE = (row_T < num_tokens)[:, None] & (expert_E < num_experts)[None, :]
    logit_TE = tl.load(logits + offset_TE, mask=is_inside_TE, other=float("-inf")).to(tl.float32)
    # Rows beyond the last one would be sums of nothing.
    logit_TE = tl.where((row_T < num_tokens)[:, None], logit_TE, 0.0)
    return logit_TE, offset_TE, is_inside_TE


@triton.jit
def _chosen(experts, row_T, num_tokens, top_k: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the mask of the chosen experts."""
    expert_E = tl.arange(0, EXPERTS)
    is_chosen_TE = tl.zeros((ROWS, EXPERTS), tl.int1)
    for choice in tl.static_range(top_k):
        column_T = tl.load(experts + row_T * top_k + choice, mask=row_T < num_tokens, other=0)
        is_chosen_TE = is_chosen_TE | (expert_E[None, :] == column_T[:, None])
    return is_chosen_TE


@triton.jit
def _unscaled_gates(logit_TE, is_chosen_TE, top_k: tl.constexpr, score: tl.constexpr):
    """Return the gates, 0 where not chosen, the scores (of all experts, or of the chosen ones), and their divisor."""
    if score == 2:
        score_TE = 1.0 / (1.0 + tl.exp(-logit_TE))
        divisor_T = tl.sum(tl.where(is_chosen_TE, score_TE, 0.0), 1) + 1e-20
        if top_k == 1:
            divisor_T = divisor_T * 0.0 + 1.0
        gate_TE = score_TE / divisor_T[:, None]
    else:
        if score == 0:
            logit_TE = tl.where(is_chosen_TE, logit_TE, float("-inf"))
        score_TE = tl.exp(logit_TE - tl.max(logit_TE, 1)[:, None])
        divisor_T = tl.sum(score_TE, 1)
        gate_TE = score_TE / divisor_T[:, None]
        score_TE = gate_TE
    return tl.where(is_chosen_TE, gate_TE, 0.0), score_TE, divisor_T


@triton.jit
def _gates_kernel(
    logits, experts, gates, routed, num_tokens, num_experts, scaling,
    top_k: tl.constexpr, score: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the gates and the map of some rows."""
    row_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logit_TE, offset_TE, is_inside_TE = _dense_logits(logits, row_T, num_tokens, num_experts, EXPERTS)
    is_chosen_TE = _chosen(experts, row_T, num_tokens, top_k, ROWS, EXPERTS)
    gate_TE, _, _ = _unscaled_gates(logit_TE, is_chosen_TE, top_k, score)
    tl.store(gates + offset_TE, (gate_TE * scaling).to(gates.dtype.element_ty), mask=is_inside_TE)
    tl.store(routed + offset_TE, is_chosen_TE.to(tl.uint8), mask=is_inside_TE)


@triton.jit
def _gates_backward_kernel(
    logits, experts, grad_gates, grad_logits, num_tokens, num_experts, scaling,
    top_k: tl.constexpr, score: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits of some rows."""
    row_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logit_TE, offset_TE, is_inside_TE = _dense_logits(logits, row_T, num_tokens, num_experts, EXPERTS)
    is_chosen_TE = _chosen(experts, row_T, num_tokens, top_k, ROWS, EXPERTS)
    gate_TE, score_TE, divisor_T = _unscaled_gates(logit_TE, is_chosen_TE, top_k, score)
    grad_TE = (
        tl.load(grad_gates + offset_TE, mask=is_inside_TE & is_chosen_TE, other=0.0).to(tl.float32) * scaling
    )
    mean_T = tl.sum(gate_TE * grad_TE, 1)
    if score == 2:
        if top_k == 1:
            mean_T = mean_T * 0.0
        # g_k = s_k / S: dg_j/ds_k = (1[j = k] - g_j) / S, and ds/dx = s (1 - s).
        pull_TE = (grad_TE - mean_T[:, None]) / divisor_T[:, None] * score_TE * (1.0 - score_TE)
        pull_TE = tl.where(is_chosen_TE, pull_TE, 0.0)
    else:
        # The softmax, of the chosen experts or of all: dg_j/dx_k = p_k (1[j = k] - g_j).
        pull_TE = score_TE * (grad_TE - mean_T[:, None])
    tl.store(grad_logits + offset_TE, pull_TE.to(grad_logits.dtype.element_ty), mask=is_inside_TE)
