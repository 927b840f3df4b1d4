"""The layout of a model over ranks."""

from math import lcm
from typing import Literal

from pydantic import PositiveInt

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
    overlap_p2p: bool = True
    """With vpp > 1, pipeline messages travel beside the computation; vpp > 1 with pp = 2 needs it."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced while the backward pass runs."""
    overlap_param_gather: bool = False
    """Updated parameters are gathered while the next forward pass runs; needs overlap_grad_reduce."""

    @property
    def model_parallel(self) -> int:
        """Number of ranks that one copy of the dense part takes."""
        return self.tp * self.pp * self.cp

    @property
    def zigzag(self) -> int:
        """Number of pieces that context parallelism cuts a sequence into."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def smallest_world(self) -> int:
        """Fewest ranks that this mesh runs on, with dp as given (`auto`: the smallest that fits)."""
        if self.dp != "auto":
            return self.model_parallel * self.dp
        return lcm(self.model_parallel, self.etp * self.ep * self.pp)
