"""Batches by sample cursor, which alone decides a step's samples, and the sequences of a forward pass."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSpans:
    """Boundaries of the sequences packed into a microbatch's concatenated rows; attention does not cross them."""

    cu_seqlens: Tensor
    """Cumulative lengths, int32 [spans + 1] on the CPU: 0, the first length, ..., all positions of all rows."""
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Rows of one forward pass: whole sequences on the CPU, `[batch, seq]`; context parallelism splits them later."""

    tokens_BS: Tensor
    """Token ids, int64."""
    labels_BS: Tensor
    """Token ids, int64: labels_BS[b, s] is the token after tokens_BS[b, s]."""
    loss_mask_BS: Tensor
    """Loss weight of each position, float32."""
    position_ids_BS: Tensor
    """Positions for the rotary embedding, int64; they start from 0 in each packed sequence."""
    packed: PackedSpans | None = None
    """Boundaries inside packed rows; None if every row is one sequence."""
    is_padding_BS: Tensor | None = None
    """bool: True at padding positions, which router statistics ignore; None without padding."""


class SampleDataset(Protocol):
    """Samples by index, as mcore's GPTDataset and BlendedDataset give them; PackedSequences gives more keys."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class BatchSource:
    """A source of this data-parallel rank's microbatches for any step.

    The step at cursor c with a global batch of b has samples c .. c+b-1, in dp equal runs in order, each split into
    microbatches: set and order do not depend on the mesh. The cursor is the only state.
    """

    def __init__(self, dataset: SampleDataset, *, micro_batch: int, dp_rank: int = 0, dp_size: int = 1) -> None:
        if micro_batch < 1 or not 0 <= dp_rank < dp_size:
            raise ConfigError(
                f"micro_batch={micro_batch} with data-parallel rank {dp_rank} of {dp_size}: wanted a "
                "micro-batch of at least 1 and a rank below the size."
            )
        self.dataset = dataset
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, int, Future[list[Microbatch]]] | None = None

    def microbatches(self, consumed_samples: int, global_batch: int) -> list[Microbatch]:
        """Return this rank's `global_batch / dp / micro_batch` microbatches of the step at `consumed_samples`."""
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[:2] == (consumed_samples, global_batch):
            return ahead[2].result()
        return self._read(consumed_samples, global_batch)

    def prefetch(self, consumed_samples: int, global_batch: int) -> None:
        """Read the result of the next call of `microbatches` with the same arguments in the background."""
        self._ahead = (consumed_samples, global_batch, self._reader.submit(self._read, consumed_samples, global_batch))

    def from_the_start(self, num_batches: int, global_batch: int) -> Iterator[list[Microbatch]]:
        """Yield the first `num_batches` batches, the same at every call, for an evaluation."""
        for index in range(num_batches):
            yield self.microbatches(index * global_batch, global_batch)

    def _read(self, consumed_samples: int, global_batch: int) -> list[Microbatch]:
        unit = self.micro_batch * self.dp_size
        if global_batch < 1 or global_batch % unit:
            raise ConfigError(
                f"a global batch of {global_batch} is not a multiple of micro_batch={self.micro_batch} x "
                f"dp={self.dp_size}. Use a multiple of {unit}."
            )
        if not 0 <= consumed_samples <= len(self.dataset) - global_batch:
            raise DataError(
                f"samples {consumed_samples} to {consumed_samples + global_batch - 1} are wanted of a "
                f"dataset that was built with {len(self.dataset)}. Build it for as many samples as the "
                "run's steps take."
            )
        share = global_batch // self.dp_size
        first = consumed_samples + self.dp_rank * share
        return [self._microbatch(start) for start in range(first, first + share, self.micro_batch)]

    def _microbatch(self, first: int) -> Microbatch:
        samples = [self.dataset[index] for index in range(first, first + self.micro_batch)]
        fields = ("tokens", "labels", "loss_mask", "position_ids", "is_padding")  # Megatron's samples have more
        stacked = {key: torch.stack([sample[key] for sample in samples]) for key in fields if key in samples[0]}
        packed = None
        if "lengths" in samples[0]:
            # cu_seqlens begins with 0, hence the zero in front.
            lengths = torch.cat([torch.zeros(1, dtype=torch.int32), *(sample["lengths"] for sample in samples)])
            packed = PackedSpans(cu_seqlens=lengths.cumsum(0, dtype=torch.int32), max_length=int(lengths.max()))
        return Microbatch(
            tokens_BS=stacked["tokens"],
            labels_BS=stacked["labels"],
            loss_mask_BS=stacked["loss_mask"],
            position_ids_BS=stacked["position_ids"],
            packed=packed,
            is_padding_BS=stacked.get("is_padding"),
        )
