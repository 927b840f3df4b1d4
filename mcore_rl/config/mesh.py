"""The parallel layout of a model over ranks."""

from functools import cached_property
from math import lcm
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section


class MeshConfig(Section):
    """World of tp * pp * cp * dp ranks; for the experts the same ranks are etp * ep * pp * expert_dp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks: each holds a part of the attention and dense layers' weights."""
    pp: PositiveInt = 1
    """Pipeline stages: each holds a part of the layers."""
    vpp: PositiveInt = 1
    """Model chunks per pipeline stage; more than 1: the interleaved schedule, which has shorter bubbles."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each holds num_experts / ep experts."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks that share each expert."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each holds 1 / cp of every sequence, cut in zigzag order."""
    dp: PositiveInt | Literal["auto"] = 1
    """Data-parallel ranks; `auto`: as many as the other dimensions leave of the world."""
    sequence_parallel: bool = True
    """With tp > 1, each rank computes norms and dropout for 1 / tp of the sequence; required with experts."""
    first_stage_layers: PositiveInt | None = None
    """Number of layers of the first pipeline stage; `none`: an equal share."""
    last_stage_layers: PositiveInt | None = None
    """Number of layers of the last pipeline stage; `none`: an equal share."""
    pp_layout: tuple[NonNegativeInt, ...] | Literal["balanced"] | None = None
    """Number of layers of each of the pp * vpp model chunks, in the order of the model: entry c * pp + s is chunk c of
    stage s. The last chunk, which has the output and the multi-token-prediction layers, may have none. `balanced`:
    chunks as equal as possible, where embedding, output and each multi-token-prediction layer count as a layer. `none`:
    stages of equal chunks, except for first_stage_layers and last_stage_layers."""
    overlap_p2p: bool = True
    """With vpp > 1, send pipeline messages during computation; required for vpp > 1 with pp = 2."""
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce gradients during the backward pass. `auto`: on GPUs, if other ranks hold copies of the weights, except in
    RL with pp > 1 and multi-token-prediction layers."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather updated parameters during the next forward pass; needs overlap_grad_reduce. `auto`: on GPUs, if that is
    on."""
    overlap_shared_experts: bool = False
    """Compute shared experts while tokens travel to the routed experts and back; needs ep or etp > 1."""
    overlap_tp: bool = False
    """Overlap tensor-parallel messages with the matrix products next to them, in TransformerEngine's user buffers. Only
    for pretraining and fine-tuning, because all messages of a run must have the same shape. Needs CUDA and tp > 1."""

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
            each, rest = divmod(num_layers + 2 + mtp_layers, self.pp * self.vpp)
            # The rest goes to whole rounds, then to a round's last stages, which keep the fewest microbatches.
            rounds, stages_left = divmod(rest, self.pp)
            chunks = [
                each + (chunk < rounds or (chunk == rounds and stage >= self.pp - stages_left))
                for chunk in range(self.vpp)
                for stage in range(self.pp)
            ]
            chunks[0] -= 1
            chunks[-1] -= 1 + mtp_layers
            return chunks
        if self.pp_layout is not None:
            return list(self.pp_layout)
        first, last = self.first_stage_layers or 0, self.last_stage_layers or 0
        inner = self.pp - bool(first) - bool(last)
        each = (num_layers - first - last) // inner if inner else 0
        stages = [each] * self.pp
        stages[0] = first or stages[0]
        stages[-1] = last or stages[-1]
        return [layers // self.vpp for layers in stages] * self.vpp
