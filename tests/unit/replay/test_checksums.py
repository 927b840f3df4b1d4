"""Checksums are equal for the same routes in any layout, and differ for any other routes."""

import torch

from mcore_rl.replay.accounts import changed_choices, expert_hashes, route_checksums, token_hashes

T, L, K, E = 40, 3, 4, 384
LAYERS = (1, 2, 5)
CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
CODES_TLK = torch.rand(T, L, E, generator=GENERATOR).topk(K).indices.to(torch.int16)
IDS_T = torch.randint(0, 50, (T,), generator=GENERATOR)
OWNER_T = torch.arange(T) % 2
POSITION_T = torch.arange(T) // 2


def sums(codes=CODES_TLK, ids=IDS_T, owner=OWNER_T, position=POSITION_T, layers=LAYERS):
    weights = token_hashes(ids, position, torch.ones(len(ids), dtype=torch.bool))
    return route_checksums(codes.permute(2, 0, 1), expert_hashes(layers, E, CPU), weights, owner, 2)


def test_parts_add_up_in_any_order() -> None:
    order = torch.randperm(T, generator=GENERATOR)
    mixed = [x[order] for x in (CODES_TLK, IDS_T, OWNER_T, POSITION_T)]
    halves = [sums(*(x[part] for x in mixed)) for part in (slice(0, 13), slice(13, T))]
    assert torch.equal(halves[0] + halves[1], sums())


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    assert torch.equal(sums(CODES_TLK.flip(-1)), sums())


def test_any_other_expert_of_any_token_changes_its_layer_and_sample_only() -> None:
    for token in range(T):
        other = CODES_TLK.clone()
        other[token, 1, 0] = (other[token, 1, 0] + 1) % E
        differs = sums(other) != sums()
        assert differs.nonzero().tolist() == [[token % 2, 1]]


def test_routes_of_another_token_layer_or_id_are_told_apart() -> None:
    assert (sums(CODES_TLK.roll(2, 0)) != sums()).all()
    assert (sums(CODES_TLK.roll(1, 1)) != sums()).all()
    assert (sums(ids=IDS_T + 1) != sums()).all()
    assert (sums(position=POSITION_T + 1) != sums()).all()
    assert (sums(layers=(1, 2, 6))[:, 2] != sums()[:, 2]).all()


def test_padding_counts_nothing() -> None:
    is_real = torch.arange(T) < 30
    weights = token_hashes(IDS_T, POSITION_T, is_real)
    owner = OWNER_T.where(is_real, -1)
    whole = route_checksums(CODES_TLK.permute(2, 0, 1), expert_hashes(LAYERS, E, CPU), weights, owner, 2)
    assert torch.equal(whole, sums(CODES_TLK[:30], IDS_T[:30], OWNER_T[:30], POSITION_T[:30]))


def test_a_choice_is_changed_when_it_is_none_of_the_known_ones() -> None:
    live = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]])
    known = torch.tensor([[[3, 1, 7], [6, 5, 4], [0, 1, 2]]])
    is_known = torch.tensor([True, True, False])
    expected = [[[False, True, False], [False] * 3, [False] * 3]]
    assert changed_choices(live, known, is_known).permute(1, 2, 0).tolist() == expected
