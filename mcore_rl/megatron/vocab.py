"""Logits with a vocabulary that is divided into equal slices over the tensor-parallel ranks.

Those of 8,192 positions times 152k ids are 5 GB in fp32; as `DeferredLogits` they are never in memory at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.megatron.mesh import Axis


def zigzag(full: Tensor, cp: Axis, dim: int = 1) -> Tensor:
    """Return this rank's positions: chunks r and 2*cp-1-r of 2*cp along `dim`, as Megatron and TransformerEngine do.

    Early chunks attend to few positions and late ones to many: every rank has the same causal work.
    """
    if cp.size == 1:
        return full
    chunks = full.chunk(2 * cp.size, dim=dim)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]], dim=dim).contiguous()


def zigzag_spans(full: Tensor, lengths: Sequence[int], cp: Axis, dim: int = 1) -> Tensor:
    """Return this rank's positions of packed sequences of these lengths: `zigzag` of each, concatenated."""
    if cp.size == 1:
        return full
    return torch.cat([zigzag(span, cp, dim) for span in full.split(list(lengths), dim)], dim)


@dataclass(frozen=True, slots=True)
class DeferredLogits:
    """Logits `[T, v]` (with rows: `[B, s, v]`) that whoever reads them computes, `chunk_tokens` positions at a time.

    They are the products of hidden states `[T, D]` with the output weight `[v, D]`, this rank's slice, computed again
    in a backward pass.
    """

    hidden_TD: Tensor
    weight_vD: Tensor
    chunk_tokens: int

    def __getitem__(self, row: int) -> "DeferredLogits":
        """Return the logits of one row of a batch."""
        return DeferredLogits(self.hidden_TD[row], self.weight_vD, self.chunk_tokens)


Logits = Tensor | DeferredLogits
"""Logits `[T, v]` of this rank's slice of the vocabulary."""


def last_tensor(output: Logits) -> Tensor:
    """Return the tensor of a model's output that gets its gradient first in the backward pass."""
    return output if isinstance(output, Tensor) else output.hidden_TD


LOWEST = -1e30
"""Logit in the place of -inf: its exponential is 0 too, and a slice of nothing but padding makes no NaN."""


@torch.no_grad()
def exclude_padding(logits_sBv: Tensor, tp: dist.ProcessGroup, vocab_size: int) -> None:
    """Overwrite in place the logits of the ids from `vocab_size` on: their probability and gradient are then 0."""
    first = dist.get_rank(tp) * logits_sBv.shape[-1]
    logits_sBv[..., max(vocab_size - first, 0) :] = LOWEST


class TokenStatistics(NamedTuple):
    """Logprob of the target and entropy of the whole distribution at each position, `[T]` each, in nats."""

    logprobs_T: Tensor
    entropy_T: Tensor


def logprobs_and_entropy(
    logits_Tv: Logits,
    targets_T: Tensor,
    tp: Axis,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    rows_N: Tensor | None = None,
) -> TokenStatistics:
    """Collective over `tp` (forward only): logprobs and entropies under softmax(logits / temperature), in float32 or
    more, equal on all ranks of `tp`; zeros beside `rows_N`, which are positions, None: all of them.

    Targets are ids of the whole vocabulary; columns from `vocab_size` on pad it. `chunk_tokens` positions are computed
    at once: beyond inputs, results and gradient, 3 x `chunk_tokens` x v numbers are in memory.
    """
    shard = _shard(logits_Tv, tp, vocab_size, temperature, chunk_tokens)
    if rows_N is None:
        rows_N = torch.arange(len(targets_T), device=targets_T.device)
    logprobs_T, entropy_T = _LogprobsAndEntropy.apply(*_factors(logits_Tv), targets_T, rows_N, shard)  # type: ignore[no-untyped-call]
    return TokenStatistics(logprobs_T, entropy_T)


