"""Texts that are mixed into the policy's updates: this rank's microbatches of each optimizer step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mcore_rl.data.loader import BatchSource, SampleDataset
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.parallel.mesh import Mesh


class Texts:
    """Sequences by optimizer step alone, so that a run that resumes reads on where it was."""

    def __init__(
        self, dataset: SampleDataset, sequences_per_step: int, mesh: Mesh, device: torch.device
    ) -> None:
        """Take sequences for all steps of the run, and how many of them a step has over all ranks."""
        self._source = BatchSource(dataset, micro_batch=1, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size)
        self._sequences_per_step = sequences_per_step
        self._mesh, self._device = mesh, device

    def microbatches(self, step: int) -> list[LocalMicrobatch]:
        """Return this rank's microbatches of optimizer step `step`, counted from 0."""
        size = self._sequences_per_step
        batch = self._source.microbatches(step * size, size)
        return [localize(one, self._mesh.cp, self._device) for one in batch]

    def num_tokens(self, microbatches: Sequence[LocalMicrobatch]) -> float:
        """Collective over the data- and context-parallel ranks: return the tokens that count in the cross entropy."""
        total = torch.stack([one.loss_mask_Bs.double().sum() for one in microbatches]).sum()
        dist.all_reduce(total, group=self._mesh.dp_cp.group)
        return total.item()
