"""The parallel layout of a model over ranks."""

from functools import cached_property
from math import lcm
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section


class MeshConfig(Section):
    """world = tp * pp * cp * dp for attention and dense layers, etp * ep * pp * expert_dp for the experts."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Model chunks per pipeline stage; more than 1 is the interleaved schedule."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each holds num_experts / ep experts."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks inside one expert."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each holds 1 / cp of every sequence, cut zig-zag."""
    dp: PositiveInt | Literal["auto"] = 1
    """Data-parallel ranks; `auto`: as many as the world size leaves."""
    sequence_parallel: bool = True
    """With tp > 1, norms and dropout work on 1 / tp of the sequence; required for a model with experts."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; `none`: as many as each remaining stage has."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage; `none`: as many as each remaining stage has."""
    pp_layout: tuple[NonNegativeInt, ...] | Literal["balanced"] | None = None
    """Layers of each of the pp * vpp model chunks, in the model's order, which goes round by round: chunk c of stage s
    is entry c * pp + s. The last chunk, which has the output and the multi-token-prediction layers, may have none.
    `balanced`: embedding, output and each multi-token-prediction layer count as a layer, and chunks are as equal as
    possible; `none`: stages of equal chunks, except as first_stage_layers and last_stage_layers say."""
    overlap_p2p: bool = True
    """With vpp > 1, send pipeline messages during the computation; required for vpp > 1 with pp = 2."""
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce gradients during the backward pass; `auto`: on GPUs, if weights have copies on other ranks, except in
    reinforcement learning with pp > 1 and a model with multi-token-prediction layers."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather updated parameters during the next forward pass, which needs overlap_grad_reduce; `auto`: on GPUs with
    overlap_grad_reduce."""
    overlap_shared_experts: bool = False
    """Compute shared experts while tokens travel to the routed experts and back; needs ep or etp > 1."""

    overlap_tp: bool = False
    """Overlap the messages of tensor parallelism with the matrix products next to them, in TransformerEngine's user
    buffers. Messages have a single shape for the whole run, so that this is for pretraining and fine-tuning only. Needs
    CUDA and tp > 1."""

    @cached_property
    def model_parallel(self) -> int:
        """Number of ranks per copy of the dense part."""
        return self.tp * self.pp * self.cp

    @cached_property
    def zigzag(self) -> int:
        """Number of pieces into which context parallelism cuts a sequence."""
        return 2 * self.cp if self.cp > 1 else 1

    @cached_property
    def smallest_world(self) -> int:
        """Smallest number of ranks that this mesh runs on, with dp as given (`auto`: the smallest that fits)."""
        if self.dp != "auto":
            return self.model_parallel * self.dp
        return lcm(self.model_parallel, self.etp * self.ep * self.pp)

    def chunk_layers(self, num_layers: int, mtp_layers: int = 0) -> list[int]:
        """Return each chunk's layers, without MTP, in the model's order: chunk c of stage s is at c * pp + s."""
        if self.pp_layout == "balanced":
            return self._balanced(num_layers, mtp_layers)
        if self.pp_layout is not None:
            return list(self.pp_layout)
        first, last = self.first_stage_layers or 0, self.last_stage_layers or 0
        inner = self.pp - bool(first) - bool(last)
        each = (num_layers - first - last) // inner if inner else 0
        stages = [each] * self.pp
        stages[0] = first or stages[0]
        stages[-1] = last or stages[-1]
        return [layers // self.vpp for layers in stages] * self.vpp

    def _balanced(self, num_layers: int, mtp_layers: int) -> list[int]:
        parts = num_layers + 2 + mtp_layers
        each, rest = divmod(parts, self.pp * self.vpp)
        # The rest goes to whole rounds first, then to the last stages of a round, which keep the fewest microbatches.
        rounds, stages = divmod(rest, self.pp)
        chunks = [
            each + (chunk < rounds or (chunk == rounds and stage >= self.pp - stages))
            for chunk in range(self.vpp)
            for stage in range(self.pp)
        ]
        chunks[0] -= 1
        chunks[-1] -= 1 + mtp_layers
        return chunks