def cross_entropy(logits_Tv: DeferredLogits, targets_T: Tensor, tp: Axis, *, vocab_size: int) -> Tensor:
    """Collective over `tp` (forward only): return the targets' cross entropy `[T]` in nats, float32 or more.

    Every position is computed: the host need not wait for the number of targets.
    """
    shard = _shard(logits_Tv, tp, vocab_size, 1.0, logits_Tv.chunk_tokens)._replace(has_entropy=False)
    rows_T = torch.arange(len(targets_T), device=targets_T.device)
    logprobs_T: Tensor = _LogprobsAndEntropy.apply(*_factors(logits_Tv), targets_T, rows_T, shard)[0]  # type: ignore[no-untyped-call]
    return -logprobs_T


@torch.no_grad()
def vocabulary_logprobs(
    logits_Tv: Logits, rows_N: Tensor, tp: Axis, *, vocab_size: int, temperature: float, chunk_tokens: int
) -> Tensor:
    """Collective over `tp`: logprobs `[N, valid]`, float32, of this rank's slice without padding, at `rows_N`."""
    shard = _shard(logits_Tv, tp, vocab_size, temperature, chunk_tokens)
    log_partition_N = _log_partition(logits_Tv, rows_N, shard)
    found = [
        shard.scaled(logits_Tv, rows_C).clamp_(min=LOWEST).sub_(log_partition_C[:, None]).float()
        for rows_C, log_partition_C in zip(
            rows_N.split(shard.chunk_tokens), log_partition_N.split(shard.chunk_tokens), strict=True
        )
    ]
    return torch.cat(found)


def reverse_kl(
    logits_Tv: Logits,
    other_Nv: Tensor,
    rows_N: Tensor,
    tp: Axis,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    limit_nats: float,
) -> Tensor:
    """Collective over `tp` (forward only): return KL(p || q) over the vocabulary, `[T]`, with the gradient of p.

    p is the softmax of the logits; `other_Nv` are logprobs of q at `rows_N`, from `vocabulary_logprobs`. Other
    positions have 0. q counts as at most `limit_nats` below p.
    """
    shard = _shard(logits_Tv, tp, vocab_size, temperature, chunk_tokens)
    kl_T: Tensor = _ReverseKL.apply(*_factors(logits_Tv), other_Nv, rows_N, shard, limit_nats)  # type: ignore[no-untyped-call]
    return kl_T


LEAST_REST = 1e-6
"""Probability of all ids but the likeliest below which it is rounding; logprobs of bf16 models sum to up to 1.002."""


