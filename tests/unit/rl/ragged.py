"""A random ragged batch, and the closed forms of the papers over it, sequence by sequence."""

import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.batch import BatchTotals
from mcore_rl.rl.step.losses import PolicyTokens, loss_weights

ALONE = Axis(None, 0, 1)
LENGTHS = (5, 1, 9, 3, 14, 2, 7)
CUT, PADDED = 4, 18
"""Prompt positions in front of a row's response, and the row's whole length."""


def batch(spread=0.3, seed=0):
    """Rows `[N, S]` by name, in float64; `mask` says where the responses are."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(len(LENGTHS), PADDED, generator=generator, dtype=torch.float64) * scale

    position = torch.arange(PADDED)
    mask = (position >= CUT) & (position < CUT + torch.tensor(LENGTHS)[:, None])
    old = -normal(1.0).abs()
    rows = {
        "old_logprobs": old,
        "logprobs": old + normal(spread),
        "reference_logprobs": old + normal(0.4),
        "rollout_logprobs": old + normal(0.4),
        "entropy": normal(1.0).abs(),
        "advantages": normal(1.0)[:, :1].expand(-1, PADDED),
        "token_advantages": normal(1.0),
        "router_shift": torch.exp(-normal(0.3).abs()),
    }
    return {name: values.where(mask, 0.5) for name, values in rows.items()} | {"mask": mask}


def totals_of(lengths) -> BatchTotals:
    """Totals of sequences with so many trained tokens."""
    return BatchTotals(int(lengths.sum()), int((lengths > 0).sum()))


def tokens_of(rows, aggregation="seq_mean_token_mean", *, sequences=None, norm_tokens=20, advantages="advantages"):
    """The sequences (all, or these) end to end, with the weights of the whole batch."""
    lengths = rows["mask"].sum(1)
    weights = loss_weights(lengths, totals_of(lengths), aggregation, norm_tokens=norm_tokens)
    picked = torch.arange(len(lengths)) if sequences is None else torch.tensor(sequences)
    flat = {name: values[picked].flatten() for name, values in rows.items()}
    sequence = torch.arange(len(picked)).repeat_interleave(PADDED)
    return PolicyTokens(
        logprobs_T=flat["logprobs"],
        entropy_T=flat["entropy"],
        old_logprobs_T=flat["old_logprobs"],
        reference_logprobs_T=flat["reference_logprobs"],
        rollout_logprobs_T=flat["rollout_logprobs"],
        advantages_T=flat[advantages],
        mask_T=flat["mask"],
        loss_weights_T=weights[picked][sequence],
        sequence_T=sequence,
        lengths_N=lengths[picked],
        router_shift_T=flat["router_shift"],
    )


def responses(rows) -> list[dict[str, Tensor]]:
    """Each sequence's response alone, without padding."""
    return [{name: values[row][rows["mask"][row]] for name, values in rows.items()} for row in range(len(LENGTHS))]


def over_sequences(rows, value) -> Tensor:
    """The mean over sequences of `value(response)`."""
    return torch.stack([value(response) for response in responses(rows)]).mean()


def with_gradient(rows, value):
    """`value(rows)` and its gradient with respect to the logprobs and entropies."""
    leaves = {name: rows[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    result = value(rows | leaves)
    gradients = torch.autograd.grad(result, list(leaves.values()), allow_unused=True)
    zeros = torch.zeros_like(rows["logprobs"])
    return result.detach(), [zeros if gradient is None else gradient for gradient in gradients]
