"""Replacements of Megatron's functions compute what the originals do, or what these compute with waits."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.utils import local_multi_tensor_scale

from mcore_rl.megatron.patches.replacements import packed_positions, scaled_in_place


def test_a_gradient_is_clipped_where_it_is() -> None:
    gradients = [torch.full((4,), 2.0), torch.full((2, 2), -6.0)]
    places = [gradient.data_ptr() for gradient in gradients]
    scaled_in_place(local_multi_tensor_scale)(0, torch.zeros(1), [gradients, gradients], 0.5)
    assert [gradient.unique().item() for gradient in gradients] == [1.0, -3.0]
    assert [gradient.data_ptr() for gradient in gradients] == places


def test_scaling_into_other_tensors_leaves_the_sources() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    scaled_in_place(local_multi_tensor_scale)(0, torch.zeros(1), [[source], [target]], 4.0)
    assert source.tolist() == [1.0] * 3
    assert target.tolist() == [4.0] * 3


class Alone:
    """A context-parallel group of one rank."""

    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.mark.parametrize("options", [{}, {"mscale": 0.7}, {"rotary_interleaved": True}], ids=str)
@pytest.mark.parametrize("lengths", [(5, 1, 9, 2), (9,), (3, 3)], ids=str)
@pytest.mark.parametrize("width", [8, 12])
def test_packed_sequences_are_each_rotated_from_their_start(
    options: dict[str, Any], lengths: tuple[int, ...], width: int
) -> None:
    """As many angles as positions are angles of the row's positions, in Megatron: there is one sequence then."""
    heads = torch.randn(sum(lengths), 3, width, requires_grad=True)
    freqs = torch.randn(9, 1, 1, 8)
    bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rotated = rope_utils._apply_rotary_pos_emb_thd(heads, bounds, freqs, cp_group=Alone(), **options)
    alone = rope_utils._apply_rotary_pos_emb_bshd
    expected = torch.cat([alone(part[:, None], freqs[: len(part)], **options)[:, 0] for part in heads.split(lengths)])
    weights = torch.randn_like(rotated)
    for one, other in (
        (rotated, expected),
        *zip(*[torch.autograd.grad((each * weights).sum(), heads) for each in (rotated, expected)], strict=True),
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
            rope_utils._get_thd_freqs_on_this_cp_rank(
                rank, ranks, torch.empty(length // ranks), table, int(begin) if counts_through else 0
            )
            for length, begin in zip(lengths, cu_seqlens, strict=False)
        ]
        found = packed_positions(cu_seqlens, sum(lengths) // ranks, rank, ranks, len(table))
        assert table[found].tolist() == torch.cat(cut).tolist()