def forward_kl(
    logits_Tv: Logits,
    ids_NK: Tensor,
    logprobs_NK: Tensor,
    rows_N: Tensor,
    tp: Axis,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Collective over `tp` (forward only): return KL(q || p), `[T]`, with the gradient of p, over K ids and one for all
    others, which has the rest of q and of p: a lower bound of the KL over the vocabulary.

    p is the softmax of the logits; `logprobs_NK` are logprobs of q of different ids at `rows_N`. Other positions have
    0. Ids from `vocab_size` on count among the others.
    """
    shard = _shard(logits_Tv, tp, vocab_size, temperature, chunk_tokens)
    is_known_NK = ids_NK < vocab_size
    q_NK = logprobs_NK.to(_exact(_factors(logits_Tv)[0].dtype)).exp().where(is_known_NK, 0.0)
    rest_N1 = 1 - q_NK.sum(dim=1, keepdim=True)
    q_NK = q_NK.where(rest_N1 >= LEAST_REST, q_NK / (1 - rest_N1))
    rest_N = rest_N1.where(rest_N1 >= LEAST_REST, 0.0).squeeze(1)
    kl_T: Tensor = _ForwardKL.apply(*_factors(logits_Tv), ids_NK.where(is_known_NK, -1), q_NK, rest_N, rows_N, shard)  # type: ignore[no-untyped-call]
    return kl_T


def _factors(logits_Tv: Logits) -> tuple[Tensor, Tensor | None]:
    """Return the tensors that have gradients: the logits and None, or the factors of deferred logits."""
    if isinstance(logits_Tv, Tensor):
        return logits_Tv, None
    return logits_Tv.hidden_TD, logits_Tv.weight_vD


def _shard(logits_Tv: Logits, tp: Axis, vocab_size: int, temperature: float, chunk_tokens: int) -> "_Shard":
    num_columns = logits_Tv.shape[-1] if isinstance(logits_Tv, Tensor) else len(logits_Tv.weight_vD)
    num_valid = min(max(vocab_size - tp.rank * num_columns, 0), num_columns)
    if isinstance(logits_Tv, DeferredLogits):
        chunk_tokens = logits_Tv.chunk_tokens
    return _Shard(tp, tp.rank * num_columns, num_valid, 1.0 / temperature, chunk_tokens)


class _Shard(NamedTuple):
    """Slice of the vocabulary on this rank, `num_valid` ids from `first` on, and how its logits are read."""

    tp: Axis
    first: int
    num_valid: int
    inverse_temperature: float
    chunk_tokens: int
    has_entropy: bool = True

    def logits(self, tensor_TX: Tensor, weight_vD: Tensor | None) -> Logits:
        if weight_vD is None:
            return tensor_TX
        return DeferredLogits(tensor_TX, weight_vD, self.chunk_tokens)

    def scaled(self, logits_Tv: Logits, rows_C: Tensor) -> Tensor:
        """Return a new tensor: the valid logits of these rows over the temperature, in float32 or more."""
        if isinstance(logits_Tv, Tensor):
            picked_Cv = logits_Tv[:, : self.num_valid].index_select(0, rows_C)
        else:
            picked_Cv = torch.mm(logits_Tv.hidden_TD.index_select(0, rows_C), logits_Tv.weight_vD[: self.num_valid].t())
        return picked_Cv.to(_exact(picked_Cv.dtype)).mul_(self.inverse_temperature)

    def column_of(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each target in the slice (0 where it is elsewhere), and whether it is in the slice."""
        column_C = targets_C - self.first
        here_C = (column_C >= 0) & (column_C < self.num_valid)
        return column_C.where(here_C, 0), here_C


class _Gradient:
    def __init__(self, logits_Tv: Logits, shard: _Shard) -> None:
        self._logits_Tv = logits_Tv
        self._shard = shard
        if isinstance(logits_Tv, Tensor):
            self._rows_TX = torch.zeros_like(logits_Tv)
        else:
            self._rows_TX = torch.zeros_like(logits_Tv.hidden_TD)
            # A sum over chunks in bf16 would lose what each of them adds.
            weight_vD = logits_Tv.weight_vD
            self._weight_vD = torch.zeros_like(weight_vD, dtype=_exact(weight_vD.dtype))

    def add(self, rows_C: Tensor, grad_Cv: Tensor) -> None:
        """Take the gradient of the scaled logits of some rows, which is overwritten; no row may come twice."""
        shard, logits_Tv = self._shard, self._logits_Tv
        grad_Cv = grad_Cv.mul_(shard.inverse_temperature).to(self._rows_TX.dtype)
        if isinstance(logits_Tv, Tensor):
            self._rows_TX[rows_C, : shard.num_valid] = grad_Cv
            return
        hidden_CD, weight_vD = logits_Tv.hidden_TD[rows_C], logits_Tv.weight_vD[: shard.num_valid]
        self._rows_TX[rows_C] = torch.mm(grad_Cv, weight_vD)
        total_vD = self._weight_vD[: shard.num_valid]
        if total_vD.dtype == grad_Cv.dtype:
            total_vD.addmm_(grad_Cv.t(), hidden_CD)
        else:
            total_vD.add_(torch.mm(grad_Cv.t(), hidden_CD))

    def factors(self) -> tuple[Tensor, Tensor | None]:
        if isinstance(self._logits_Tv, Tensor):
            return self._rows_TX, None
        return self._rows_TX, self._weight_vD.to(self._logits_Tv.weight_vD.dtype)


class _LogprobsAndEntropy(torch.autograd.Function):
    """Function that saves logits or factors and three numbers a token; its backward computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any, tensor_TX: Tensor, weight_vD: Tensor | None, targets_T: Tensor, rows_N: Tensor, shard: _Shard
    ) -> tuple[Tensor, Tensor]:
        highest_N, sums_3N = _sums(shard.logits(tensor_TX, weight_vD), targets_T, rows_N, shard)
        total_N, weighted_N, target_N = sums_3N
        log_total_N = total_N.log()
        # H = log Z - E[x]: the highest logit, which both sums are relative to, cancels.
        entropy_N = log_total_N - weighted_N / total_N
        results = total_N.new_zeros(len(targets_T)), total_N.new_zeros(len(targets_T))
        # Not target - (highest + log total): a large highest logit would round away the digits of a small logarithm.
        results[0][rows_N] = (target_N - highest_N) - log_total_N
        if shard.has_entropy:
            results[1][rows_N] = entropy_N
        ctx.save_for_backward(tensor_TX, weight_vD, targets_T, rows_N, highest_N + log_total_N, entropy_N)
        ctx.shard = shard
        # None, not zeros, for a result that the loss does not use: then the entropy's terms are not computed.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs_T is None and grad_entropy_T is None:
            return None, None, None, None, None
        tensor_TX, weight_vD, targets_T, rows_N, log_partition_N, entropy_N = ctx.saved_tensors
        shard: _Shard = ctx.shard
        logits_Tv = shard.logits(tensor_TX, weight_vD)
        gradient = _Gradient(logits_Tv, shard)
        # No collective: the saved sum over the whole vocabulary gives each rank the softmax of its slice.
        for rows_C, log_partition_C, entropy_C in zip(
            rows_N.split(shard.chunk_tokens),
            log_partition_N.split(shard.chunk_tokens),
            entropy_N.split(shard.chunk_tokens),
            strict=True,
        ):
            logprobs_Cv = shard.scaled(logits_Tv, rows_C).sub_(log_partition_C[:, None])
            if grad_entropy_T is None:
                assert grad_logprobs_T is not None
                grad_Cv = logprobs_Cv.exp_().mul_(-grad_logprobs_T[rows_C][:, None])
            else:
                grad_Cv = logprobs_Cv.exp()
                # dH/dx = -p (log p + H), dlogprob/dx = 1[target] - p.
                pull_Cv = logprobs_Cv.clamp_(min=LOWEST).add_(entropy_C[:, None]).mul_(-grad_entropy_T[rows_C][:, None])
                if grad_logprobs_T is not None:
                    pull_Cv.sub_(grad_logprobs_T[rows_C][:, None])
                grad_Cv.mul_(pull_Cv)
            if grad_logprobs_T is not None and shard.num_valid:
                # The 1 of the target, on the rank that has it; the others add 0 to their first column.
                column_C, here_C = shard.column_of(targets_T[rows_C])
                at_target_C = grad_logprobs_T[rows_C].where(here_C, 0)
                grad_Cv.scatter_add_(1, column_C[:, None], at_target_C[:, None])
            gradient.add(rows_C, grad_Cv)
        return *gradient.factors(), None, None, None


class _ReverseKL(torch.autograd.Function):
    """Function that saves logits or factors and two numbers a token; its backward computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor_TX: Tensor,
        weight_vD: Tensor | None,
        other_Nv: Tensor,
        rows_N: Tensor,
        shard: _Shard,
        limit_nats: float,
    ) -> Tensor:
        logits_Tv = shard.logits(tensor_TX, weight_vD)
        log_partition_N = _log_partition(logits_Tv, rows_N, shard)
        kl_N = torch.zeros_like(log_partition_N)
        for start in range(0, len(rows_N), shard.chunk_tokens):
            chunk = slice(start, start + shard.chunk_tokens)
            logprobs_Cv, gaps_Cv = _gaps(
                logits_Tv, other_Nv[chunk], rows_N[chunk], log_partition_N[chunk], shard, limit_nats
            )
            kl_N[chunk] = (logprobs_Cv.exp() * gaps_Cv).sum(dim=1)
        if shard.tp.size > 1:
            dist.all_reduce(kl_N, group=shard.tp.group)
        ctx.save_for_backward(tensor_TX, weight_vD, other_Nv, rows_N, log_partition_N, kl_N)
        ctx.shard, ctx.limit_nats = shard, limit_nats
        kl_T = kl_N.new_zeros(len(tensor_TX))
        kl_T[rows_N] = kl_N
        return kl_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        tensor_TX, weight_vD, other_Nv, rows_N, log_partition_N, kl_N = ctx.saved_tensors
        shard: _Shard = ctx.shard
        logits_Tv = shard.logits(tensor_TX, weight_vD)
        gradient = _Gradient(logits_Tv, shard)
        for start in range(0, len(rows_N), shard.chunk_tokens):
            chunk = slice(start, start + shard.chunk_tokens)
            rows_C = rows_N[chunk]
            logprobs_Cv, gaps_Cv = _gaps(
                logits_Tv, other_Nv[chunk], rows_C, log_partition_N[chunk], shard, ctx.limit_nats
            )
            # dKL/dx = p (log p - log q - KL): the derivative of log p itself sums to zero over the vocabulary.
            pull_Cv = logprobs_Cv.exp_().mul_(gaps_Cv.sub_(kl_N[chunk, None])).mul_(grad_T[rows_C][:, None])
            gradient.add(rows_C, pull_Cv)
        return *gradient.factors(), None, None, None, None


