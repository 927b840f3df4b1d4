"""Logprobs, entropy and cross entropy from two slices of the vocabulary equal those from the whole without padding."""

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.megatron.mesh import Axis, build_mesh, destroy_mesh
from mcore_rl.megatron.vocab import DeferredLogits, cross_entropy, exclude_padding, forward_kl, logprobs_and_entropy
from tests.ranks import run_ranks

TOKENS, PADDED = 9, 16
ASKED = torch.arange(TOKENS) != 3
ROWS = ASKED.nonzero()[:, 0]


def inputs():
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(TOKENS, PADDED, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(0, 7, (TOKENS,), generator=generator)
    return logits, targets, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def on_a_rank(vocab_size):
    axis = Axis(dist.group.WORLD, dist.get_rank(), 2)
    logits, targets, pull = inputs()
    shard = logits.chunk(2, dim=1)[axis.rank].clone().requires_grad_()
    settings = {"vocab_size": vocab_size, "temperature": 0.8, "chunk_tokens": 4}
    values = logprobs_and_entropy(shard, targets, axis, rows_N=ROWS, **settings)
    (values[0] * pull[0] + values[1] * pull[1]).sum().backward()
    logprobs_and_entropy(shard, targets, axis, rows_N=ROWS[:0], **settings)
    likeliest = shard.detach().clone().requires_grad_()
    kl = forward_kl(likeliest, *taught(vocab_size), ROWS, axis, **settings)
    (kl * pull[0]).sum().backward()
    return [x.detach() for x in values], shard.grad, deferred_on_a_rank(axis, vocab_size), (kl.detach(), likeliest.grad)


def taught(vocab_size):
    """A teacher's likeliest ids, on both ranks or on one, with their logprobs."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(len(ROWS), vocab_size, generator=generator, dtype=torch.float64)
    logprobs_NK, ids_NK = logits.log_softmax(-1).topk(3)
    return ids_NK, logprobs_NK


def assert_forward_kl(ranks, vocab_size):
    """Against autograd of the formula over the whole vocabulary."""
    logits, _, pull = inputs()
    logits.requires_grad_()
    ids_NK, logprobs_NK = taught(vocab_size)
    p_NK = torch.softmax(logits[ROWS, :vocab_size] / 0.8, dim=-1).gather(1, ids_NK)
    q_NK = logprobs_NK.exp()
    q_rest, p_rest = 1 - q_NK.sum(-1), 1 - p_NK.sum(-1)
    kl_N = (q_NK * (q_NK / p_NK).log()).sum(-1) + q_rest * (q_rest / p_rest).log()
    (kl_N * pull[0, ROWS]).sum().backward()
    for kl, _ in ranks:
        torch.testing.assert_close(kl[ROWS], kl_N.detach(), rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in ranks], 1), logits.grad, rtol=0, atol=1e-11)


def factors():
    """Hidden states and the whole output weight."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(size, 5, generator=generator, dtype=torch.float64) * 2 for size in (TOKENS, PADDED)]


def deferred_on_a_rank(axis, vocab_size):
    """Both statistics and the cross entropy, with the gradients of the hidden states (a part) and of this slice."""
    _, targets, pull = inputs()
    hidden, weight = factors()
    hidden, weight = hidden.requires_grad_(), weight.chunk(2)[axis.rank].clone().requires_grad_()
    logits = DeferredLogits(hidden, weight, 4)
    settings = {"vocab_size": vocab_size, "temperature": 0.8, "chunk_tokens": 1}
    got = logprobs_and_entropy(logits, targets, axis, rows_N=ROWS, **settings)
    losses = cross_entropy(logits, targets, axis, vocab_size=vocab_size)
    (got[0] * pull[0] + got[1] * pull[1] + losses * pull[1]).sum().backward()
    return [x.detach() for x in (*got, losses)], hidden.grad, weight.grad


def cross_entropies(vocab_size, dtype):
    """On a rank: the sums of the losses and this rank's gradient by Megatron's plain and by its fused function."""
    group = dist.group.WORLD
    logits, targets, _ = inputs()
    found = []
    for losses_of in (
        lambda logits, targets: vocab_parallel_cross_entropy(logits, targets),
        lambda logits, targets: fused_vocab_parallel_cross_entropy(logits, targets, group),
    ):
        leaf = logits.to(dtype).chunk(2, dim=1)[dist.get_rank()].clone().requires_grad_()
        shard = leaf[:, None].clone()
        exclude_padding(shard, group, vocab_size)
        losses = losses_of(shard, targets[:, None])
        losses.sum().backward()
        found.append((losses.detach().double().flatten(), leaf.grad))
    return found


def on_both(*vocab_sizes):
    statistics = [on_a_rank(vocab_size) for vocab_size in vocab_sizes]
    build_mesh(MeshConfig(tp=2))  # Megatron's plain cross entropy asks for the group
    losses = [
        cross_entropies(vocab_size, dtype) for vocab_size in vocab_sizes for dtype in (torch.float32, torch.bfloat16)
    ]
    destroy_mesh()
    return statistics, losses


def test_two_slices_equal_the_whole_in_value_and_gradient():
    sizes = (16, 11, 8)  # no padding; padding on the second rank; the second rank has padding only
    results = run_ranks(on_both, 2, *sizes)
    assert_cross_entropies([losses for _, losses in results], sizes)
    ranks = [statistics for statistics, _ in results]
    for index, vocab_size in enumerate(sizes):
        logits, targets, pull = inputs()
        logits.requires_grad_()
        logprobs_TV = torch.log_softmax(logits[:, :vocab_size] / 0.8, dim=-1)
        logprobs = logprobs_TV.gather(1, targets[:, None]).squeeze(1).where(ASKED, 0.0)
        entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1).where(ASKED, 0.0)
        (logprobs * pull[0] + entropy * pull[1]).sum().backward()
        assert_deferred([rank[index][2] for rank in ranks], vocab_size)
        assert_forward_kl([rank[index][3] for rank in ranks], vocab_size)
        for values, _, _, _ in (ranks[0][index], ranks[1][index]):
            torch.testing.assert_close(values, [logprobs.detach(), entropy.detach()], rtol=0, atol=1e-12)
        gradient = torch.cat([ranks[0][index][1], ranks[1][index][1]], dim=1)
        torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-12)


