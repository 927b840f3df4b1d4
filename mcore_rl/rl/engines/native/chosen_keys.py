"""Whether training chooses the keys that the engine chose: attention by an indexer, at a few positions of a completion.

Replaying the choice would take a thousand times the memory of experts' routes. Both sides make it by one function, and
differ by rounding alone; how often they do is measured on one completion of a replica after each update of the weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import HeadOutput, ReadsDeferredLogits, run_pass
from mcore_rl.model.build import unwrap
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.model.layers.indexed import IndexedLatentAttention
from mcore_rl.rl.engines.native.scheduler import Draft, Step

NUM_POSITIONS = 64
"""Most positions of a completion that are compared."""


class ChosenKeys:
    """The choices of keys of one completion while an engine generates it, in the layers of this stage with an indexer.

    The completion is the first of a call. Its positions are spread evenly from the first that has a choice to the last
    that it can have.
    """

    def __init__(self, chunks: Sequence[nn.Module], draft: Draft | None, longest: int, topk: int) -> None:
        """Watch a completion; None on a replica without any, which takes part in the pass all the same."""
        self._chunks = chunks
        self._draft = draft
        stride = max(1, -(-(longest - topk) // NUM_POSITIONS))
        self._positions = frozenset(range(topk, longest, stride))
        self._chosen: dict[int, list[Tensor]] = {}

    def rows(self, step: Step, active: Sequence[Draft]) -> dict[int, int]:
        """Return the index among the step's tokens of each watched position."""
        return {
            row.position: index
            for index, row in enumerate(step.rows)
            if row.position in self._positions and active[row.slot] is self._draft
        }

    def add(self, rows: dict[int, int], kept: Sequence[Tensor | None]) -> None:
        """Add the choices of a step, `[T, 1, topk]` of each layer, at the rows of watched positions."""
        for position, index in rows.items():
            chosen = [choice[index, 0].cpu() for choice in kept if choice is not None]
            assert len(chosen) == len(kept), (
                "a token that sees more than topk keys has a choice in each layer"
            )
            self._chosen[position] = chosen

    def overlap(self, mesh: Mesh, multiple: int) -> Tensor:
        """Collective over this model's ranks, and its experts': compare with a training pass over the completion.

        Args:
            mesh: The mesh, without context parallelism.
            multiple: Number that divides the length of a training pass.

        Returns:
            Sum of the shares of chosen keys that both have, and their number, float64 `[2]`: one for each position and
            layer of this stage.
        """
        draft = self._draft
        tokens = [0] if draft is None else [*draft.prompt_T, *draft.tokens_T][:-1]
        known = sorted(position for position in self._chosen if position < len(tokens))
        microbatch = _microbatch(tokens, multiple, mesh, next(self._chunks[0].parameters()).device)
        with keeping_choices(self._chunks) as attentions:
            run_pass(self._chunks, [microbatch], _NoHead(), backward=False)
            trained = [attention.kept_choice for attention in attentions]
        shares = torch.zeros(2, dtype=torch.float64)
        for layer, choice in enumerate(trained if known else ()):
            assert choice is not None, "a training pass chooses where the engine did"
            theirs_PK = torch.stack([self._chosen[position][layer] for position in known]).long()
            masks = [
                torch.zeros(len(known), len(tokens), dtype=torch.bool).scatter(1, of_side_PK, True)
                for of_side_PK in (theirs_PK, choice[known, 0].cpu().long())
            ]
            shares[0] += (masks[0] & masks[1]).sum() / theirs_PK.shape[1]
            shares[1] += len(known)
        return shares


@contextmanager
def keeping_choices(chunks: Sequence[nn.Module]) -> Iterator[list[IndexedLatentAttention]]:
    """Inside, the layers with an indexer keep the choice of their last forward pass in `kept_choice`."""
    attentions = [
        layer.self_attention
        for chunk in chunks
        for layer in unwrap(chunk).decoder.layers
        if layer.self_attention.core_attention.indexer is not None
    ]
    for attention in attentions:
        attention.keeps_choice = True
    try:
        yield attentions
    finally:
        for attention in attentions:
            attention.keeps_choice, attention.kept_choice = False, None


class _NoHead(ReadsDeferredLogits):
    """Takes nothing from a pass."""

    wants_losses = False

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        return microbatch.tokens_Bs.new_zeros(())

    def __call__(self, microbatch: LocalMicrobatch, output: object) -> HeadOutput:
        zero = microbatch.loss_mask_Bs.new_zeros(())
        return HeadOutput(loss=zero, count=self.count(microbatch), outputs={})


def _microbatch(tokens: Sequence[int], multiple: int, mesh: Mesh, device: torch.device) -> LocalMicrobatch:
    """Return a packed row of one sequence, filled up to a multiple as rows of training are."""
    lengths = len(tokens), -len(tokens) % multiple
    row_BS = torch.tensor([[*tokens, *[0] * lengths[1]]])
    at_BS = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = [0, lengths[0], *([sum(lengths)] if lengths[1] else [])]
    whole = Microbatch(
        tokens_BS=row_BS,
        labels_BS=row_BS,
        loss_mask_BS=torch.zeros(row_BS.shape),
        position_ids_BS=at_BS,
        packed=PackedSpans(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_length=max(lengths)),
    )
    return localize(whole, mesh.cp, device)
