"""Replacements of parts of Megatron that a GPU would wait in; Megatron's own is the oracle."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from mcore_rl.megatron.patches.replacements import packed_positions


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16, 8, 40), (24,), (8, 8, 0, 16)], ids=str)
@pytest.mark.parametrize("counts_through", [False, True])
def test_packed_positions_are_the_rows_that_megatron_cuts(
    ranks: int, lengths: tuple[int, ...], counts_through: bool
) -> None:
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).int()
    table = torch.arange(sum(lengths) if counts_through else 100)
    for rank in range(ranks):
        cut = [
            _get_thd_freqs_on_this_cp_rank(
                rank, ranks, torch.empty(length // ranks), table, int(begin) if counts_through else 0
            )
            for length, begin in zip(lengths, cu_seqlens, strict=False)
        ]
        found = packed_positions(cu_seqlens, sum(lengths) // ranks, rank, ranks, len(table))
        assert table[found].tolist() == torch.cat(cut).tolist()