class _ForwardKL(torch.autograd.Function):
    """Function that saves logits or factors and two numbers a token; its backward computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor_TX: Tensor,
        weight_vD: Tensor | None,
        ids_NK: Tensor,
        q_NK: Tensor,
        rest_N: Tensor,
        rows_N: Tensor,
        shard: _Shard,
    ) -> Tensor:
        logits_Tv = shard.logits(tensor_TX, weight_vD)
        log_partition_N = _log_partition(logits_Tv, rows_N, shard)
        # Logprobs of the ids, and p of all others: as 1 minus a sum it would lose all digits where it is small.
        found_NX = log_partition_N.new_zeros(len(rows_N), ids_NK.shape[1] + 1)
        for start in range(0, len(rows_N) if shard.num_valid else 0, shard.chunk_tokens):
            chunk = slice(start, start + shard.chunk_tokens)
            logprobs_Cv = shard.scaled(logits_Tv, rows_N[chunk]).clamp_(min=LOWEST).sub_(log_partition_N[chunk, None])
            column_CK, here_CK = shard.column_of(ids_NK[chunk])
            found_NX[chunk, :-1] = logprobs_Cv.gather(1, column_CK).where(here_CK, 0.0)
            found_NX[chunk, -1] = _outside(logprobs_Cv.exp_(), column_CK, here_CK).sum(dim=1)
        if shard.tp.size > 1:
            dist.all_reduce(found_NX, group=shard.tp.group)
        # A rest that is rounded to 0 would make the KL infinite.
        p_rest_N = found_NX[:, -1].clamp(min=torch.finfo(found_NX.dtype).tiny)
        kl_N: Tensor = (torch.special.xlogy(q_NK, q_NK) - q_NK * found_NX[:, :-1]).sum(dim=1)
        kl_N += torch.special.xlogy(rest_N, rest_N / p_rest_N)
        ctx.save_for_backward(tensor_TX, weight_vD, ids_NK, q_NK, rest_N / p_rest_N, rows_N, log_partition_N)
        ctx.shard = shard
        kl_T = kl_N.new_zeros(len(tensor_TX))
        kl_T[rows_N] = kl_N
        return kl_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        tensor_TX, weight_vD, ids_NK, q_NK, ratio_N, rows_N, log_partition_N = ctx.saved_tensors
        shard: _Shard = ctx.shard
        logits_Tv = shard.logits(tensor_TX, weight_vD)
        gradient = _Gradient(logits_Tv, shard)
        for start in range(0, len(rows_N) if shard.num_valid else 0, shard.chunk_tokens):
            chunk = slice(start, start + shard.chunk_tokens)
            rows_C, (column_CK, here_CK) = rows_N[chunk], shard.column_of(ids_NK[chunk])
            p_Cv = shard.scaled(logits_Tv, rows_C).sub_(log_partition_N[chunk, None]).exp_()
            # dKL/dx = p - q at the ids, p (1 - q_rest / p_rest) elsewhere.
            pull_Cv = p_Cv.sub_(_outside(p_Cv.clone(), column_CK, here_CK).mul_(ratio_N[chunk, None]))
            pull_Cv.scatter_add_(1, column_CK, -q_NK[chunk].where(here_CK, 0.0))
            gradient.add(rows_C, pull_Cv.mul_(grad_T[rows_C][:, None]))
        return *gradient.factors(), None, None, None, None, None


def _outside(p_Cv: Tensor, column_CK: Tensor, here_CK: Tensor) -> Tensor:
    """Set p to 0 at the columns of ids that are here, in place: of the others 0 is subtracted from the first column."""
    return p_Cv.scatter_add_(1, column_CK, -p_Cv.gather(1, column_CK).where(here_CK, 0.0))


def _gaps(
    logits_Tv: Logits, other_Cv: Tensor, rows_C: Tensor, log_partition_C: Tensor, shard: _Shard, limit_nats: float
) -> tuple[Tensor, Tensor]:
    """Return log p and log p - log q, at most `limit_nats`, on this slice, both new tensors."""
    logprobs_Cv = shard.scaled(logits_Tv, rows_C).clamp_(min=LOWEST).sub_(log_partition_C[:, None])
    other_Cv = other_Cv.to(device=logprobs_Cv.device, dtype=logprobs_Cv.dtype)
    return logprobs_Cv, (logprobs_Cv - other_Cv).clamp_(max=limit_nats)


def _log_partition(logits_Tv: Logits, rows_N: Tensor, shard: _Shard) -> Tensor:
    """Collective over the shard's ranks: return the log of the sum of e^x over the whole vocabulary, `[N]`."""
    tensor_TX, _ = _factors(logits_Tv)
    no_target_T = torch.zeros(len(tensor_TX), dtype=torch.int64, device=tensor_TX.device)
    highest_N, sums_3N = _sums(logits_Tv, no_target_T, rows_N, shard)
    return highest_N + sums_3N[0].log()


