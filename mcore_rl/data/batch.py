"""The sequences of one forward pass, as returned by all data sources."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSpans:
    """Boundaries of the sequences packed into a microbatch's concatenated rows; attention does not cross them."""

    cu_seqlens: Tensor
    """Cumulative lengths, int32 [spans + 1] on the CPU: 0, the first length, ..., all positions of all rows."""
    max_length: int
    """Tokens of the longest span."""


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
