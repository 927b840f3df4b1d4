"""Ranks agree on results and errors; datasets that they build together are those of one rank.

What the groups of a mesh cost a process on gloo, and that they end with it.

A request to stop that reaches one rank ends all ranks after the same step.
"""

import io
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rl.config.data import DataConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import BatchSource
from mcore_rl.data.megatron.indexed import SampleCounts, build_datasets, plan_data
from mcore_rl.errors import CheckpointError, DataError
from mcore_rl.megatron import agree
from mcore_rl.megatron.agree import from_first_of_model, on_every_rank, on_rank_zero, world_max, world_union
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.patches.replacements import without_hosts
from mcore_rl.megatron.platform import Platform, start, stop
from mcore_rl.model.build import LocalShard, gathered
from mcore_rl.train.loop import StopRequest
from mcore_rl.workers.forked_rank import STOP_SIGNALS
from mcore_rl.workers.launcher import free_port
from tests.fake_world import fake_rank
from tests.ranks import run_ranks
from tests.unit.data.test_index_file import write


def test_groups_share_the_thread_that_listens_and_end_with_their_mesh() -> None:
    for built, after_one, after_three in run_ranks(threads_of_meshes, 2):
        assert built["gloo_tcp_loop"] == 1
        # Megatron keeps two groups until the next mesh.
        assert after_three == after_one and after_one["pt_gloo_runloop"] < built["pt_gloo_runloop"] / 4


def test_only_the_thread_that_listens_waits_for_those_at_work() -> None:
    for policies in run_ranks(policies_of_threads, 2):
        listener = policies.pop("gloo_tcp_loop")
        assert listener == {os.SCHED_BATCH} and set().union(*policies.values()) == {os.sched_getscheduler(0)}


def test_a_stage_is_sent_its_own_part_alone() -> None:
    """The first rank of the model has what cannot be sent: it is in no stage's part."""
    assert run_ranks(parts_of_stages, 4) == [[0, "whole"], [0, "whole"], [1, "whole"], [1, "whole"]]


def parts_of_stages() -> list[Any]:
    mesh = build_mesh(MeshConfig(pp=2, tp=1))
    value = {"parts": [0, 1], "unsent": lambda: None} if mesh.pp.rank == 0 else None
    part = from_first_of_model(value, mesh, lambda value, stage: {"part": value["parts"][stage]})
    return [part["part"], from_first_of_model("whole" if mesh.pp.rank == 0 else None, mesh)]


def test_shards_are_gathered_in_main_memory_by_a_rank_that_holds_none() -> None:
    """Rank 0 has nothing of either tensor: one is cut over ranks 1 and 2, the other rank 2's alone, in bf16."""
    first, *others = run_ranks(gathered_on_ranks, 3)
    assert others == [{}, {}]
    assert first == {"cut": (list(range(8)), "cpu", "torch.float32"), "whole": ([7.0, 8.0], "cpu", "torch.bfloat16")}


def gathered_on_ranks() -> dict[str, tuple[list[float], str, str]]:
    mesh = build_mesh(MeshConfig())
    rank = mesh.world.rank
    half = torch.arange(4.0 * (rank - 1), 4.0 * rank)
    # Not contiguous in memory, and with a gradient, as a parameter is.
    data = torch.stack([half, half], 1).requires_grad_()[:, 0].view(2, 2)
    cut = LocalShard(
        key="cut", where=(slice(2 * rank - 2, 2 * rank),), global_shape=(4, 2), data=data, is_main=rank > 0
    )
    own = torch.tensor([7.0, 8.0], dtype=torch.bfloat16)
    whole = LocalShard(key="whole", where=(slice(0, 2),), global_shape=(2,), data=own, is_main=rank == 2)
    tensors = gathered([cut, whole], mesh)
    return {name: (one.flatten().tolist(), str(one.device), str(one.dtype)) for name, one in tensors.items()}


def policies_of_threads() -> dict[str, set[int]]:
    """On a rank with a mesh: how the kernel schedules the threads of each name."""
    build_mesh(MeshConfig(tp=2))
    policies: dict[str, set[int]] = {}
    for number, name in _threads():
        with suppress(ProcessLookupError):
            policies.setdefault(name, set()).add(os.sched_getscheduler(number))
    dist.barrier()  # a rank that ends while the other still connects would reset its connection
    return policies


def threads_of_meshes() -> list[Counter[str]]:
    """On a rank: threads by name with a mesh, when it is gone, and when three are."""
    build_mesh(MeshConfig(tp=2))
    counts = [_gloo_threads()]
    for _ in range(3):
        dist.barrier()  # a group that ends while the other rank still connects would reset its connection
        destroy_mesh()
        counts.append(_gloo_threads())
        build_mesh(MeshConfig(tp=2))
    dist.barrier()  # the same at the end of the process
    return [counts[0], counts[1], counts[3]]


