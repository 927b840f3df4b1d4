"""Decoding steps of fixed shapes, with a token of each completion in progress; a GPU replays them as CUDA graphs.

A step of a large model launches thousands of kernels, which for few tokens take less time than the host needs to launch
them. A graph launches all of them at once, with the memory and shapes of the captured step. Therefore the number of
completions, and the number of keys that they attend to, are padded to powers of two. Each such bucket has a graph, and
all graphs read their tokens from the same buffers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.layers.cache import StepTokens
from mcore_rl.model.layers.moe import MoELayer

LEAST_KEYS = 128
"""Number of keys of the smallest bucket: smaller buckets would add graphs without making attention faster."""
TRASH_SLOT = -1
"""Slot of the padding rows of a bucket: the last slot of the cache, which no completion uses."""


class NextToken(NamedTuple):
    """The token that a completion computes in a step, in order to draw the next token."""

    token: int
    slot: int
    position: int
    seed: int


class Bucket(NamedTuple):
    """Shapes of a step."""

    rows: int
    keys: int


class StaticDecode:
    """Computes steps in buckets, from buffers with fixed addresses.

    On a GPU the first step of a bucket runs eagerly, to warm up the kernels; the second step is captured as a graph,
    and later steps replay the graph.
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
        """Create the buffers.

        Args:
            compute: function from a step's tokens, the indices `[B]` of the tokens to draw from, and their seeds `[B]`,
                to the drawn numbers, fields of `Drawn` `[4, B]`. It must not depend on host state that a step changes.
            num_slots: maximum number of completions in progress.
            max_tokens: maximum number of tokens of a slot.
            device: the device of the model.
            captures: whether steps are captured as graphs; otherwise they all run eagerly.
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
        """Return the drawn numbers `[4, B]` of these tokens, in slots 0 ... B - 1, on the device.

        The result is valid until the next step, which must not begin before the result has been read.
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
        """Return the smallest bucket that fits these tokens."""
        longest = max(token.position for token in tokens) + 1
        return Bucket(
            min(_power_of_two(len(tokens)), self._num_slots),
            min(_power_of_two(max(longest, LEAST_KEYS)), self._max_tokens),
        )

    def _upload(self, tokens: Sequence[NextToken]) -> None:
        """Copy the tokens into the buffers. The previous copy has finished: its step's results have been read."""
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
        # "thread_local": threads of loggers and collectives keep running while this thread captures.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            drawn_4B = self._run(bucket)
        self._graphs[bucket] = graph, drawn_4B
        graph.replay()
        return drawn_4B


def reason_against_graphs(chunks: Sequence[nn.Module], mesh: Mesh, device: torch.device) -> str | None:
    """Return why steps of this model cannot be CUDA graphs, the same on all ranks; None if they can."""
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
