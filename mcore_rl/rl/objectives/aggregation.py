"""Aggregation of token losses, independent of how the batch is divided into ranks and microbatches."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl.loss import Aggregation
from mcore_rl.megatron.mesh import Axis


class BatchTotals(NamedTuple):
    """World-wide totals of one optimizer step."""

    num_tokens: int
    """Trained tokens."""
    num_sequences: int
    """Sequences with at least one trained token."""


def loss_weights(
    lengths_N: Tensor, totals: BatchTotals, aggregation: Aggregation, *, norm_tokens: int
) -> Tensor:
    """Return the loss weight of each sequence's tokens, float64 `[N]`; 0 for sequences without a trained token.

    The world's sum of weighted losses divided by `totals.num_tokens` is then the mean that `aggregation` names.

    Args:
        lengths_N: trained tokens of each sequence.
        norm_tokens: constant by which "seq_mean_token_sum_norm" divides a sequence's sum (arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        loss_weights_N = torch.ones_like(lengths_N, dtype=torch.float64)
    elif aggregation == "seq_mean_token_mean":
        loss_weights_N = totals.num_tokens / (totals.num_sequences * lengths_N.double())
    else:
        loss_weights_N = torch.full_like(
            lengths_N, totals.num_tokens / (totals.num_sequences * norm_tokens), dtype=torch.float64
        )
    return loss_weights_N.where(lengths_N > 0, 0.0)


@torch.no_grad()
def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int, cp: Axis) -> Tensor:
    """Collective over `cp`: return the sum over each whole sequence, of which a rank may have a part; no gradient.

    Sums are float64 `[N]`, so that they do not depend on how the sequence is divided.
    """
    sums_N = torch.zeros(num_sequences, dtype=torch.float64, device=values_T.device)
    sums_N.index_add_(0, sequence_T, values_T.double())
    if cp.size > 1:
        dist.all_reduce(sums_N, group=cp.group)
    return sums_N


def anchored_means(values_T: Tensor, sequence_T: Tensor, lengths_N: Tensor, cp: Axis) -> Tensor:
    """Collective over `cp`: return at each token the mean of its whole sequence, with the gradient of the token itself.

    For a function f of a sequence's mean, the sum over its tokens of f(anchored mean) / length has f's value and also
    f's gradient, because each token contributes its own part. The backward pass needs no collective.
    """
    means_N = sequence_sums(values_T, sequence_T, len(lengths_N), cp) / lengths_N.clamp(min=1)
    return means_N[sequence_T].to(values_T.dtype) + (values_T - values_T.detach())