def _threads() -> Iterator[tuple[int, str]]:
    """Number and name of each thread of this process, but those that end meanwhile."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield int(task.name), (task / "comm").read_text().strip()


def _gloo_threads() -> Counter[str]:
    return Counter(name for _, name in _threads() if "gloo" in name)


def steps_until_stopped(file: Path, signals: dict[int, tuple[int, int]]) -> tuple[int, str]:
    """On a rank: after which step it stopped, and why; `signals[rank]` is a signal and the step it comes in."""
    number, when = signals.get(int(os.environ["RANK"]), (0, -1))
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    step = 0
    with StopRequest(file) as stop:
        while not (reason := stop.agreed()):
            step += 1
            if step == when:
                if number:
                    os.kill(os.getpid(), number)
                else:
                    file.touch()
            assert step < 100
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    return step, reason


@pytest.mark.matrix("usr1-on-one")
@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        ({1: (signal.SIGUSR1, 3)}, "SIGUSR1 came"),
        ({0: (signal.SIGTERM, 3)}, "SIGTERM came"),
        ({0: (signal.SIGTERM, 3), 1: (signal.SIGTERM, 3), 2: (signal.SIGTERM, 3)}, "SIGTERM came"),
        ({0: (signal.SIGHUP, 3)}, "SIGHUP came"),
        ({0: (0, 3)}, "STOP was made"),
    ],
    ids=["usr1-on-one", "term-on-rank-0", "term-on-all", "hangup", "file"],
)
def test_all_ranks_stop_after_the_same_step(signals: dict[int, tuple[int, int]], reason: str, tmp_path: Path) -> None:
    ranks = run_ranks(steps_until_stopped, 3, tmp_path / "STOP", signals)
    assert {step for step, _ in ranks} == {3}
    assert all(why.endswith(reason) for _, why in ranks)


def agreed() -> tuple[int, int, int, dict[int, str], str, str, Platform]:
    """On a rank: results of the four, the errors of two, and a platform whose kernels were chosen on the way."""
    rank = int(os.environ["RANK"])

    def fail_beyond(first: int) -> int:
        if rank >= first:
            raise DataError(f"no file here {rank}")
        return rank

    def only_on_rank_zero() -> int:
        assert rank == 0
        return 42

    with pytest.raises(DataError) as every:
        on_every_rank(lambda: fail_beyond(1))
    with pytest.raises(CheckpointError) as zero:
        on_rank_zero(refuse)
    return (
        on_rank_zero(only_on_rank_zero),
        on_every_rank(lambda: rank),
        world_max(rank),
        world_union({3 - rank: f"of rank {rank}", 7: f"first {rank}"} if rank else {}),
        str(every.value),
        str(zero.value),
        start(PlatformConfig()),
    )


def refuse() -> None:
    raise CheckpointError("of another model")


def test_ranks_agree_on_results_and_errors() -> None:
    ranks = run_ranks(agreed, 3)
    for rank, (zero, own, largest, union, every_error, zero_error, platform) in enumerate(ranks):
        assert platform.layers_id == ranks[0][-1].layers_id and platform.layers == "cpu"
        assert (zero, own, largest) == (42, rank, 2)
        assert [*union.items()] == [(1, "of rank 2"), (2, "of rank 1"), (7, "first 1")]
        assert every_error == "rank 1: no file here 1"
        assert zero_error == "of another model"


STEPS = ((0, 4), (4, 8), (12, 8))
"""(cursor, global batch)."""


def read_all(folder: str) -> list[list[list[int]]]:
    """On a rank: its rows of tokens in each step."""
    data = DataConfig(train=(f"{folder}/a", f"{folder}/b"), seq_length=8, split=(80.0, 20.0, 0.0))
    plan = plan_data(data, vocab_size=1000, samples=SampleCounts(train=20, valid=4))
    datasets = build_datasets(plan, seed=3, cache_dir=Path(folder) / "cache")
    rank, size = dist.get_rank(), dist.get_world_size()
    source = BatchSource(datasets.train, micro_batch=1, dp_rank=rank, dp_size=size)
    batches = [source.microbatches(cursor, global_batch) for cursor, global_batch in STEPS]
    return [torch.cat([m.tokens_BS for m in batch]).tolist() for batch in batches]


def unusable_cache(folder: str) -> str:
    data = DataConfig(train=(f"{folder}/a",), seq_length=8, split=(100.0, 0.0, 0.0))
    plan = plan_data(data, vocab_size=1000, samples=SampleCounts(train=20))
    try:
        build_datasets(plan, seed=3, cache_dir=Path(folder) / "a.bin")
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_build_together_read_what_one_rank_reads(tmp_path):
    for name, first in (("a", 0), ("b", 500)):
        write(tmp_path / name, [list(range(first + 12 * i, first + 12 * (i + 1))) for i in range(40)])
    four = run_ranks(read_all, 4, str(tmp_path))
    written = sorted((tmp_path / "cache").glob("*.npy"))
    one = run_ranks(read_all, 1, str(tmp_path))[0]
    assert sorted((tmp_path / "cache").glob("*.npy")) == written
    for step, rows in enumerate(one):
        assert [row for rank in four for row in rank[step]] == rows


def test_a_cache_that_rank_0_cannot_write_is_told_on_every_rank(tmp_path):
    write(tmp_path / "a", [list(range(100))])
    said = run_ranks(unusable_cache, 2, str(tmp_path))
    assert said[0] == said[1]
    assert "data.cache_dir" in said[0]


def test_every_group_of_a_mesh_has_the_limit_of_time_of_the_config() -> None:
    assert run_ranks(limits_of_groups, 2) == [{7.0}] * 2


def limits_of_groups() -> set[float]:
    """On a rank: the seconds that collectives of each of its groups may wait."""
    mesh = build_mesh(MeshConfig(tp=2), timeout_s=7.0)
    axes = (mesh.tp, mesh.pp, mesh.cp, mesh.dp, mesh.dp_cp, mesh.ep, mesh.etp, mesh.expert_dp)
    backends = [axis.group._get_backend(torch.device("cpu")) for axis in axes]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_hosts_connect_on_gpus_only_for_the_groups_that_objects_travel_through() -> None:
    """Rank 0 of 1,024: gloo connects each pair of a group; before, each group of Megatron's had it beside NCCL."""
    config = MeshConfig(tp=8, pp=4, ep=8, dp="auto")
    ((before, after),) = run_ranks(connections, 1, config, 1024)
    assert after == (8 - 1) + (4 - 1) + (1024 // 32 - 1)
    assert before > 25 * after


def connections(config: MeshConfig, world: int) -> list[int]:
    """On the only rank: rank 0's connections by gloo, with each group as Megatron asks for it, and as it is made."""
    numbers, original, functions = [], parallel_state.create_group.__wrapped__, parallel_state
    cuda: Any = torch.cuda
    is_available, patched = cuda.is_available, parallel_state.create_group
    for replace in (lambda create: create, without_hosts):
        made: list[int] = []

        def create(ranks: list[int], *, made: list[int] = made, **options: Any) -> Any:
            cuda.is_available = is_available
            made.append(0 if options.get("backend") == "nccl" else len(ranks) - 1)
            return original(ranks, **options)

        replaced = replace(create)

        def on_gpus(ranks: list[int], *, create: Any = replaced, **options: Any) -> Any:
            cuda.is_available = lambda: True
            return create(ranks, **options)

        functions.create_group = on_gpus
        with fake_rank(config, 0, world):
            numbers.append(sum(made))
    functions.create_group = patched
    return numbers


@pytest.mark.full
def test_work_of_hosts_may_take_longer_than_a_collective() -> None:
    assert run_ranks(slow_hosts, 3, free_port()) == [(0, "of rank 0"), (1, "of rank 0"), (2, "of rank 0")]


def slow_hosts(port: int) -> tuple[int, str]:
    """On a rank whose collectives wait 2 s: results of work that takes 3, on one rank after the other."""
    stop()
    os.environ["MASTER_PORT"] = str(port)  # where the group that ends has none of its connections
    start(PlatformConfig(layers="torch", timeout_s=2.0))
    rank = dist.get_rank()

    def slow(result: Any) -> Any:
        time.sleep(3.0)
        return result

    own = on_every_rank(lambda: slow(rank) if rank == 1 else rank)
    return own, on_rank_zero(lambda: slow(f"of rank {rank}"))


@pytest.mark.full
def test_a_rank_that_waits_long_for_others_names_them_at_growing_intervals() -> None:
    first, second, third = run_ranks(reported_waits, 3, free_port())
    # Rank 1 works for 3 s, then ranks 0 and 2 do; the first of those who wait reports.
    assert first == [f"rank 0 has waited {waited} s for rank 1" for waited in (1, 2)]
    assert second == [f"rank 1 has waited {waited} s for ranks 0, 2" for waited in (1, 2)] and third == []


def reported_waits(port: int) -> list[str]:
    """On a rank whose waits are noted after half a second: the lines on its stderr."""
    stop()
    os.environ["MASTER_PORT"] = str(port)
    start(PlatformConfig(layers="torch"))
    agree.NOTE_S, agree.FIRST_REPORT_S = 0.5, 1.0
    rank, told = dist.get_rank(), io.StringIO()
    with redirect_stderr(told):
        on_every_rank(lambda: time.sleep(3.0) if rank == 1 else None)
        on_every_rank(lambda: time.sleep(3.0) if rank != 1 else None)
    return told.getvalue().splitlines()


def drawn(seed: int) -> tuple[float, float]:
    """On a rank: what a user's own code draws first from Python and from numpy."""
    build_mesh(MeshConfig())
    seed_ranks(seed)
    return random.random(), float(numpy.random.rand())


def test_python_and_numpy_draw_by_the_seed_of_the_run_and_the_rank() -> None:
    seed = 2**32 - 1  # numpy's seeds end here
    expected = [
        (random.Random(seed + rank).random(), numpy.random.RandomState(rank - 1 & seed).rand()) for rank in (0, 1)
    ]
    assert run_ranks(drawn, 2, seed) == expected
