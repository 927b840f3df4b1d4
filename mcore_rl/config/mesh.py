"""The layout of a model over ranks."""

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
    """With tp > 1, norms and dropout work on 1 / tp of the sequence; a model with experts needs it."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; `none`: as many as each of the others."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage; `none`: as many as each of the others."""
    pp_layout: tuple[NonNegativeInt, ...] | Literal["balanced"] | None = None
    """Layers of each of the pp * vpp model chunks in the model's order, which is round by round: chunk c of stage s is
    entry c * pp + s, and the last chunk, which has the output and the layers of multi-token prediction, may have none;
    `balanced`: embedding, output and each layer of multi-token prediction count as a layer, and chunks are as alike as
    can be; `none`: stages of equal chunks, with first_stage_layers and last_stage_layers."""
    overlap_p2p: bool = True
    """With vpp > 1, pipeline messages travel beside the computation; vpp > 1 with pp = 2 needs it."""
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Gradients are reduced while the backward pass runs; `auto`: on GPUs where weights have copies on other ranks, but
    not in reinforcement learning with pp > 1 of a model with layers of multi-token prediction."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Updated parameters are gathered while the next forward pass runs, which needs overlap_grad_reduce; `auto`: on
    GPUs with it."""
    overlap_shared_experts: bool = False
    """Shared experts are computed while tokens travel to the others and back; needs ep or etp > 1."""

    overlap_tp: bool = False
    """Messages of tensor parallelism travel while the products beside them are computed, in TransformerEngine's user
    buffers. They are of one shape for the whole run: pretraining and fine-tuning only. It needs CUDA and tp > 1."""

    @cached_property
    def model_parallel(self) -> int:
        """Number of ranks that one copy of the dense part takes."""
        return self.tp * self.pp * self.cp

    @cached_property
    def zigzag(self) -> int:
        """Number of pieces that context parallelism cuts a sequence into."""
        return 2 * self.cp if self.cp > 1 else 1

    @cached_property
    def smallest_world(self) -> int:
        """Fewest ranks that this mesh runs on, with dp as given (`auto`: the smallest that fits)."""
        if self.dp != "auto":
            return self.model_parallel * self.dp
        return lcm(self.model_parallel, self.etp * self.ep * self.pp)

    def chunk_layers(self, num_layers: int, mtp_layers: int = 0) -> list[int]:
        """Return the number of layers of each model chunk in the model's order: chunk c of stage s is at c * pp + s.

        Args:
            num_layers: layers of the model, without those of multi-token prediction.
            mtp_layers: layers of multi-token prediction, which are always in the last chunk and not counted here.
        """
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
        # One more goes to whole rounds first, then to the last stages of a round, which keep the fewest microbatches.
        rounds, stages = divmod(rest, self.pp)
        chunks = [
            each + (chunk < rounds or (chunk == rounds and stage >= self.pp - stages))
            for chunk in range(self.vpp)
            for stage in range(self.pp)
        ]
        chunks[0] -= 1
        chunks[-1] -= 1 + mtp_layers
        return chunks
