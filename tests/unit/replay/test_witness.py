"""The witness's own layout of tokens, against positions counted by hand and against the tape's."""

import itertools

import pytest
import torch

from mcore_rl.replay.cache import MicrobatchLayout, SampleSpan, local_tokens
from mcore_rl.replay.witness import labels_at_routers
from tests.unit.replay.test_layouts import PACKED, PADDED, mesh

WIDE = MicrobatchLayout(
    ((SampleSpan(3, 15, 16), SampleSpan(0, 1, 8), SampleSpan(-1, 0, 8), SampleSpan(5, 16, 16)),),
    row_length=48,
    packed=True,
)
SEGMENTS = MicrobatchLayout(
    ((SampleSpan(6, 5, 8), SampleSpan(2, 3, 4), SampleSpan(2, 7, 8, 0, 3), SampleSpan(2, 1, 4, 4, 10)),),
    row_length=24,
    packed=True,
)
TWO_ROWS = MicrobatchLayout(
    ((SampleSpan(4, 13, 16),), (SampleSpan(-1, 0, 16),), (SampleSpan(1, 16, 16),)), row_length=16, packed=False
)


def test_positions_counted_by_hand() -> None:
    """Two packed spans of 4 and 8 positions, and 4 of padding; the second of two ranks has the middle of each."""
    index_t, position_t = labels_at_routers(PACKED, mesh(cp=2, cp_rank=1))
    assert index_t.tolist() == [0, 0, 1, 1, 1, 1, -1, -1]
    assert position_t.tolist() == [1, 2, 2, 3, 4, 5, -1, -1]
    index_t, position_t = labels_at_routers(SEGMENTS, mesh(cp=2, cp_rank=0))
    assert index_t.tolist() == [0, 0, -1, -1, 1, -1, 1, 1, 1, -1, 1, -1]
    assert position_t.tolist() == [0, 1, -1, -1, 0, -1, 3, 4, 9, -1, 10, -1], "positions of a sample go on"
    index_t, position_t = labels_at_routers(PADDED, mesh(tp=2, tp_rank=1))
    assert index_t.tolist() == [0, 1, -1, 1]
    assert position_t.tolist() == [2, 2, -1, 3]


@pytest.mark.parametrize("layout", [PADDED, PACKED, WIDE, SEGMENTS, TWO_ROWS])
def test_every_rank_of_every_mesh_sees_the_tokens_that_the_tape_lays_out(layout: MicrobatchLayout) -> None:
    ranks = [(cp, tp, c, t) for cp, tp in ((1, 1), (2, 1), (1, 2), (2, 2)) for c in range(cp) for t in range(tp)]
    for cp, tp, cp_rank, tp_rank in ranks:
        where = mesh(cp=cp, tp=tp, cp_rank=cp_rank, tp_rank=tp_rank)
        tokens = local_tokens(layout, where)
        index_t, position_t = labels_at_routers(layout, where)
        assert torch.equal(index_t, tokens.sample_index_t), where
        assert torch.equal(position_t.clamp_min(0), tokens.position_t), where


def test_four_ranks_of_context_parallelism_have_each_token_once() -> None:
    layout = MicrobatchLayout(((SampleSpan(0, 15, 16), SampleSpan(1, 8, 8)),), row_length=24, packed=True)
    labels = [labels_at_routers(layout, mesh(cp=4, cp_rank=rank)) for rank in range(4)]
    found = [pair for index_t, position_t in labels for pair in zip(index_t.tolist(), position_t.tolist(), strict=True)]
    expected = [*itertools.product([0], range(15)), *itertools.product([1], range(8)), (-1, -1)]
    assert sorted(found) == sorted(expected)
    assert labels[1][1].tolist() == [2, 3, 12, 13, 1, 6]
