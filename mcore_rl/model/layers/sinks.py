"""Attention sinks: a score a head that takes its share of the softmax and gives nothing to the output."""

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH_MULTIPLE = 8
"""Widths of heads that torch's fused kernels take."""


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of attention with one more key, the first: of value zero, its product with head n `scores_N[n]`.

    The heads are wider by columns in which each query holds its head's score, the new key one, and the others zero:
    any attention then computes sinks, also where heads share keys. Shapes as in `SDPAttention.forward`.
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
