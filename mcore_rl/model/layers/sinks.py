"""Attention sinks: each head has a score that takes part in the softmax and adds nothing to the output."""

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH_MULTIPLE = 8
"""Multiple of the widths of heads that torch's fused kernels accept."""


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arguments of attention with one more key, the first, whose product with head n is `scores_N[n]`.

    Its value is zero. The heads get further columns, in which each query holds its head's score, the new key one, and
    the other keys zero: any attention then computes sinks, also where heads share keys. Shapes are those of
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
