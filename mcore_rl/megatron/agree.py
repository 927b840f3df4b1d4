"""Agreement of all ranks on results, decisions and errors that a single rank has found."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRlError
from mcore_rl.megatron.mesh import Mesh

T = TypeVar("T")
MAX_PROBLEMS = 5
"""Problems of a rank that one message lists."""


def on_rank_zero(action: Callable[[], T]) -> T:
    """Collective over the world: return what `action()` returned on rank 0; a McoreRlError there is raised on all."""
    box: list[Any] = [_outcome(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    value, error = box[0]
    if error is not None:
        raise _of_rank(0, error)
    result: T = value
    return result


def on_every_rank(action: Callable[[], T]) -> T:
    """Collective over the world: return this rank's `action()`; all ranks raise the first rank's McoreRlError."""
    value, error = _outcome(action)
    errors: list[McoreRlError | None] = [None] * dist.get_world_size()
    # Before any rank raises: one that raised at once would leave the others waiting in their next collective.
    dist.all_gather_object(errors, error)
    for rank, failure in enumerate(errors):
        if failure is not None:
            text = f"rank {rank}: {failure}" if len(errors) > 1 else str(failure)
            raise _of_rank(rank, type(failure)(text))
    result: T = value
    return result


def from_first_of_model(value: T, mesh: Mesh) -> T:
    """Collective over the ranks of each model (tensor- and pipeline-parallel): return the first rank's `value`."""
    # tp first: then every rank of the first stage has the value, and each sends it down its own pipeline.
    for axis in (mesh.tp, mesh.pp):
        if axis.size > 1:
            box = [value]
            dist.broadcast_object_list(box, group=axis.group, group_src=0)
            value = box[0]
    return value


def refuse_anywhere(problems: Sequence[str], kind: type[McoreRlError]) -> None:
    """Collective over the world: where any rank has problems, raise `kind` on all ranks with the problems of the
    first such rank.
    """
    # One number first: nearly always nothing is wrong, and gathering objects takes three times as long.
    if not world_max(len(problems)):
        return
    problems_of_ranks: list[Sequence[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(problems_of_ranks, list(problems)[:MAX_PROBLEMS])
    for rank, found in enumerate(problems_of_ranks):
        if found:
            text = "; ".join(f"rank {rank}: {problem}" if len(problems_of_ranks) > 1 else problem for problem in found)
            raise _of_rank(rank, kind(text))


def world_union(of_rank: Mapping[int, str]) -> dict[int, str]:
    """Collective over the world: return the entries of all ranks' mappings by rising key, the same on all ranks; of a
    key that several ranks have, the first rank's.
    """
    # One number first, as above.
    if not world_max(len(of_rank)):
        return {}
    of_ranks: list[Mapping[int, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, dict(of_rank))
    merged = {key: value for one in reversed(of_ranks) for key, value in one.items()}
    return dict(sorted(merged.items()))


def world_max(value: int) -> int:
    """Collective over the world: return the largest of the ranks' values."""
    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def _outcome(action: Callable[[], Any]) -> tuple[Any, McoreRlError | None]:
    try:
        return action(), None
    except McoreRlError as error:
        return None, error


def _of_rank(rank: int, error: McoreRlError) -> McoreRlError:
    """Return the error as the error of `rank`, whichever rank is the first to report it."""
    error.rank = rank
    return error
