"""A checksum of (token, layer, route) that does not depend on how tokens are spread over ranks and microbatches.

The checksum of a sample in one layer is a sum over its tokens, modulo 2^64. A token contributes an odd hash of its id
and position, times the sum of the hashes of (layer, expert) over its K experts. Partial sums therefore add up in any
order, the order of a token's experts does not matter, and one wrong expert of one token always changes the checksum: an
odd number is invertible modulo 2^64, so no token's factor can cancel a difference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Multipliers of Murmur3's 64-bit finalizer (fmix64), as signed integers: torch has no unsigned 64-bit arithmetic.
FIRST, SECOND = -0x00AE502812AA7333, -0x3B314601E57A13AD
# fmix64 shifts logically; `>>` on int64 copies the sign, which this mask removes.
MASK = 2**31 - 1


def hashed(numbers: Tensor) -> Tensor:
    """Hash each int64 with Murmur3's finalizer, a bijection; the results look random."""
    mixed = numbers
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ ((mixed >> 33) & MASK)) * factor
    return mixed ^ ((mixed >> 33) & MASK)


def token_hashes(ids_t: Tensor, position_t: Tensor, is_counted_t: Tensor) -> Tensor:
    """Return an odd int64 for each token id at its position, `[t]`; 0 where `is_counted_t` is False."""
    # "+ 1": zero is a fixed point of the hash, and token 0 at position 0 must not be.
    return (hashed(hashed(ids_t.long() + 1) ^ position_t) | 1) * is_counted_t


def expert_hashes(layers: Sequence[int], num_codes: int, device: torch.device) -> Tensor:
    """Return an int64 hash of each route code in each of these layers, `[l, codes]`."""
    layer_l = torch.tensor(layers, dtype=torch.int64, device=device)
    return hashed((layer_l[:, None] << 32) + torch.arange(num_codes, device=device) + 1)


def route_checksums(
    codes_ltK: Tensor,
    expert_hashes_lE: Tensor,
    token_hashes_t: Tensor,
    sample_index_t: Tensor,
    num_samples: int,
) -> Tensor:
    """Return the checksum of each sample's tokens in each layer, int64 `[num_samples, l]`.

    Args:
        codes_ltK: route codes of this rank's layers and tokens, of any integer dtype.
        expert_hashes_lE: from `expert_hashes`, for the same layers.
        token_hashes_t: from `token_hashes`; tokens with hash 0 do not count.
        sample_index_t: index of each token's sample, below `num_samples`; -1 for padding, which must have hash 0.
        num_samples: number of samples in the microbatch, N.
    """
    num_layers, num_tokens, _ = codes_ltK.shape
    hashes_ltK = expert_hashes_lE.gather(1, codes_ltK.long().flatten(1)).view(codes_ltK.shape)
    hashes_lt = hashes_ltK.sum(-1) * token_hashes_t
    sums_lN = torch.zeros(num_layers, num_samples, dtype=torch.int64, device=hashes_lt.device)
    if num_samples:
        # Padding (-1) adds its zeros to sample 0.
        sums_lN.scatter_add_(1, sample_index_t.clamp_min(0).expand(num_layers, num_tokens), hashes_lt)
    return sums_lN.t()
