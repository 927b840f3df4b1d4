"""What one rank finds out, all ranks know."""

import os

import pytest

from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError, DataError
from mcore_rl.megatron.agree import on_every_rank, on_rank_zero, world_max, world_union
from mcore_rl.megatron.platform import Platform, start
from tests.ranks import run_ranks


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
