"""The choice of experts among groups, beside Megatron's where both are the same, and by hand where they differ."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk

from mcore_rl.megatron.routers import best_in_groups


@pytest.mark.parametrize(("top_k", "top_groups"), [(4, 2), (6, 3), (2, 1)])
def test_it_is_megatrons_choice_where_a_group_is_ranked_by_as_many_experts(top_k: int, top_groups: int) -> None:
    scores_TE = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    ours = best_in_groups(scores_TE, top_k, num_groups=4, top_groups=top_groups, experts_in_score=top_k // top_groups)
    theirs = group_limited_topk(scores_TE, top_k, 64, 16, 4, top_groups)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(("experts_in_score", "wanted"), [(1, [0, 1]), (2, [3, 4]), (3, [6, 8])])
def test_groups_are_ranked_by_the_sum_of_their_best_experts(experts_in_score: int, wanted: list[int]) -> None:
    """The first of three groups has the best expert, the second the best two, the third the best three."""
    scores_1E = torch.tensor([[9.0, 0.5, 0.1, 8.0, 7.0, 0.2, 6.0, 5.0, 5.5]])
    _, experts_1K = best_in_groups(scores_1E, 2, num_groups=3, top_groups=1, experts_in_score=experts_in_score)
    assert experts_1K.tolist() == [wanted]
