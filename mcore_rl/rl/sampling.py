"""Sampling of tokens from logits sharded along the vocabulary over the tensor-parallel ranks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mcore_rl.megatron.mesh import Axis
from mcore_rl.megatron.vocab import logprobs_and_entropy

BLOCK = 256
"""Number of tokens per block of probabilities: a draw finds its block first, then the token in the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Temperature, and the set of tokens that may be drawn: the `top_k` likeliest (0: all); of these, the likeliest
    that together have the fraction `top_p` of their probability; of these, the tokens at least `min_p` times as likely
    as the likeliest. Ties with the last token of a set belong to the set.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0: greedy decoding, with logprobs at temperature 1."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether every token may be drawn."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0


class Drawn(NamedTuple):
    """A token for each row, with its logprob under the whole distribution and the log of the probability mass of the
    tokens that may be drawn, both at the sampling temperature.
    """

    tokens_B: Tensor
    logprobs_B: Tensor
    kept_logprobs_B: Tensor


def uniforms(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return numbers in (0, 1), float64. Each depends only on its int64 seed and position (a splitmix64 hash)."""
    # The constants of splitmix64 as int64 has them, which wraps around as unsigned numbers do.
    mixed_B = seeds_B * -7046029254386353131 + positions_B * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        mixed_B = (mixed_B ^ _shifted(mixed_B, shift)) * factor
    # A second round of mixing, because seeds may be consecutive.
    mixed_B = (mixed_B ^ _shifted(mixed_B, 32)) * -4658895280553007687
    return (_shifted(mixed_B, 11).double() + 0.5) / 2**53


@torch.no_grad()
def draw(
    logits_Bv: Tensor, uniforms_B: Tensor, cut: Cut, tp: Axis, *, vocab_size: int, as_in_training: bool = False
) -> Drawn:
    """Collective over `tp`: draw a token for each row, the same on all ranks, by inverse transform sampling in order of
    ids, with a number in (0, 1) per row. Ids from `vocab_size` on are padding and never drawn.

    With `as_in_training`, logprobs at the temperature have the trainer's formula, which rounds differently; with
    batch-invariant products they equal the trainer's bit for bit.
    """
    first = tp.rank * logits_Bv.shape[1]
    ids_v = torch.arange(first, first + logits_Bv.shape[1], device=logits_Bv.device)
    logits_Bv = logits_Bv.float()
    if first + logits_Bv.shape[1] > vocab_size:
        logits_Bv = logits_Bv.masked_fill(ids_v >= vocab_size, -torch.inf)
    kept_logprobs_B = logits_Bv.new_zeros(len(logits_Bv), dtype=torch.float64)
    highest_B = _reduced(logits_Bv.amax(1), dist.ReduceOp.MAX, tp)
    plain_Bv = logits_Bv - highest_B[:, None]
    weights_Bv = None  # exp of the tempered logits: over a large vocabulary it costs more than the rest
    if cut.temperature == 0.0:
        tokens_B = _reduced(torch.where(plain_Bv == 0, ids_v, vocab_size).amin(1), dist.ReduceOp.MIN, tp)
        tempered_Bv = plain_Bv
    else:
        tempered_Bv = plain_Bv / cut.temperature if cut.temperature != 1.0 else plain_Bv
        drawable_Bv = weights_Bv = tempered_Bv.exp()
        if not cut.is_open:
            lowest_B = _lowest_kept(tempered_Bv, cut, tp)
            drawable_Bv = weights_Bv.masked_fill(tempered_Bv < lowest_B[:, None], 0.0)
            both_2B = torch.stack([each_Bv.sum(1, dtype=torch.float64) for each_Bv in (drawable_Bv, weights_Bv)])
            kept_2B = _reduced(both_2B, dist.ReduceOp.SUM, tp).log()
            kept_logprobs_B = kept_2B[0] - kept_2B[1]
        tokens_B = _inverse_cdf(drawable_Bv, uniforms_B, tp).clamp_(max=vocab_size - 1)
    if as_in_training and cut.temperature:
        logprobs_B = logprobs_and_entropy(
            logits_Bv,
            tokens_B,
            tp,
            vocab_size=vocab_size,
            temperature=cut.temperature,
            chunk_tokens=max(1, len(tokens_B)),
            rows_N=torch.arange(len(tokens_B), device=tokens_B.device),
        ).logprobs_T
    else:
        logprobs_B = _logprobs(tempered_Bv, tokens_B - first, tp, weights_Bv)
    return Drawn(tokens_B, logprobs_B, kept_logprobs_B)


def running_sums(values_BN: Tensor) -> Tensor:
    """Return the cumulative sums of nonnegative values, also with deterministic algorithms on a GPU, unlike torch's."""
    if not (values_BN.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values_BN.cumsum(1)
    sums_BN, step = values_BN, 1
    while step < values_BN.shape[1]:
        # Each entry is the sum of the last `step` values up to it, and adds the sum of the `step` values before them.
        sums_BN = sums_BN + pad(sums_BN[:, :-step], (step, 0))
        step *= 2
    # Neighbors are summed in different orders: rounding must not make the sums decrease.
    return sums_BN.cummax(1).values


def _lowest_kept(scores_Bv: Tensor, cut: Cut, tp: Axis) -> Tensor:
    """Return the lowest score `[B]` of the tokens that may be drawn; the likeliest token has score 0."""
    lowest_B = scores_Bv.new_full((len(scores_Bv),), -torch.inf)
    if cut.min_p > 0.0:
        # A ratio to the likeliest token does not depend on top-k and top-p.
        # Filled on the device, because a copy from the host could not be part of a CUDA graph.
        lowest_B = torch.full_like(lowest_B, cut.min_p).log()
    best_BV = scores_Bv
    if cut.top_k:
        candidates_BC = _gathered(scores_Bv.topk(min(cut.top_k, scores_Bv.shape[1])).values, tp)
        best_BV = candidates_BC.topk(min(cut.top_k, candidates_BC.shape[1])).values
        lowest_B = torch.maximum(lowest_B, best_BV[:, -1])
    if cut.top_p < 1.0:
        sorted_BV = best_BV if cut.top_k else _gathered(scores_Bv, tp).sort(descending=True).values
        mass_BV = running_sums(sorted_BV.double().exp())
        # A token belongs to the set if the tokens before it have less than top_p together.
        is_in_BV = pad(mass_BV, (1, -1)) < cut.top_p * mass_BV[:, -1:]
        lowest_B = torch.maximum(lowest_B, sorted_BV.masked_fill(~is_in_BV, torch.inf).amin(1))
    return lowest_B


def _inverse_cdf(weights_Bv: Tensor, uniforms_B: Tensor, tp: Axis) -> Tensor:
    """Return the ids at which the running sum of the weights exceeds the fraction `uniforms_B` of the total."""
    rows, width = weights_Bv.shape
    if width % BLOCK:
        weights_Bv = pad(weights_Bv, (0, -width % BLOCK))
    blocks_BNW = weights_Bv.view(rows, -1, BLOCK)
    sums_BN = _gathered(blocks_BNW.sum(2, dtype=torch.float64), tp)
    ends_BN = running_sums(sums_BN)
    goals_B1 = uniforms_B[:, None] * ends_BN[:, -1:]
    block_B1 = _passed(sums_BN, goals_B1)
    start_B1 = pad(ends_BN, (1, 0)).gather(1, block_B1)
    local_block_B1 = block_B1 - tp.rank * blocks_BNW.shape[1]
    here_B1 = (local_block_B1 >= 0) & (local_block_B1 < blocks_BNW.shape[1])
    index_B1W = local_block_B1.where(here_B1, 0)[:, :, None].expand(-1, -1, BLOCK)
    inside_BW = blocks_BNW.gather(1, index_B1W).squeeze(1).double()
    place_B1 = _passed(inside_BW, goals_B1 - start_B1)
    ids_B1 = tp.rank * width + local_block_B1 * BLOCK + place_B1
    return _reduced(ids_B1.where(here_B1, 0).squeeze(1), dist.ReduceOp.SUM, tp)


def _passed(weights_BN: Tensor, goals_B1: Tensor) -> Tensor:
    """Return the index at which the running sum exceeds the goal; the last nonzero weight if rounding prevents that."""
    places_B1 = torch.searchsorted(running_sums(weights_BN), goals_B1, right=True)
    last_B1 = weights_BN.shape[1] - 1 - (weights_BN > 0).flip(1).int().argmax(1, keepdim=True)
    return torch.minimum(places_B1, last_B1)


def _logprobs(scores_Bv: Tensor, columns_B: Tensor, tp: Axis, weights_Bv: Tensor | None = None) -> Tensor:
    """Return the logprob, float64, of each row's token under the softmax over all ranks. `columns_B` is outside of this
    rank's slice if another rank has the token; `weights_Bv` is exp of the scores, if already computed.
    """
    weights_Bv = scores_Bv.exp() if weights_Bv is None else weights_Bv
    here_B = (columns_B >= 0) & (columns_B < scores_Bv.shape[1])
    target_B = scores_Bv.gather(1, columns_B.where(here_B, 0)[:, None]).squeeze(1).where(here_B, 0.0)
    both_2B = torch.stack([target_B.double(), weights_Bv.sum(1, dtype=torch.float64)])
    both_2B = _reduced(both_2B, dist.ReduceOp.SUM, tp)
    return both_2B[0] - both_2B[1].log()


def _reduced(local: Tensor, operation: dist.ReduceOp.RedOpType, tp: Axis) -> Tensor:
    if tp.size > 1:
        dist.all_reduce(local, op=operation, group=tp.group)
    return local


def _gathered(local_BN: Tensor, tp: Axis) -> Tensor:
    if tp.size == 1:
        return local_BN
    slices = [torch.empty_like(local_BN) for _ in range(tp.size)]
    dist.all_gather(slices, local_BN.contiguous(), group=tp.group)
    return torch.cat(slices, dim=1)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Logical shift right: fill with zeros from the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
