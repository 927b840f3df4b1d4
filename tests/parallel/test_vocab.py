"""Logprobs and entropy from two slices of the vocabulary equal those from the whole."""

import torch
import torch.distributed as dist

from mcore_rl.parallel.mesh import Axis
from mcore_rl.parallel.vocab import IGNORED_TARGET, logprobs_and_entropy
from tests.ranks import run_ranks

TOKENS, PADDED = 9, 16


def inputs():
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(TOKENS, PADDED, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(0, 7, (TOKENS,), generator=generator)
    targets[3] = IGNORED_TARGET
    return logits, targets, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def on_a_rank(vocab_size):
    axis = Axis(dist.group.WORLD, dist.get_rank(), 2)
    logits, targets, pull = inputs()
    shard = logits.chunk(2, dim=1)[axis.rank].clone().requires_grad_()
    facts = logprobs_and_entropy(shard, targets, axis, vocab_size=vocab_size, temperature=0.8, chunk_tokens=4)
    (facts[0] * pull[0] + facts[1] * pull[1]).sum().backward()
    nothing = torch.full_like(targets, IGNORED_TARGET)
    logprobs_and_entropy(shard, nothing, axis, vocab_size=vocab_size, temperature=0.8, chunk_tokens=4)
    return [x.detach() for x in facts], shard.grad


def on_both(*vocab_sizes):
    return [on_a_rank(vocab_size) for vocab_size in vocab_sizes]


def test_two_slices_equal_the_whole_in_value_and_gradient():
    sizes = (16, 11, 8)  # no padding; padding on the second rank; the second rank has padding only
    ranks = run_ranks(on_both, 2, *sizes)
    for index, vocab_size in enumerate(sizes):
        logits, targets, pull = inputs()
        logits.requires_grad_()
        asked = targets != IGNORED_TARGET
        logprobs_TV = torch.log_softmax(logits[:, :vocab_size] / 0.8, dim=-1)
        logprobs = logprobs_TV.gather(1, targets.where(asked, 0)[:, None]).squeeze(1).where(asked, 0.0)
        entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1).where(asked, 0.0)
        (logprobs * pull[0] + entropy * pull[1]).sum().backward()
        for facts, _ in (ranks[0][index], ranks[1][index]):
            torch.testing.assert_close(facts, [logprobs.detach(), entropy.detach()], rtol=0, atol=1e-12)
        gradient = torch.cat([ranks[0][index][1], ranks[1][index][1]], dim=1)
        torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-12)
