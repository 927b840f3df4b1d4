"""Tokens that a rank's routers see, against positions counted by hand."""

from types import SimpleNamespace

import pytest
import torch

from mcore_rl.replay.cache import MicrobatchLayout, SampleSpan, local_tokens


def mesh(cp: int = 1, tp: int = 1, cp_rank: int = 0, tp_rank: int = 0) -> SimpleNamespace:
    """Return the three properties of a mesh that decide; no process group is needed."""
    return SimpleNamespace(
        cp=SimpleNamespace(size=cp, rank=cp_rank), tp=SimpleNamespace(size=tp, rank=tp_rank), sequence_parallel=tp > 1
    )


def named(layout: MicrobatchLayout, where: SimpleNamespace) -> list[str]:
    part = local_tokens(layout, where)
    return [
        f"{part.samples[owner]}.{position}" if owner >= 0 else "-"
        for owner, position in zip(part.sample_index_t.tolist(), part.position_t.tolist(), strict=True)
    ]


PADDED = MicrobatchLayout(((SampleSpan(7, 3, 4),), (SampleSpan(9, 4, 4),)), row_length=4, packed=False)
PACKED = MicrobatchLayout(
    ((SampleSpan(7, 3, 4), SampleSpan(9, 6, 8), SampleSpan(-1, 0, 4)),), row_length=16, packed=True
)


def test_a_router_reads_position_by_position_not_row_by_row() -> None:
    assert named(PADDED, mesh()) == ["7.0", "9.0", "7.1", "9.1", "7.2", "9.2", "-", "9.3"]


def test_sequence_parallelism_cuts_positions() -> None:
    assert named(PADDED, mesh(tp=2, tp_rank=1)) == ["7.2", "9.2", "-", "9.3"]


def test_context_parallelism_takes_the_first_and_the_last_piece_of_a_row() -> None:
    assert named(PADDED, mesh(cp=2, cp_rank=0)) == ["7.0", "9.0", "-", "9.3"]
    assert named(PADDED, mesh(cp=2, cp_rank=1)) == ["7.1", "9.1", "7.2", "9.2"]


def test_packed_spans_are_cut_one_by_one() -> None:
    """The spans have 4, 8 and 4 positions, each with its own padding."""
    assert named(PACKED, mesh(cp=2, cp_rank=0)) == ["7.0", "-", "9.0", "9.1", "-", "-", "-", "-"]
    assert named(PACKED, mesh(cp=2, cp_rank=1)) == ["7.1", "7.2", "9.2", "9.3", "9.4", "9.5", "-", "-"]


def test_sequence_parallelism_cuts_packed_rows_anywhere() -> None:
    assert named(PACKED, mesh(cp=2, cp_rank=1, tp=2, tp_rank=0)) == ["7.1", "7.2", "9.2", "9.3"]
    assert named(PACKED, mesh(tp=4, tp_rank=1)) == ["9.0", "9.1", "9.2", "9.3"]


@pytest.mark.parametrize("layout", [PADDED, PACKED])
def test_every_token_is_on_one_rank(layout: MicrobatchLayout) -> None:
    everywhere = [
        name
        for cp_rank in range(2)
        for tp_rank in range(2)
        for name in named(layout, mesh(cp=2, tp=2, cp_rank=cp_rank, tp_rank=tp_rank))
        if name != "-"
    ]
    tokens = [f"{span.sample}.{n}" for span in layout.spans for n in range(span.num_tokens)]
    assert sorted(everywhere) == sorted(tokens)


def test_routes_are_current_from_a_position_of_the_sample_on_wherever_it_lies() -> None:
    layout = MicrobatchLayout(
        ((SampleSpan(7, 3, 4), SampleSpan(9, 6, 8, first_current=3), SampleSpan(-1, 0, 4)),), row_length=16, packed=True
    )
    for cp_rank in range(2):
        part = local_tokens(layout, mesh(cp=2, cp_rank=cp_rank))
        real = part.is_real_t
        names = [name for name in named(layout, mesh(cp=2, cp_rank=cp_rank)) if name != "-"]
        stale = [n for n, current in zip(names, part.is_current_t[real].tolist(), strict=True) if not current]
        assert stale == (["9.0", "9.1"], ["9.2"])[cp_rank]


def test_positions_of_a_sample_rise() -> None:
    part = local_tokens(PACKED, mesh())
    assert torch.equal(part.positions_of(1), torch.arange(6))
    assert part.lengths == (3, 6)


def test_a_sample_is_in_a_microbatch_once() -> None:
    with pytest.raises(AssertionError, match="twice"):
        MicrobatchLayout(((SampleSpan(7, 3, 4), SampleSpan(7, 3, 4)),), row_length=8, packed=True)
