"""Steps of fixed shapes, one token of each completion in progress: a GPU replays them as CUDA graphs.

A step of a large model starts thousands of kernels, which for few tokens are shorter than the time that a host takes
to start them. A graph starts them all at once, from the memory and with the shapes of the step that was captured. So
the number of completions is filled up to a power of two, and the number of keys that they attend to as well; each such
bucket has one graph, and all read their tokens from the same buffers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcore_rl.model.layers.cache import StepTokens
from mcore_rl.model.layers.moe import MoELayer
from mcore_rl.parallel.mesh import Mesh

LEAST_KEYS = 128
"""Keys of the smallest bucket: fewer would make graphs without making attention faster."""
TRASH_SLOT = -1
"""The slot of the rows that fill a bucket up, the last one of the cache, which no completion has."""


class NextToken(NamedTuple):
    """The token that a completion computes in a step; it draws the one after it."""

    token: int
    slot: int
    position: int
    seed: int


class Bucket(NamedTuple):
    """Shapes of a step."""

    rows: int
    keys: int


class StaticDecode:
    """Computes steps in buckets, from buffers that stay where they are.

    On a GPU the first step of a bucket runs as it is written, which makes what kernels make once; the second one is
    captured, and later ones replay it.
    """

    def __init__(
        self,
        compute: Callable[[StepTokens, Tensor, Tensor], Tensor],
        num_slots: int,
        max_tokens: int,
        device: torch.device,
        *,
        captures: bool,
    ) -> None:
        """Make the buffers.

        Args:
            compute: the drawn numbers, fields of `Drawn` `[4, B]`, of the tokens of a step, the indices of those that
                draw `[B]`, and their seeds `[B]`; it reads nothing on the host that a step can change.
            num_slots: most completions in progress.
            max_tokens: most tokens of a slot.
            device: the device of the model.
            captures: whether steps become graphs; otherwise each runs as it is written.
        """
        self._compute, self._num_slots, self._max_tokens = compute, num_slots, max_tokens
        self._captures = captures
        fields = len(NextToken._fields)
        self._host_4B = torch.zeros(fields, num_slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs_4B = torch.zeros(fields, num_slots, dtype=torch.int64, device=device)
        self._rows_B = torch.arange(num_slots, device=device)
        self._warm: set[Bucket] = set()
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def step(self, tokens: Sequence[NextToken]) -> Tensor:
        """Return the drawn numbers `[4, B]` of these tokens, whose slots are 0 ... B - 1, on the device.

        They are valid until the next step, which must not begin before they have been read.
        """
        self._upload(tokens)
        bucket = self.bucket(tokens)
        if bucket in self._graphs:
            graph, drawn_4B = self._graphs[bucket]
            graph.replay()
        elif self._captures and bucket in self._warm:
            drawn_4B = self._captured(bucket)
        else:
            drawn_4B = self._run(bucket)
            self._warm.add(bucket)
        return drawn_4B[:, : len(tokens)]

    def bucket(self, tokens: Sequence[NextToken]) -> Bucket:
        """Return the smallest bucket for these tokens."""
        longest = max(token.position for token in tokens) + 1
        return Bucket(
            min(_power_of_two(len(tokens)), self._num_slots),
            min(_power_of_two(max(longest, LEAST_KEYS)), self._max_tokens),
        )

    def _upload(self, tokens: Sequence[NextToken]) -> None:
        """Copy the tokens into the buffers; the last step's copy is over, as its results have been read."""
        self._host_4B.zero_()
        self._host_4B[1] = TRASH_SLOT
        self._host_4B[:, : len(tokens)] = torch.tensor(tokens).T
        self._inputs_4B.copy_(self._host_4B, non_blocking=True)

    def _run(self, bucket: Bucket) -> Tensor:
        ids_B, slots_B, positions_B, seeds_B = self._inputs_4B[:, : bucket.rows]
        tokens = StepTokens(
            ids_T=ids_B,
            slots_T=slots_B,
            positions_T=positions_B,
            num_decode=bucket.rows,
            longest=bucket.keys,
            spans=(),
        )
        return self._compute(tokens, self._rows_B[: bucket.rows], seeds_B)

    def _captured(self, bucket: Bucket) -> Tensor:
        """Capture the bucket's graph and run it for the first time."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": threads of loggers and collectives go on while this one captures.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            drawn_4B = self._run(bucket)
        self._graphs[bucket] = graph, drawn_4B
        graph.replay()
        return drawn_4B


def reason_against_graphs(chunks: Sequence[nn.Module], mesh: Mesh, device: torch.device) -> str | None:
    """Return why the steps of this model cannot be CUDA graphs here, equal on all ranks; None: they can."""
    if device.type != "cuda":
        return "there is no GPU"
    for name, axis in (("tp", mesh.tp), ("pp", mesh.pp), ("ep", mesh.ep), ("etp", mesh.etp)):
        if axis.size > 1:
            return f"ranks exchange tokens in each step (mesh.{name}={axis.size})"
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    if any(layer.waits_for_device for layer in layers):
        return (
            "the host reads how many tokens each expert gets: only experts in bf16 on a GPU like Hopper or Blackwell, "
            "without model.moe.capacity_factor, need not"
        )
    return None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
