"""Gathering of the routes of all layers from the pipeline stages."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.parallel.mesh import Axis
from mcore_rl.rl.engines.native.scheduler import Draft


def gather_layers(
    drafts: Sequence[Draft], routes: Mapping[Draft, Tensor], layers: Sequence[int], pp: Axis
) -> dict[Draft, Tensor]:
    """Collective over `pp`: return the routes `[T, L, K]` of each draft, given `[T, l, K]` of this stage's layers.

    All stages have the same drafts, but may have different numbers of layers.
    """
    if pp.size == 1 or not drafts:
        return dict(routes)
    gathered: list[tuple[Sequence[int], list[Tensor]] | None] = [None] * pp.size
    dist.all_gather_object(gathered, (layers, [routes[draft] for draft in drafts]), group=pp.group)
    found = [part for part in gathered if part is not None]
    order = torch.tensor([layer for numbers, _ in found for layer in numbers]).argsort()
    stages = zip(*(tensors for _, tensors in found), strict=True)
    return {
        draft: torch.cat(parts, 1).index_select(1, order) for draft, parts in zip(drafts, stages, strict=True)
    }
