"""Completions as packed microbatches, and passes over them without a gradient: logprobs and values."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.data.packing import PackingLimits, padded
from mcore_rl.megatron import vocab
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.routers import routers
from mcore_rl.megatron.schedule import HeadOutput, ReadsDeferredLogits
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import settle_weights
from mcore_rl.model.inputs import LocalMicrobatch, PackedMicrobatch, localize
from mcore_rl.replay.cache import MicrobatchLayout, SampleSpan
from mcore_rl.rl.types import SampleShape, TrainedSample


class BatchTotals(NamedTuple):
    """World-wide totals of one optimizer step."""

    num_tokens: int
    """Trained tokens."""
    num_sequences: int
    """Sequences with at least one trained token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyMicrobatch(PackedMicrobatch):
    """One packed sequence of samples, reduced to the `T` positions on this context-parallel rank. Index t of a tensor
    `[T]` belongs to token t + 1, which is predicted at position t.
    """

    samples: tuple[int, ...]
    """Indices in the rollout batch, in the order of the packed sequence."""
    spans: tuple[SampleSpan, ...]
    """Segments of the samples, in order; everything after the last one is padding."""
    mask_T: Tensor
    """bool: positions that are trained on."""
    completion_mask_T: Tensor
    """bool: positions that predict a sampled token of a completion, whether or not the completion is trained on. An
    environment's tokens are excluded."""
    completion_rows_N: Tensor
    """int64: indices of the positions in `completion_mask_T`."""
    sequence_T: Tensor
    """int64: index in `samples` of each position's sample; arbitrary at positions that are not trained on."""
    place_T: Tensor
    """int64: index of each position among those of its sample; 0 at padding. The position for the rotary embedding
    begins anew in each segment."""
    lengths_N: Tensor
    """int64: number of trained tokens in each whole sample, summed over context-parallel ranks."""
    rollout_logprobs_T: Tensor
    is_stale_T: Tensor
    """bool: positions that predict a stale token, sampled by weights older than the current weights."""
    old_logprobs_T: Tensor | None = None
    """Logprobs under the old policy. None if the policy still is the old policy, or if this stage has no logprobs."""
    reference_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    """Logprobs under each sample's teacher. None without a teacher, or if this stage has no logprobs."""
    teacher_vocabulary_Nv: Tensor | None = None
    """The teacher's logprobs over this rank's slice of the vocabulary at the positions of `completion_mask_T`, in main
    memory. None unless requested."""
    teacher_TW: Tensor | None = None
    """`Completion.teacher_CW` at each position, 0 at positions that predict no token of a completion."""
    values_T: Tensor | None = None
    """The critic's values before its updates. None without a critic, or if this stage has no values."""
    returns_T: Tensor | None = None
    """Targets of the critic's values."""
    advantages_T: Tensor | None = None
    loss_weights_T: Tensor | None = None

    def with_advantages(self, advantages: Mapping[int, Tensor], loss_weights_N: Tensor) -> "PolicyMicrobatch":
        """Return the microbatch with advantages and the samples' loss weights at trained positions; zeros elsewhere."""
        if not self.samples:
            zeros_T = torch.zeros_like(self.rollout_logprobs_T)
            return replace(self, advantages_T=zeros_T, loss_weights_T=zeros_T)
        weights_N = loss_weights_N[list(self.samples)].to(self.rollout_logprobs_T)
        return replace(
            self,
            advantages_T=self._at_trained_positions(advantages),
            loss_weights_T=weights_N[self.sequence_T].where(self.mask_T, 0.0),
        )

    def with_returns(self, returns: Mapping[int, Tensor]) -> "PolicyMicrobatch":
        """Return the microbatch with returns, `[positions]` by sample index, at trained positions; zeros elsewhere."""
        if not self.samples:
            return replace(self, returns_T=torch.zeros_like(self.rollout_logprobs_T))
        return replace(self, returns_T=self._at_trained_positions(returns))

    def _at_trained_positions(self, numbers: Mapping[int, Tensor]) -> Tensor:
        """Look up `numbers` by sample and position at trained positions; zeros elsewhere. Returns `[T]`."""
        like = self.rollout_logprobs_T
        table_NP = pad_sequence([numbers[sample] for sample in self.samples], batch_first=True).to(like)
        return table_NP[self.sequence_T, self.place_T].where(self.mask_T, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The samples of one optimizer step."""

    microbatches: list[PolicyMicrobatch]
    """This rank's packed sequences."""
    totals: BatchTotals
    """Trained tokens and sequences in the world."""
    loss_weights_N: Tensor
    """float64: weight of each sample's tokens in the loss; zero for samples of the rollout in other minibatches."""
    num_samples: int
    """Samples in the world."""
    num_positions: int
    """Positions in the world's samples, without padding."""
    mean_length: float
    """Mean sample length over positions (sum of squared lengths / sum of lengths); attention's FLOPs depend on it."""
    is_on_policy: bool = False
    """Whether the old policy itself makes its only update, without an earlier pass for old logprobs."""

    def with_numbers(self, field: str, numbers: Sequence[Tensor]) -> "Minibatch":
        """Return the minibatch with a tensor `[T]` per microbatch, such as logprobs, stored in `field`. Stages before
        the last compute no output: they pass an empty sequence and get the same minibatch back.
        """
        if not numbers:
            return self
        fields: list[dict[str, Any]] = [{field: numbers_T} for numbers_T in numbers]
        paired = zip(self.microbatches, fields, strict=True)
        return replace(self, microbatches=[replace(microbatch, **values) for microbatch, values in paired])


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Advantages of the samples that this rank trains on. Index t of a tensor `[positions]` belongs to token t + 1 of
    the sample, which is predicted at position t.
    """

    of_samples: Mapping[int, Tensor]
    """Advantages `[positions]` by sample index."""
    returns: Mapping[int, Tensor] = field(default_factory=dict)
    """Returns `[positions]` by sample index, the critic's targets; empty without a critic."""
    metrics: Sequence[Metric] = ()
    """Statistics of values, returns and advantages over the world; empty without a critic."""


def at_positions(numbers_C: Tensor, shape: SampleShape) -> Tensor:
    """Scatter numbers of a completion's sampled tokens to the sample's positions, with zeros elsewhere."""
    numbers_P = numbers_C.new_zeros(shape.num_positions)
    numbers_P[shape.sampled_positions] = numbers_C[: shape.num_sampled]
    return numbers_P


def samples_of(minibatches: Sequence[Minibatch]) -> list[int]:
    """Return the indices of all samples that this rank trains on, in order."""
    return sorted(
        {index for minibatch in minibatches for microbatch in minibatch.microbatches for index in microbatch.samples}
    )


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the chunks have the last step's weights and are in evaluation mode (no dropout, no counters)."""
    modes = [chunk.training for chunk in chunks]
    settle_weights(chunks)
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)


