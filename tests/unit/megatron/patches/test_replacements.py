"""Replacements of Megatron's functions compute what the originals do, or what these compute with waits."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.utils import local_multi_tensor_scale

from mcore_rl.megatron.patches.replacements import packed_positions, scaled_in_place
from tests.ranks import run_ranks


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


def errors_of_groups_without_threads() -> list[str]:
    """On a rank: why no more groups could be made, with room for the stacks of ever more threads (8 MiB each)."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    errors = []
    # Steps of 64 KiB where a second thread gets its stack and little more, at which Python's own start hung.
    for room in (*range(0, 48 << 20, 3 << 20), *range(16 << 20, 17 << 20, 64 << 10)):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, hard))
        try:
            for _ in range(100):
                dist.new_group()
        except (OSError, RuntimeError) as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    return errors


def test_a_group_whose_threads_cannot_be_started_is_an_error_and_neither_hangs_nor_aborts() -> None:
    """gloo's constructor destroys what its first thread waits for when it cannot start the second."""
    [errors] = run_ranks(errors_of_groups_without_threads, 1)
    assert errors == ["[Errno 12] Cannot allocate memory"] * 32
