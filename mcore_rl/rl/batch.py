"""Completions as the microbatches that this rank trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.data.packing import padded
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.parallel.mesh import Axis
from mcore_rl.parallel.sequence import zigzag_spans
from mcore_rl.rl.plan import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSample:
    """One prompt with one completion, `T` tokens."""

    tokens_T: Tensor
    """int64, on the CPU."""
    num_prompt: int
    """Tokens of the prompt."""
    engine_logprobs_C: Tensor
    """float32: of the completion's tokens, as sampled."""
    is_trained: bool
    """False: its tokens take no part in the loss."""

    @property
    def num_positions(self) -> int:
        """The last token is only a label."""
        return len(self.tokens_T) - 1

    @property
    def num_trained(self) -> int:
        """Tokens in the loss."""
        return len(self.engine_logprobs_C) if self.is_trained else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyMicrobatch:
    """This rank's positions `T` of one row of samples, with all that the policy's objective needs.

    The fact of a token stands where the model predicts it, one position before it.
    """

    inputs: LocalMicrobatch
    samples: tuple[int, ...]
    """Their numbers in the rollout batch, in the row's order."""
    spans: tuple[tuple[int, int], ...]
    """Of each sample in the whole row: positions, and with padding. What is left of the row belongs to nobody."""
    mask_T: Tensor
    sequence_T: Tensor
    lengths_N: Tensor
    """Trained tokens of each whole sample."""
    engine_logprobs_T: Tensor
    old_logprobs_T: Tensor | None = None
    """None: the policy's own are the old ones."""
    reference_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    weights_T: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See PassInput."""
        return self.inputs.shape

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """See PassInput."""
        return self.inputs.model_inputs(with_labels=with_labels)

    def weighted(self, advantages_N: Tensor, weights_N: Tensor) -> "PolicyMicrobatch":
        """With the advantage and the weight of each of its samples, both on the CPU."""
        if not self.samples:
            zeros_T = torch.zeros_like(self.engine_logprobs_T)
            return replace(self, advantages_T=zeros_T, weights_T=zeros_T)
        mine = list(self.samples)
        both_2N = torch.stack([advantages_N[mine], weights_N[mine]]).to(self.engine_logprobs_T)
        advantages_T, weights_T = both_2N[:, self.sequence_T].where(self.mask_T, 0.0)
        return replace(self, advantages_T=advantages_T, weights_T=weights_T)

    def weighted_tokens(self, advantages: Mapping[int, Tensor], weights_N: Tensor) -> "PolicyMicrobatch":
        """As `weighted`, with an advantage for each position of each of its samples, by their numbers."""
        weighted = self.weighted(torch.zeros_like(weights_N), weights_N)
        if not self.samples:
            return weighted
        table_NP = pad_sequence([advantages[number] for number in self.samples], batch_first=True)
        positions_T = self.inputs.position_ids_Bs[0].clamp(max=table_NP.shape[1] - 1)
        advantages_T = table_NP.to(self.engine_logprobs_T)[self.sequence_T, positions_T]
        return replace(weighted, advantages_T=advantages_T.where(self.mask_T, 0.0))


def make_microbatch(
    samples: Mapping[int, TrainedSample], numbers: Sequence[int], rows: Rows, cp: Axis, device: torch.device
) -> PolicyMicrobatch:
    """One row of the samples with these numbers; without any, a row of padding."""
    chosen = [samples[number] for number in numbers]
    spans = [(sample.num_positions, padded(sample.num_positions, rows.span_multiple)) for sample in chosen]
    filled = sum(span for _, span in spans)
    length = rows.length if rows.equally_long else min(rows.length, padded(max(filled, 1), rows.unit))
    ids_2S = torch.zeros(2, length, dtype=torch.int64)  # tokens, labels
    positions_S, sequence_S = torch.zeros(2, length, dtype=torch.int64)
    facts_2S = torch.zeros(2, length)  # mask, engine's logprobs
    is_padding_S = torch.ones(length, dtype=torch.bool)
    begin = 0
    for place, (sample, (num_positions, span)) in enumerate(zip(chosen, spans, strict=True)):
        here = slice(begin, begin + num_positions)
        ids_2S[0, here], ids_2S[1, here] = sample.tokens_T[:-1], sample.tokens_T[1:]
        is_padding_S[here] = False
        said = slice(begin + sample.num_prompt - 1, begin + num_positions)
        facts_2S[0, said], facts_2S[1, said] = float(sample.is_trained), sample.engine_logprobs_C
        positions_S[begin : begin + span] = torch.arange(span)
        sequence_S[begin : begin + span] = place
        begin += span
    positions_S[begin:] = torch.arange(length - begin)
    lengths = [span for _, span in spans] + ([length - begin] if begin < length else [])
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    inputs = localize(
        Microbatch(
            tokens_BS=ids_2S[:1],
            labels_BS=ids_2S[1:],
            loss_mask_BS=facts_2S[:1],
            position_ids_BS=positions_S[None],
            packed=PackedSpans(cu_seqlens=bounds, max_length=max(lengths)),
            is_padding_BS=is_padding_S[None],
        ),
        cp,
        device,
    )

    def mine(full_S: Tensor) -> Tensor:
        return zigzag_spans(full_S[None], lengths, cp)[0].to(device, non_blocking=True)

    trained = [sample.num_trained for sample in chosen] or [0]
    return PolicyMicrobatch(
        inputs=inputs,
        samples=tuple(numbers),
        spans=tuple(spans),
        mask_T=inputs.loss_mask_Bs[0] > 0,
        sequence_T=mine(sequence_S),
        lengths_N=torch.tensor(trained).to(device, non_blocking=True),
        engine_logprobs_T=mine(facts_2S[1]),
    )


def deliver(
    held: Mapping[int, TrainedSample],
    shapes: Mapping[int, "SampleShape"],
    wanted: Sequence[Sequence[int]],
    dp_cp: Axis,
    device: torch.device,
) -> dict[int, TrainedSample]:
    """Collective over `dp_cp`: the samples that this rank wants, from the ranks that hold them.

    `wanted` has the numbers for every rank of `dp_cp`; `shapes` is of all samples and equal on all ranks. A sample
    goes only where it is wanted.
    """
    if dp_cp.size == 1:
        return {number: held[number] for number in wanted[0]}
    outgoing = [[number for number in numbers if number in held] for numbers in wanted]
    incoming = [
        [number for number in wanted[dp_cp.rank] if shapes[number].holder == rank]
        for rank in range(dp_cp.size)
    ]
    sent = [_as_words(held[number]) for numbers in outgoing for number in numbers]
    words = torch.cat(sent) if sent else torch.zeros(0, dtype=torch.int32)
    sizes_in = [sum(shapes[number].num_words for number in numbers) for numbers in incoming]
    sizes_out = [sum(shapes[number].num_words for number in numbers) for numbers in outgoing]
    received = torch.empty(sum(sizes_in), dtype=torch.int32, device=device)
    dist.all_to_all_single(received, words.to(device), sizes_in, sizes_out, group=dp_cp.group)
    order = [number for numbers in incoming for number in numbers]
    pieces = received.cpu().split([shapes[number].num_words for number in order])
    return {number: _from_words(piece, shapes[number]) for number, piece in zip(order, pieces, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """What all ranks know of a sample."""

    holder: int
    """Rank, of the data- and context-parallel ones, whose replica made it."""
    num_prompt: int
    num_completion: int
    is_trained: bool

    @property
    def num_positions(self) -> int:
        """See TrainedSample."""
        return self.num_prompt + self.num_completion - 1

    @property
    def num_trained(self) -> int:
        """See TrainedSample."""
        return self.num_completion if self.is_trained else 0

    @property
    def num_words(self) -> int:
        """Of 4 bytes, on the way."""
        return self.num_prompt + 2 * self.num_completion


def _as_words(sample: TrainedSample) -> Tensor:
    return torch.cat([sample.tokens_T.int(), sample.engine_logprobs_C.view(torch.int32)])


def _from_words(words: Tensor, shape: SampleShape) -> TrainedSample:
    num_tokens = shape.num_prompt + shape.num_completion
    return TrainedSample(
        tokens_T=words[:num_tokens].long(),
        num_prompt=shape.num_prompt,
        engine_logprobs_C=words[num_tokens:].clone().view(torch.float32),
        is_trained=shape.is_trained,
    )
