"""A checksum of (token, layer, route) that is the same however tokens are spread over ranks and microbatches.

It is a sum, modulo 2^64, over tokens of an odd number drawn from the token's id and position, times the sum of numbers
drawn from its layer and each of its experts. So parts add up, and one wrong route of one token always changes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Murmur3's finalizer, as signed numbers.
FIRST, SECOND = -0x00AE502812AA7333, -0x3B314601E57A13AD
MASK = 2**31 - 1


def drawn(numbers: Tensor) -> Tensor:
    """int64: each number as if drawn at random."""
    mixed = numbers
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ ((mixed >> 33) & MASK)) * factor
    return mixed ^ ((mixed >> 33) & MASK)


def token_weights(ids_t: Tensor, position_t: Tensor, is_real_t: Tensor) -> Tensor:
    """int64 `[t]`: odd for tokens, 0 for padding."""
    return (drawn(drawn(ids_t.long() + 1) ^ position_t) | 1) * is_real_t


def expert_numbers(layers: Sequence[int], num_codes: int, device: torch.device) -> Tensor:
    """int64 `[l, codes]`: a number for each expert of each of these layers."""
    layer_l = torch.tensor(layers, dtype=torch.int64, device=device)
    return drawn((layer_l[:, None] << 32) + torch.arange(num_codes, device=device) + 1)


def route_sums(codes_ltK: Tensor, numbers_lE: Tensor, weights_t: Tensor, owner_t: Tensor, num: int) -> Tensor:
    """int64 `[num, l]`: the checksum of each owner's tokens in each layer."""
    num_layers, num_tokens, _ = codes_ltK.shape
    drawn_ltK = numbers_lE.gather(1, codes_ltK.long().flatten(1)).view(codes_ltK.shape)
    drawn_lt = drawn_ltK.sum(-1) * weights_t
    sums_lN = torch.zeros(num_layers, num, dtype=torch.int64, device=drawn_lt.device)
    if num:
        sums_lN.scatter_add_(1, owner_t.clamp_min(0).expand(num_layers, num_tokens), drawn_lt)
    return sums_lN.t()
