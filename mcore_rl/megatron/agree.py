"""Agreement of all ranks on results, decisions and errors that a single rank has found."""

import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRlError
from mcore_rl.megatron.mesh import Mesh

T = TypeVar("T")
MAX_PROBLEMS = 5
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.1
"""Seconds between two looks at who has arrived: at first, and after a while."""
NOTE_S, FIRST_REPORT_S = 5.0, 30.0
"""Seconds until a rank notes that it waits, and until a line names the missing ranks; then twice as many."""


def wait_for_hosts() -> None:
    """Collective over the world: return when all ranks are here, however long their work outside of collectives takes.

    All waiting for servers, rewards or disks ends here, not in a collective with its `platform.timeout_s`;
    `train.hang_s` limits it.
    """
    if dist.get_world_size() == 1:
        return
    assert dist.group.WORLD is not None
    patience = patience_of(dist.group.WORLD)
    patience.num_waits += 1
    arrival = dist.barrier(group=patience.group, async_op=True)
    began_s, pause_s, next_s = time.monotonic(), FIRST_PAUSE_S, NOTE_S
    # Looked at again and again: in a `wait` this rank could not name the ranks that are missing.
    while not arrival.is_completed():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
        if time.monotonic() - began_s > next_s:
            with suppress(dist.DistError, RuntimeError):  # the store's host may have ended, which the barrier reports
                patience.note() if next_s == NOTE_S else patience.report(next_s)
            next_s = FIRST_REPORT_S if next_s == NOTE_S else 2 * next_s
    arrival.wait()  # raises where a rank has ended


@dataclass
class _Patience:
    """A group of the world's ranks whose collectives wait without a limit, and how often they have waited."""

    group: dist.ProcessGroup
    num_waits: int = 0

    def note(self) -> None:
        dist.distributed_c10d._get_default_store().set(f"waiting/{self.num_waits}/{dist.get_rank()}", "")

    def report(self, waited_s: float) -> None:
        """On the first rank that waits, name those that do not on stderr."""
        store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
        absent = [rank for rank in ranks if not store.check([f"waiting/{self.num_waits}/{rank}"])]
        if absent and set(ranks[: dist.get_rank()]) <= set(absent):
            more = f" and {len(absent) - MAX_PROBLEMS} more" if len(absent) > MAX_PROBLEMS else ""
            listed = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:MAX_PROBLEMS]))}{more}"
            sys.stderr.write(f"rank {dist.get_rank()} has waited {waited_s:g} s for {listed}\n")


@lru_cache(maxsize=1)
def patience_of(world: dist.ProcessGroup) -> _Patience:
    """Collective over the world, without patience: a start makes it while all ranks are at hand."""
    return _Patience(dist.new_group(backend="gloo", timeout=timedelta(days=365)))


def on_rank_zero(action: Callable[[], T]) -> T:
    """Collective over the world: return rank 0's `action()`, however long it takes; all raise its McoreRlError."""
    box: list[Any] = [_outcome(action) if dist.get_rank() == 0 else None]
    wait_for_hosts()
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    value, error = box[0]
    if error is not None:
        raise _of_rank(0, error)
    result: T = value
    return result


def on_every_rank(action: Callable[[], T]) -> T:
    """Collective over the world: return this rank's `action()`, which may take any time and wait for what is not a
    rank. All ranks raise the first rank's McoreRlError.
    """
    value, error = _outcome(action)
    wait_for_hosts()
    # Before any rank raises: one that raised at once would leave the others waiting in their next collective.
    errors = from_every_rank(error)
    for rank, failure in enumerate(errors):
        if failure is not None:
            text = f"rank {rank}: {failure}" if len(errors) > 1 else str(failure)
            raise _of_rank(rank, type(failure)(text))
    result: T = value
    return result


def from_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective over `group`, by default the world: return the ranks' values in the order of the ranks."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_of_model(value: T, mesh: Mesh, of_stage: Callable[[T, int], T] | None = None) -> T:
    """Collective over the ranks of each model (tensor- and pipeline-parallel): return the first rank's `value`, or what
    `of_stage` makes of it there for this rank's pipeline stage.
    """
    # tp first: then every rank of the first stage has the value, and each sends it down its own pipeline.
    box, pp = [value], mesh.pp
    if mesh.tp.size > 1:
        dist.broadcast_object_list(box, group=mesh.tp.group, group_src=0)
    if pp.size == 1:
        return box[0] if of_stage is None else of_stage(box[0], 0)
    if of_stage is None:
        dist.broadcast_object_list(box, group=pp.group, group_src=0)
    else:
        parts = [of_stage(box[0], stage) for stage in range(pp.size)] if pp.rank == 0 else None
        dist.scatter_object_list(box, parts, group=pp.group, group_src=0)
    return box[0]


def gathered_on(to_rank: int, value: T | None) -> list[T | None]:
    """Collective over the world: return all ranks' values on `to_rank`, and [] elsewhere. A rank with None sends
    nothing, while torch's own gather takes as many bytes of each rank as of the one that has most.
    """
    rank, data = dist.get_rank(), b"" if value is None else pickle.dumps(value)
    # Sizes first: `to_rank` must know from whom something comes, and how much room it takes.
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[rank] = len(data)
    dist.all_reduce(sizes)
    if rank != to_rank:
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to_rank)
        return []
    values: list[T | None] = []
    for owner, size in enumerate(sizes.tolist()):
        if owner == rank or not size:
            values.append(value if owner == rank else None)
            continue
        box = torch.empty(size, dtype=torch.uint8)
        dist.recv(box, owner)
        values.append(pickle.loads(box.numpy().tobytes()))
    return values


def give_word(key: str, value: str = "") -> None:
    """Give a value to the single rank that waits for it with `wait_for_word`."""
    dist.distributed_c10d._get_default_store().set(f"word/{key}", value)


def give_next_word(key: str, value: str) -> None:
    """Give a value under `key/1`, `key/2`, ..., in the order in which ranks arrive."""
    number = dist.distributed_c10d._get_default_store().add(f"words/{key}", 1)
    give_word(f"{key}/{number}", value)


def wait_for_word(key: str, is_over: Callable[[], bool] = lambda: False) -> str:
    """Return the value that a rank gives under `key`, however long that takes, or "" when `is_over`. It is no
    collective: threads may call it while this process computes or is in a collective.
    """
    store, name, pause_s = dist.distributed_c10d._get_default_store(), f"word/{key}", FIRST_PAUSE_S
    while not store.check([name]):
        if is_over():
            return ""
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    value: str = store.get(name).decode()
    store.delete_key(name)
    return value


def refuse_anywhere(problems: Sequence[str], kind: type[McoreRlError]) -> None:
    """Collective over the world: raise `kind` on all ranks with the problems of the first rank that has any."""
    # One number first: nearly always nothing is wrong, and gathering objects takes three times as long.
    if not world_max(len(problems)):
        return
    problems_of_ranks = from_every_rank(list(problems)[:MAX_PROBLEMS])
    for rank, found in enumerate(problems_of_ranks):
        if found:
            text = "; ".join(f"rank {rank}: {problem}" if len(problems_of_ranks) > 1 else problem for problem in found)
            raise _of_rank(rank, kind(text))


def world_union(of_rank: Mapping[int, str]) -> dict[int, str]:
    """Collective over the world: return all ranks' entries by rising key; of several for a key, the first rank's."""
    # One number first, as above.
    if not world_max(len(of_rank)):
        return {}
    of_ranks = from_every_rank(dict(of_rank))
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
    error.rank = rank
    return error
