"""How tokens make one number, so that no cut of the batch into ranks, microbatches or rows can change it."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl import Aggregation
from mcore_rl.parallel.mesh import Axis


class BatchTotals(NamedTuple):
    """Of all sequences of one optimizer step, over the world: those with a trained token, and these tokens."""

    num_tokens: int
    num_sequences: int


def batch_totals(lengths_N: Tensor, dp: Axis) -> BatchTotals:
    """Collective over `dp` (without context parallelism: `lengths` are of whole sequences)."""
    totals = torch.stack([lengths_N.sum(), (lengths_N > 0).sum()])
    if dp.size > 1:
        dist.all_reduce(totals, group=dp.group)
    num_tokens, num_sequences = totals.tolist()
    return BatchTotals(num_tokens, num_sequences)


def sequence_weights(
    lengths_N: Tensor, totals: BatchTotals, aggregation: Aggregation, *, norm_tokens: int
) -> Tensor:
    """The weight of every token of each sequence: the world's weighted sum over `totals.num_tokens`, the one
    division that is made, is the mean that `aggregation` names. 0 for a sequence without a trained token.
    """
    if aggregation == "token_mean":
        weights_N = torch.ones_like(lengths_N, dtype=torch.float64)
    elif aggregation == "seq_mean_token_mean":
        weights_N = totals.num_tokens / (totals.num_sequences * lengths_N.double())
    else:
        weights_N = torch.full_like(
            lengths_N, totals.num_tokens / (totals.num_sequences * norm_tokens), dtype=torch.float64
        )
    return weights_N.where(lengths_N > 0, 0.0)


@torch.no_grad()
def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int, cp: Axis) -> Tensor:
    """Collective over `cp`: the sum over each whole sequence, of which this rank may hold a part; no gradient.

    In float64, so that it does not depend on how the sequence is cut.
    """
    sums_N = torch.zeros(num_sequences, dtype=torch.float64, device=values_T.device)
    sums_N.index_add_(0, sequence_T, values_T.double())
    if cp.size > 1:
        dist.all_reduce(sums_N, group=cp.group)
    return sums_N


def anchored_means(values_T: Tensor, sequence_T: Tensor, lengths_N: Tensor, cp: Axis) -> Tensor:
    """Collective over `cp`: at each token the mean of its whole sequence, with the gradient of the token itself.

    For f of a sequence's mean, the sum over its tokens of f(anchored mean) / length has f's value and, as each
    token gives its own share, f's gradient: the backward needs no word with other ranks.
    """
    means_N = sequence_sums(values_T, sequence_T, len(lengths_N), cp) / lengths_N.clamp(min=1)
    return means_N[sequence_T].to(values_T.dtype) + (values_T - values_T.detach())
