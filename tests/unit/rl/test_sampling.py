"""Tokens are drawn with their probabilities: against distributions in float64, and by counting."""

import math

import pytest
import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.sampling import BLOCK, Cut, draw, uniforms

VOCAB, PADDED = 700, 768  # several blocks, and ids that only pad

CUTS = {
    "plain": Cut(),
    "hot": Cut(temperature=1.7),
    "top_k": Cut(temperature=0.7, top_k=5),
    "top_p": Cut(top_p=0.6),
    "min_p": Cut(min_p=0.1),
    "all": Cut(temperature=1.2, top_k=40, top_p=0.8, min_p=0.05),
}


def logits_of(rows: int, seed: int = 0) -> Tensor:
    """Padding is the likeliest of all, so that it would be seen."""
    logits_BV = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed)) * 2
    logits_BV[:, VOCAB:] = 50.0
    return logits_BV


def probabilities(logits_V: Tensor, cut: Cut) -> Tensor:
    """The distribution that a cut defines, token by token from the likeliest on, in float64."""
    probs_V = (logits_V[:VOCAB].double() / cut.temperature).softmax(0)
    order = probs_V.argsort(descending=True).tolist()
    if cut.top_k:
        order = order[: cut.top_k]
    goal, mass, kept = cut.top_p * sum(probs_V[token].item() for token in order), 0.0, []
    for token in order:
        if mass >= goal and cut.top_p < 1:
            break
        mass += probs_V[token].item()
        kept.append(token)
    kept = [token for token in kept if probs_V[token] >= cut.min_p * probs_V[order[0]]]
    result_V = torch.zeros_like(probs_V)
    result_V[kept] = probs_V[kept]
    return result_V / result_V.sum()


@pytest.mark.matrix("top_k", "top_p", "all")
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_token_is_where_the_sum_of_the_law_passes_the_uniform(cut: Cut, one_rank: Mesh) -> None:
    logits_BV = logits_of(64)
    uniforms_B = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw(logits_BV, uniforms_B, cut, one_rank.tp, vocab_size=VOCAB)
    for logits_V, uniform, token in zip(logits_BV, uniforms_B, drawn.tokens_B, strict=True):
        ends_V = probabilities(logits_V, cut).cumsum(0)
        before = ends_V[token - 1] if token else 0.0
        assert before - 1e-6 <= uniform <= ends_V[token] + 1e-6
        assert probabilities(logits_V, cut)[token] > 0


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_logprobs_are_of_the_whole_tempered_distribution_and_the_kept_mass_of_what_may_be_drawn(
    cut: Cut, one_rank: Mesh
) -> None:
    """The negative log of the mass is KL(cut || whole), which is summed here over the whole vocabulary."""
    logits_BV = logits_of(64)
    drawn = draw(logits_BV, torch.full((64,), 0.5).double(), cut, one_rank.tp, vocab_size=VOCAB)
    whole_BV = (logits_BV[:, :VOCAB].double() / cut.temperature).log_softmax(1)
    wanted_B = whole_BV.gather(1, drawn.tokens_B[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.logprobs_B, wanted_B, rtol=0, atol=2e-6)
    cut_BV = torch.stack([probabilities(logits_V, cut) for logits_V in logits_BV])
    kl_B = (torch.special.xlogy(cut_BV, cut_BV) - torch.special.xlogy(cut_BV, whole_BV.exp())).sum(1)
    torch.testing.assert_close(-drawn.kept_logprobs_B, kl_B, rtol=0, atol=2e-6)


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first(one_rank: Mesh) -> None:
    logits_BV = logits_of(16)
    logits_BV[3, [5, 600]] = 40.0
    drawn = draw(logits_BV, torch.rand(16).double(), Cut(temperature=0.0), one_rank.tp, vocab_size=VOCAB)
    assert drawn.tokens_B.tolist() == logits_BV[:, :VOCAB].argmax(1).tolist()
    assert drawn.tokens_B[3] == 5
    wanted_BV = logits_BV[:, :VOCAB].double().log_softmax(1)
    torch.testing.assert_close(drawn.logprobs_B, wanted_BV.amax(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["hot", "all"])
def test_many_seeds_draw_each_token_as_often_as_the_law_says(name: str, one_rank: Mesh) -> None:
    """Pearson's statistic over tokens expected at least five times: within four deviations of its mean."""
    count, cut = 4000, CUTS[name]
    logits_1V = logits_of(1, seed=4)
    uniforms_B = uniforms(torch.arange(count), torch.full((count,), 17))
    drawn = draw(logits_1V.expand(count, -1), uniforms_B, cut, one_rank.tp, vocab_size=VOCAB)
    expected_V = probabilities(logits_1V[0], cut) * count
    seen_V = drawn.tokens_B.bincount(minlength=VOCAB).double()
    often = expected_V >= 5
    terms = (seen_V[often] - expected_V[often]) ** 2 / expected_V[often]
    rest = expected_V[~often].sum()
    freedom = int(often.sum()) - 1
    statistic = terms.sum() + (seen_V[~often].sum() - rest) ** 2 / rest.clamp_min(1)
    assert freedom >= 10 and abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_uniforms_are_even_and_neighbours_have_nothing_in_common() -> None:
    seeds, positions = torch.meshgrid(torch.arange(-100, 100), torch.arange(100), indexing="ij")
    grid = uniforms(seeds.flatten(), positions.flatten()).view(200, 100)
    assert grid.min() > 0 and grid.max() < 1 and len(grid.unique()) == grid.numel()
    tenths = (grid * 10).long().flatten().bincount(minlength=10).double()
    assert (((tenths - 2000) ** 2) / 2000).sum() < 9 + 4 * math.sqrt(18)
    centered = grid - grid.mean()
    for near in (centered[1:] * centered[:-1], centered[:, 1:] * centered[:, :-1]):
        # The mean of n products of independent uniforms has the deviation 1 / 12 / sqrt(n).
        assert abs(near.mean()) < 4 / 12 / math.sqrt(near.numel())


def test_a_draw_at_the_end_of_the_distribution_is_a_token_of_it(one_rank: Mesh) -> None:
    logits_BV = torch.full((1, PADDED), -1e9)
    logits_BV[0, [3, BLOCK + 4]] = 0.0
    for uniform, token in ((1 - 2**-54, BLOCK + 4), (2**-54, 3)):
        drawn = draw(logits_BV, torch.tensor([uniform]).double(), Cut(), one_rank.tp, vocab_size=VOCAB)
        assert drawn.tokens_B.tolist() == [token]
