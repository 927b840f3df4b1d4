"""Attention sinks: each head has a score that is part of the softmax but adds nothing to the output."""

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH_MULTIPLE = 8
"""torch's fused kernels accept head widths that are multiples of this."""


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arguments of attention with an additional first key, for which head n has the score `scores_N[n]`.

    The key's value is zero. The heads get additional columns, in which each query has its head's score, the new key
    has a 1, and all other keys have 0. Any attention then computes sinks, even if heads share keys. Shapes are as in
    `SDPAttention.forward`.
    """
    width = query.shape[-1]
    more = WIDTH_MULTIPLE - width % WIDTH_MULTIPLE
    scores = scores_N.to(query.dtype)[:, None].expand(*query.shape[:-1], 1)
    query = pad(torch.cat([query, scores], -1), (0, more - 1))
    sink = key.new_zeros(1, *key.shape[1:-1], width + more)
    sink[..., width] = 1.0
    key = torch.cat([sink, pad(key, (0, more))])
    value = torch.cat([value.new_zeros(1, *value.shape[1:]), value])
    return query, key, value, None if visible is None else pad(visible, (1, 0), value=True)
