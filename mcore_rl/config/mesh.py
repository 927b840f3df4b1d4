"""How a model is laid out over ranks."""

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section


class MeshConfig(Section):
    """world = tp * pp * cp * dp for attention and dense layers, etp * ep * pp * expert_dp for the experts."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Model chunks of a stage (interleaved schedule); 1: one."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each holds num_experts / ep experts."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks inside one expert."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each holds 1 / cp of every sequence, cut zig-zag."""
    dp: NonNegativeInt = 1
    """Data-parallel ranks; 0: what the world size leaves."""
    sequence_parallel: bool = True
    """With tp > 1, norms and dropout work on 1 / tp of the sequence; an MoE needs it."""
    first_stage_layers: NonNegativeInt = 0
    """Layers of the first pipeline stage when it is uneven; 0: even."""
    last_stage_layers: NonNegativeInt = 0
    """Layers of the last pipeline stage when it is uneven; 0: even."""
    overlap_p2p: bool = True
    """With vpp > 1, pipeline messages travel beside the computation; vpp > 1 with pp = 2 needs it."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Updated parameters are gathered while the next forward pass goes on; needs overlap_grad_reduce."""

    @property
    def model_parallel(self) -> int:
        """Ranks that one copy of the dense part takes."""
        return self.tp * self.pp * self.cp

    @property
    def zigzag(self) -> int:
        """Pieces that context parallelism cuts a sequence into."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def smallest_world(self) -> int:
        """Fewest ranks this mesh runs on, with dp as given (0 counts as the least that fits)."""
        expert = self.etp * self.ep * self.pp
        if self.dp:
            return self.model_parallel * self.dp
        dp = 1
        while (self.model_parallel * dp) % expert:
            dp += 1
        return self.model_parallel * dp
