"""The choice of keys, by brute force in float64, and the blocks in which it is made."""

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model
from mcore_rl.model.layers import indexed as indexer
from mcore_rl.model.layers.attention import gathered_order, packed_params
from mcore_rl.model.layers.indexed import Indexed, Segment, blocks, choose, segments
from mcore_rl.model.spec import choice_slots
from tests.fake_world import fake_rank
from tests.ranks import run_ranks
from tests.tiny_models import TINY

HEADS, WIDTH, TOPK = 3, 4, 5


def random_indexed(length: int, rows: int) -> Indexed:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(length, rows, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    key = torch.randn(length, rows, WIDTH, generator=generator, dtype=torch.float64)
    return Indexed(query, key, torch.randn(length, rows, HEADS, generator=generator, dtype=torch.float64))


def by_hand(indexed: Indexed, at: int, row: int, begin: int = 0) -> list[int]:
    """The positions from `begin` that a query chooses: by falling score, of equal ones the earlier first."""
    scores = []
    for position in range(begin, at + 1):
        products = indexed.query[at, row] @ indexed.key[position, row]
        scores.append(float((indexed.weight[at, row] * products.clamp(min=0)).sum()))
    return sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:TOPK]


def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor.double())


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize("lengths", [(23,), (3, 11, 5, 6, 1)])
def test_each_query_has_the_earlier_keys_of_largest_score(
    lengths: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_double(monkeypatch)
    monkeypatch.setattr(indexer, "BLOCK", block)
    monkeypatch.setattr(indexer, "HEADS_AT_ONCE", 2)
    indexed = random_indexed(sum(lengths), 2)
    chosen = choose(indexed, indexed.key, list(segments(lengths, 0, 1)), TOPK)
    begin = 0
    for length in lengths:
        for at in range(begin + TOPK, begin + length):
            for row in range(2):
                assert chosen[at, row].tolist() == by_hand(indexed, at, row, begin)
        begin += length


def test_of_equal_scores_the_earlier_key_is_chosen() -> None:
    """Products below zero are zero, as most are here: with a negative weight these are the largest scores."""
    length = 40
    indexed = random_indexed(length, 1)
    indexed = Indexed(indexed.query.float(), -indexed.query.float().sum(2), -indexed.weight.float().abs())
    chosen = choose(indexed, indexed.key, [Segment(0, length, 0, length)], TOPK)
    wanted = [by_hand(indexed, at, 0) for at in range(TOPK, length)]
    assert chosen[TOPK:, 0].tolist() == wanted
    products = torch.einsum("qhd,kd->qkh", indexed.query[:, 0], indexed.key[:, 0])
    num_zeros = (products.tril(-0).clamp(min=0).sum(-1) == 0).sum(1)
    assert (num_zeros > TOPK).any(), "ties decide"


@pytest.mark.parametrize("lengths", [(24,), (8, 40, 16)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_choose_what_one_rank_does(lengths: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_double(monkeypatch)
    indexed = random_indexed(sum(lengths), 1)
    whole = choose(indexed, indexed.key, list(segments(lengths, 0, 1)), TOPK)
    order = gathered_order(lengths, ranks).argsort()
    for rank in range(ranks):
        own = order.chunk(ranks)[rank]
        here = Indexed(*(part[own] for part in indexed))
        chosen = choose(here, indexed.key, list(segments(lengths, rank, ranks)), TOPK)
        assert torch.equal(chosen, whole[own])


def test_blocks_begin_where_a_query_sees_more_keys_than_are_chosen() -> None:
    assert list(blocks(3, 5, 5)) == []
    assert list(blocks(3, 5, 4)) == [(2, 3, 5)]
    assert list(blocks(600, 700, 50)) == [(0, 512, 612), (512, 600, 700)]


def test_layers_share_the_last_choice_before_them() -> None:
    mixers = ["indexed", "indexed", "shared", "shared", "indexed", "shared", "indexed"]
    assert choice_slots(mixers) == [None, 0, 0, 0, 1, 1, None]
    assert choice_slots(["attention", "delta"]) == [None, None]
    assert choice_slots([]) == []  # a chunk without layers


def built(model: ModelConfig, mesh: Mesh) -> nn.Module:
    settings = PlatformConfig(layers="torch")
    seed_ranks(1)
    return build_model(model, mesh, start(settings), settings)[0].eval()


def refusals(mesh: MeshConfig) -> list[str]:
    """The message with which each pipeline rank refuses to build its chunks, or no text."""
    messages = []
    for rank in range(mesh.pp):
        with fake_rank(mesh, rank, mesh.pp) as fake:
            try:
                built(TINY["glm_moe_dsa"], fake)
            except AssertionError as error:
                messages.append(str(error))
            else:
                messages.append("")
    return messages


def test_a_chunk_that_begins_with_a_shared_choice_is_not_built() -> None:
    """Layers 1 and 3 of 4 share the choices of layers 0 and 2. Such a chunk had gradients that were 50 % off."""
    (messages,) = run_ranks(refusals, 1, MeshConfig(pp=2, first_stage_layers=3, last_stage_layers=1))
    refusal = "layer {}, which takes the keys that a layer before it chooses, begins a chunk of 1 layers"
    assert messages == ["", refusal.format(3)]
    assert run_ranks(refusals, 1, MeshConfig(pp=2, vpp=2)) == [["", refusal.format(1)]]
    assert run_ranks(refusals, 1, MeshConfig(pp=2)) == [["", ""]]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sequences_up_to_topk_have_the_logits_of_deepseek_v3(family: str, one_rank: Mesh) -> None:
    model = TINY[family]
    plain = model.model_copy(update={"family": "deepseek_v3", "indexer": ModelConfig().indexer})
    ours, theirs = built(model, one_rank), built(plain, one_rank)
    theirs.load_state_dict({key: tensor for key, tensor in ours.state_dict().items() if ".indexer." not in key})
    topk = model.indexer.top_k
    assert topk is not None
    tokens_BS = torch.randint(0, 120, (2, topk + 4), generator=torch.Generator().manual_seed(1))
    at_BS = torch.arange(topk + 4).expand(2, -1)
    for length, is_equal in ((topk, True), (topk + 4, False)):
        given = {"input_ids": tokens_BS[:, :length], "position_ids": at_BS[:, :length], "attention_mask": None}
        with torch.no_grad():
            assert torch.equal(ours(**given), theirs(**given)) == is_equal


@pytest.mark.matrix("glm_moe_dsa")
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_packed_sequences_do_not_see_each_other(family: str, one_rank: Mesh) -> None:
    """Some sequences are shorter than topk, and have no choice beside those that have one."""
    chunk = built(TINY[family], one_rank)
    lengths = (20, 5, 31, 1, 8, 9, 3)
    tokens_BS = torch.randint(0, 120, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    at = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = chunk(
            input_ids=tokens_BS,
            position_ids=at,
            attention_mask=None,
            packed_seq_params=packed_params(lengths, torch.device("cpu")),
        )
        for part, of_packed in zip(tokens_BS.split(lengths, 1), packed.split(lengths, 1), strict=True):
            alone = chunk(input_ids=part, position_ids=torch.arange(part.shape[1])[None], attention_mask=None)
            assert (alone - of_packed).abs().max() <= 2e-6
