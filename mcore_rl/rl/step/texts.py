"""Texts mixed into the policy's updates: this rank's microbatches for each optimizer step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.config.rl.loss import PtxConfig
from mcore_rl.data.batch import BatchSource, SampleDataset
from mcore_rl.megatron.schedule import Head
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.rl.step.batch import PolicyMicrobatch
from mcore_rl.rl.step.heads import MixedHead
from mcore_rl.train.state import TrainState


class Texts:
    """Adds texts to each update. They depend only on the optimizer step, so a resumed run continues where it was."""

    def __init__(
        self, dataset: SampleDataset, ptx: PtxConfig, state: TrainState, *, vocab_size: int, chunk_tokens: int
    ) -> None:
        """Prepare this rank.

        Args:
            dataset: sequences for all steps of the run.
            ptx: `rl.ptx`.
            state: the policy in training.
            vocab_size: size of the tokenizer's vocabulary; larger ids have no probability.
            chunk_tokens: number of positions with logits in fp32 at a time.
        """
        self._state, self._mesh, self._device = state, state.mesh, state.platform.device
        self._source = BatchSource(dataset, micro_batch=1, dp_rank=self._mesh.dp.rank, dp_size=self._mesh.dp.size)
        self._ptx, self._vocab_size, self._chunk_tokens = ptx, vocab_size, chunk_tokens

    def in_update(
        self, head: Head[Any], microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch], num_tokens: int
    ) -> tuple[Head[Any], Sequence[PolicyMicrobatch | LocalMicrobatch]]:
        """Return a head that computes both losses, and the microbatches followed by the texts' microbatches."""
        texts = self.microbatches(self._state.progress.step)
        mixed = MixedHead(
            head,
            self._mesh,
            vocab_size=self._vocab_size,
            chunk_tokens=self._chunk_tokens,
            weight=self._ptx.coeff * (num_tokens / max(self.num_tokens(texts), 1.0)),
        )
        return mixed, [*microbatches, *texts]

    def microbatches(self, step: int) -> list[LocalMicrobatch]:
        """Return this rank's microbatches of texts for optimizer step `step`, counted from 0."""
        size = self._ptx.sequences
        batch = self._source.microbatches(step * size, size)
        return [localize(microbatch, self._mesh.cp, self._device) for microbatch in batch]

    def num_tokens(self, microbatches: Sequence[LocalMicrobatch]) -> float:
        """Collective over the data- and context-parallel ranks: count the tokens in the cross entropy."""
        total = torch.stack([microbatch.loss_mask_Bs.double().sum() for microbatch in microbatches]).sum()
        dist.all_reduce(total, group=self._mesh.dp_cp.group)
        return total.item()
