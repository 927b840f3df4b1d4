from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.config.data import DataConfig
from mcore_rl.data.batch import BatchSource
from mcore_rl.data.indexed import SampleCounts, build_datasets, plan_data
from mcore_rl.errors import DataError
from tests.ranks import run_ranks
from tests.unit.data.test_index_file import write

STEPS = ((0, 4), (4, 8), (12, 8))
"""(cursor, global batch)."""


def read_all(folder: str) -> list[list[list[int]]]:
    """Of each step, this rank's rows of tokens."""
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