@contextmanager
def without_capacity(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context without a limit on the experts' capacity, for generation: a completion must not depend on other requests
    in its batch, and inference servers do not drop tokens either.
    """
    configs = {id(router.config): router.config for chunk in chunks for _, router in routers(chunk)}
    factors = {key: config.moe_expert_capacity_factor for key, config in configs.items()}
    for config in configs.values():
        config.moe_expert_capacity_factor = None
    try:
        yield
    finally:
        for key, config in configs.items():
            config.moe_expert_capacity_factor = factors[key]


def make_microbatch(
    samples: Mapping[int, TrainedSample], indices: Sequence[int], limits: PackingLimits, cp: Axis, device: torch.device
) -> PolicyMicrobatch:
    """Pack the samples with these indices end to end; without indices, return a microbatch of padding only."""
    chosen = [samples[index] for index in indices]
    shapes = [sample.shape for sample in chosen]
    spans = [
        SampleSpan(
            index, size, padded(size, limits.sample_multiple), _first_current(shape, end - size, end), end - size
        )
        for index, shape in zip(indices, shapes, strict=True)
        for size, end in zip(shape.segment_positions, accumulate(shape.segment_positions), strict=True)
    ]
    num_filled = sum(span.num_positions for span in spans)
    length = min(limits.max_tokens, padded(max(num_filled, 1), limits.multiple))
    if limits.is_fixed:
        length = limits.max_tokens
    # The remainder is a span of its own, so that no sample attends to it.
    lengths = [span.num_positions for span in spans] + ([length - num_filled] if num_filled < length else [])
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    _, positions_S = _groups(torch.tensor(lengths))
    # All samples at once: the overhead of a torch call per sample would exceed its work.
    all_tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(sample.tokens_T for sample in chosen)])
    which_t, offset_t = _groups(torch.tensor([span.num_tokens for span in spans], dtype=torch.int64))
    here_t = bounds[:-1].long()[which_t] + offset_t
    source_t = torch.arange(len(which_t)) + which_t  # each earlier segment has one more token than inputs
    tokens_S, labels_S, sequence_S, place_S = torch.zeros(4, length, dtype=torch.int64)
    tokens_S[here_t], labels_S[here_t] = all_tokens[source_t], all_tokens[source_t + 1]
    size_N = torch.tensor([shape.num_positions for shape in shapes], dtype=torch.int64)
    sample_t, place_t = _groups(size_N)
    sequence_S[here_t], place_S[here_t] = sample_t, place_t
    is_padding_S = torch.ones(length, dtype=torch.bool)
    is_padding_S[here_t] = False
    columns = [(shape.num_prompt_tokens, shape.num_completion_tokens, shape.is_trained) for shape in shapes]
    prompt_N, completion_N, is_trained_N = torch.tensor(columns, dtype=torch.int64).view(-1, 3).unbind(1)
    which_c, _ = _groups(completion_N)
    # The first token of the completion is predicted at the last position of the prompt; nothing predicts the first
    # token of a later segment.
    is_label_c = torch.ones(len(which_c), dtype=torch.bool)
    starts = [(n, start) for n, shape in enumerate(shapes) for start in shape.segments]
    at_n, start_n = torch.tensor(starts, dtype=torch.int64).view(-1, 2).unbind(1)
    is_label_c[(completion_N.cumsum(0) - completion_N)[at_n] + start_n] = False
    completion_l = here_t[place_t >= prompt_N[sample_t] - 1]
    which_l = which_c[is_label_c]
    none = torch.zeros(0, dtype=torch.bool)
    sampled_l = torch.cat([none, *(shape.sampled_C for shape in shapes)])[is_label_c]
    stale_l = torch.cat([none, *(shape.stale_C for shape in shapes)])[is_label_c]
    logprobs_l = torch.cat([torch.zeros(0), *(sample.rollout_logprobs_C for sample in chosen)])[is_label_c]
    taught = [sample.teacher_CW for sample in chosen if sample.teacher_CW is not None]
    mask_S, completion_mask_S, stale_S, rollout_logprobs_S = torch.zeros(4, length)
    in_loss_l = sampled_l & (is_trained_N[which_l] > 0)
    num_trained_N = torch.zeros(max(len(chosen), 1), dtype=torch.int64).index_add_(0, which_l, in_loss_l.long())
    mask_S[completion_l], completion_mask_S[completion_l] = in_loss_l.float(), sampled_l.float()
    stale_S[completion_l] = stale_l.float()
    rollout_logprobs_S[completion_l] = logprobs_l
    teacher_SW = torch.zeros(length, taught[0].shape[1] if taught else 0)
    if taught:
        teacher_SW[completion_l] = torch.cat(taught)[is_label_c]
    inputs = localize(
        Microbatch(
            tokens_BS=tokens_S[None],
            labels_BS=labels_S[None],
            loss_mask_BS=mask_S[None],
            position_ids_BS=positions_S[None],
            packed=PackedSpans(cu_seqlens=bounds, max_length=max(lengths)),
            is_padding_BS=is_padding_S[None],
        ),
        cp,
        device,
    )

    def local(full_S: Tensor) -> Tensor:
        return full_S if cp.size == 1 else vocab.zigzag_spans(full_S[None], lengths, cp)[0]

    def on_this_rank(full_S: Tensor) -> Tensor:
        return to_device(local(full_S), device)

    return PolicyMicrobatch(
        inputs=inputs,
        samples=tuple(indices),
        spans=tuple(spans),
        mask_T=inputs.loss_mask_Bs[0] > 0,
        completion_mask_T=on_this_rank(completion_mask_S) > 0,
        completion_rows_N=to_device(local(completion_mask_S).nonzero()[:, 0], device),
        sequence_T=on_this_rank(sequence_S),
        place_T=on_this_rank(place_S),
        lengths_N=to_device(num_trained_N, device),
        rollout_logprobs_T=on_this_rank(rollout_logprobs_S),
        is_stale_T=on_this_rank(stale_S) > 0,
        teacher_TW=on_this_rank(teacher_SW) if taught else None,
    )


def _first_current(shape: SampleShape, start: int, end: int) -> int:
    """Return the first position with current routes in the segment `start` to `end`; 0 if all of it is current."""
    if not shape.stale_spans:
        return 0
    before = torch.tensor([shape.num_prompt_tokens - 1 + stale_end for _, stale_end in shape.stale_spans])
    found = torch.searchsorted(shape.input_P, before).tolist()
    return max((first for first in found if start < first <= end), default=0)


def _groups(count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each element's group, and its index in the group, for consecutive groups of `count_N` elements."""
    group_t = torch.arange(len(count_N)).repeat_interleave(count_N)
    return group_t, torch.arange(len(group_t)) - (count_N.cumsum(0) - count_N)[group_t]


def exchange_samples(
    generated: Mapping[int, TrainedSample],
    shapes: Mapping[int, SampleShape],
    wanted: Sequence[Sequence[int]],
    dp_cp: Axis,
    device: torch.device,
    *,
    teacher_width: int = 0,
) -> dict[int, TrainedSample]:
    """Collective over `dp_cp`: bring each sample from the replica that generated it to the ranks that train on it;
    return those of `wanted[dp_cp.rank]`, by index. `shapes` has all samples on every rank, so that no sizes are sent;
    `teacher_width` is the width of all `teacher_CW` (0: None).
    """
    if dp_cp.size == 1:
        return {index: generated[index] for index in wanted[0]}
    outgoing = [[index for index in indices if index in generated] for indices in wanted]
    incoming = [
        [index for index in wanted[dp_cp.rank] if shapes[index].replica_rank == rank] for rank in range(dp_cp.size)
    ]

    def num_words(index: int) -> int:
        # In words of 4 bytes: all tokens, and a float32 logprob and a teacher's numbers per completion token.
        return shapes[index].num_tokens + (1 + teacher_width) * shapes[index].num_completion_tokens

    def words_of(sample: TrainedSample) -> list[Tensor]:
        numbers = [sample.rollout_logprobs_C, *([] if sample.teacher_CW is None else [sample.teacher_CW.flatten()])]
        return [sample.tokens_T.int(), *(number.view(torch.int32) for number in numbers)]

    sent = [torch.cat(words_of(generated[index])) for indices in outgoing for index in indices]
    words = torch.cat(sent) if sent else torch.zeros(0, dtype=torch.int32)
    sizes_in = [sum(map(num_words, indices)) for indices in incoming]
    sizes_out = [sum(map(num_words, indices)) for indices in outgoing]
    received = torch.empty(sum(sizes_in), dtype=torch.int32, device=device)
    dist.all_to_all_single(received, words.to(device), sizes_in, sizes_out, group=dp_cp.group)
    order = [index for indices in incoming for index in indices]
    parts = received.cpu().split([num_words(index) for index in order])  # one copy to the host for all samples
    found = {}
    for index, part in zip(order, parts, strict=True):
        num_tokens, num_completion = shapes[index].num_tokens, shapes[index].num_completion_tokens
        tokens_T, logprobs_C, teacher_c = part.split([num_tokens, num_completion, teacher_width * num_completion])
        # Copies: a view of a few words would keep everything that was received in memory.
        found[index] = TrainedSample(
            tokens_T=tokens_T.long(),
            rollout_logprobs_C=logprobs_C.clone().view(torch.float32),
            shape=shapes[index],
            teacher_CW=teacher_c.clone().view(torch.float32).view(-1, teacher_width) if teacher_width else None,
        )
    return found


def layout_of(microbatch: PolicyMicrobatch | LocalMicrobatch, *, of_engine: bool = False) -> MicrobatchLayout:
    """Return the layout of a packed microbatch: the segments of its samples, then padding; a text counts as padding and
    is routed live. With `of_engine`, spans mark leading positions with the engine's routes of older weights.
    """
    row_length = microbatch.shape[1]
    if isinstance(microbatch, LocalMicrobatch):
        return MicrobatchLayout(rows=((SampleSpan(-1, 0, row_length),),), row_length=row_length, packed=True)
    spans = [span if of_engine else replace(span, first_current=0) for span in microbatch.spans]
    filled = sum(span.num_positions for span in spans)
    if filled < row_length:
        spans.append(SampleSpan(-1, 0, row_length - filled))
    return MicrobatchLayout(rows=(tuple(spans),), row_length=row_length, packed=True)


def limits_on(mesh: Mesh, max_tokens: int, multiple: int) -> PackingLimits:
    """Return the limits of packed sequences on a mesh; the other arguments are fields of `PackingLimits`."""
    return PackingLimits(
        max_tokens=max_tokens,
        multiple=multiple,
        sample_multiple=mesh.config.zigzag,
        microbatch_multiple=mesh.pp.size if mesh.config.vpp > 1 else 1,
        is_fixed=mesh.pp.size > 1,
    )


class PassHead:
    """Base of the heads of passes without a gradient, which have outputs and no loss."""

    wants_losses = False

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return 0: there is no loss."""
        return microbatch.mask_T.new_zeros((), dtype=torch.int)


class LogprobHead(PassHead, ReadsDeferredLogits):
    """Outputs `logprobs` `[T]` of completion tokens at the sampling temperature, in nats; zeros elsewhere. Untrained
    completions are included: a KL in the reward applies to every completion of a group.
    """

    def __init__(self, mesh: Mesh, vocab_size: int, *, temperature: float, chunk_tokens: int) -> None:
        self._mesh, self.vocab_size = mesh, vocab_size
        settings = {"temperature": temperature, "chunk_tokens": chunk_tokens}
        self._reading: dict[str, Any] = {"vocab_size": vocab_size, **settings}

    def logprobs_and_entropy(
        self, microbatch: PolicyMicrobatch, output: vocab.Logits, rows_N: Tensor
    ) -> vocab.TokenStatistics:
        """Collective over the tensor-parallel ranks: compute logprobs and entropy `[T]` from logits `[1, T, v]` at the
        positions `rows_N`; zeros elsewhere.
        """
        return vocab.logprobs_and_entropy(
            output[0], microbatch.inputs.labels_Bs[0], self._mesh.tp, rows_N=rows_N, **self._reading
        )

    def vocabulary(self, microbatch: PolicyMicrobatch, output: vocab.Logits) -> Tensor:
        """Collective over the tensor-parallel ranks: compute logprobs `[N, v]` over this rank's slice of the vocabulary
        at positions that predict a sampled completion token, float32 in main memory.
        """
        return vocab.vocabulary_logprobs(output[0], microbatch.completion_rows_N, self._mesh.tp, **self._reading).cpu()

    def teacher_kl(self, microbatch: PolicyMicrobatch, output: vocab.Logits, *, limit_nats: float) -> Tensor | None:
        """Collective over the tensor-parallel ranks: KL(policy || teacher) over the vocabulary, `[T]` with gradient;
        None without `teacher_vocabulary_Nv`. Each difference of logprobs is limited to +-`limit_nats`.
        """
        if microbatch.teacher_vocabulary_Nv is None:
            return None
        return vocab.reverse_kl(
            output[0],
            microbatch.teacher_vocabulary_Nv,
            microbatch.completion_rows_N,
            self._mesh.tp,
            **self._reading,
            limit_nats=limit_nats,
        )

    def teacher_forward_kl(self, microbatch: PolicyMicrobatch, output: vocab.Logits) -> Tensor | None:
        """Collective over the tensor-parallel ranks: KL(teacher || policy) over the teacher's likeliest tokens and all
        others as one, `[T]` with gradient, at trained positions; None if `teacher_TW` has no likeliest tokens.
        """
        if microbatch.teacher_TW is None or microbatch.teacher_TW.shape[1] == 1:
            return None
        rows_N = microbatch.inputs.rows_N
        ids_NK, logprobs_NK = microbatch.teacher_TW[rows_N, 1:].chunk(2, dim=1)
        return vocab.forward_kl(output[0], ids_NK.long(), logprobs_NK, rows_N, self._mesh.tp, **self._reading)

    def __call__(self, microbatch: PolicyMicrobatch, output: vocab.Logits) -> HeadOutput:
        """Return the logprobs of one microbatch; there is no loss."""
        logprobs_T = self.logprobs_and_entropy(microbatch, output, microbatch.completion_rows_N).logprobs_T.detach()
        zero = logprobs_T.new_zeros((), dtype=torch.float32)
        return HeadOutput(loss=zero, count=zero.int(), outputs={"logprobs": logprobs_T})


class ValueHead(PassHead):
    """Outputs `values` `[T]`, float32: the critic's score at each position, before it sees the predicted token."""

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """Return the values of one microbatch, from scores `[1, T, 1]`; there is no loss."""
        zero = output.new_zeros((), dtype=torch.float32)
        return HeadOutput(loss=zero, count=zero.int(), outputs={"values": output[0, :, 0].detach().float()})
