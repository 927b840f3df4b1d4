"""What the model is trained on at once."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSpans:
    """Where sequences begin in the rows laid end to end: attention does not cross from one to the next."""

    cu_seqlens: Tensor
    """Cumulative lengths, int32 [spans + 1] on the CPU: 0, the first length, ..., all positions of all rows."""
    max_length: int
    """Tokens of the longest span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Rows of one forward pass, whole sequences on the CPU; context parallelism cuts them later."""

    tokens_BS: Tensor
    """int64."""
    labels_BS: Tensor
    """int64: labels_BS[b, s] is the token after tokens_BS[b, s]."""
    loss_mask_BS: Tensor
    """float32: the weight of each position's loss."""
    position_ids_BS: Tensor
    """int64."""
    packed: PackedSpans | None = None
    """None: a row is one sequence."""
    is_padding_BS: Tensor | None = None
    """bool: positions of nobody, which count in no statistics of the routers; None: there are none."""