def assert_deferred(ranks, vocab_size):
    """Against log_softmax and torch's cross entropy of the whole product."""
    _, targets, pull = inputs()
    hidden, weight = (x.requires_grad_() for x in factors())
    logits = (hidden @ weight.T)[:, :vocab_size]
    logprobs_TV = torch.log_softmax(logits / 0.8, dim=-1)
    logprobs = logprobs_TV.gather(1, targets[:, None]).squeeze(1).where(ASKED, 0.0)
    entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1).where(ASKED, 0.0)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (logprobs * pull[0] + entropy * pull[1] + losses * pull[1]).sum().backward()
    for results, _, _ in ranks:
        wanted = [x.detach() for x in (logprobs, entropy, losses)]
        torch.testing.assert_close(results, wanted, rtol=0, atol=1e-12)
    # Each rank has its slice's part of the gradient of the hidden states.
    torch.testing.assert_close(ranks[0][1] + ranks[1][1], hidden.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), weight.grad, rtol=0, atol=1e-12)


def assert_cross_entropies(ranks, sizes):
    """Against torch's cross entropy in float64 over the ids of the vocabulary only."""
    cells = [(size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    for index, (vocab_size, dtype) in enumerate(cells):
        logits, targets, _ = inputs()
        leaf = logits.to(dtype).double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(leaf[:, :vocab_size], targets, reduction="none")
        losses.sum().backward()
        for plain_or_fused in range(2):
            # The fused function rounds every gradient to bfloat16.
            tolerance = 1e-6 if dtype == torch.float32 and not plain_or_fused else 1e-2
            found = [rank[index][plain_or_fused] for rank in ranks]
            gradient = torch.cat([gradient for _, gradient in found], dim=1)
            assert not gradient[:, vocab_size:].any()
            torch.testing.assert_close(found[0][0], losses.detach(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gradient.double(), leaf.grad, rtol=0, atol=tolerance)