def _sums(logits_Tv: Logits, targets_T: Tensor, rows_N: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Collective over the shard's ranks: return what `_local_sums` returns, of the whole vocabulary."""
    highest_N, sums_3N = _local_sums(logits_Tv, targets_T, rows_N, shard)
    if shard.tp.size > 1:
        # Maxima first: only sums over the same origin can be added, and e^(x - max) does not overflow.
        local_N = highest_N.clone()
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=shard.tp.group)
        if shard.num_valid:
            # Sums of e^y and y e^y become those of y + shift, which is at most 0.
            shift_N = local_N - highest_N
            factor_N = shift_N.exp()
            sums_3N[1] = factor_N * (sums_3N[1] + shift_N * sums_3N[0])
            sums_3N[0] *= factor_N
        dist.all_reduce(sums_3N, group=shard.tp.group)
    return highest_N, sums_3N


def _local_sums(logits_Tv: Logits, targets_T: Tensor, rows_N: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Return the highest logit x of each row, and sums of e^y and y e^y with y = x - highest (of y e^y 0 where no
    entropy is wanted), and the target's x (0 where another rank has it).
    """
    tensor_TX, _ = _factors(logits_Tv)
    exact = tensor_TX.new_empty(0, dtype=_exact(tensor_TX.dtype))
    highest_N = exact.new_full((len(rows_N),), -torch.inf)
    sums_3N = exact.new_zeros((3, len(rows_N)))
    # A slice of nothing but padding: the rank takes part in the collectives with a maximum of -inf and sums of 0.
    if not shard.num_valid:
        return highest_N, sums_3N
    for start in range(0, len(rows_N), shard.chunk_tokens):
        chunk = slice(start, start + shard.chunk_tokens)
        scaled_Cv = shard.scaled(logits_Tv, rows_N[chunk])
        column_C, here_C = shard.column_of(targets_T[rows_N[chunk]])
        sums_3N[2, chunk] = scaled_Cv.gather(1, column_C[:, None]).squeeze(1).where(here_C, 0)
        # A logit of -inf has no probability, and 0 times -inf in the entropy would be NaN.
        scaled_Cv.clamp_(min=LOWEST)
        highest_N[chunk] = scaled_Cv.amax(dim=1)
        scaled_Cv.sub_(highest_N[chunk, None])
        exponential_Cv = scaled_Cv.exp() if shard.has_entropy else scaled_Cv.exp_()
        sums_3N[0, chunk] = exponential_Cv.sum(dim=1)
        if shard.has_entropy:
            sums_3N[1, chunk] = exponential_Cv.mul_(scaled_Cv).sum(dim=1)
    return highest_N, sums_3N


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
