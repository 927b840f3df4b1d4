"""Logprobs and entropy against log_softmax in float64."""

import math

import pytest
import torch

from mcore_rl.parallel.mesh import Axis
from mcore_rl.parallel.vocab import IGNORED_TARGET, logprobs_and_entropy, reverse_kl, vocabulary_logprobs

ALONE = Axis(None, 0, 1)


def example(dtype=torch.float64, tokens=13, padded=24):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(tokens, padded, generator=generator, dtype=torch.float64).mul_(4).to(dtype)
    targets = torch.randint(0, 19, (tokens,), generator=generator)
    pull = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), targets, pull


def by_log_softmax(logits, targets, vocab_size, temperature):
    logprobs_TV = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=-1)
    entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_log_softmax(chunk_tokens, temperature):
    logits, targets, pull = example()
    wanted = by_log_softmax(logits, targets, 19, temperature)
    (gradient,) = torch.autograd.grad((wanted[0] * pull[0] + wanted[1] * pull[1]).sum(), logits)
    got = logprobs_and_entropy(
        logits, targets, ALONE, vocab_size=19, temperature=temperature, chunk_tokens=chunk_tokens
    )
    (got[0] * pull[0] + got[1] * pull[1]).sum().backward()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12, check_dtype=True)
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-12)
    assert logits.grad[:, 19:].abs().max() == 0


@pytest.mark.parametrize("which", [0, 1])
def test_either_result_alone_has_its_own_gradient(which):
    logits, targets, pull = example()
    wanted = by_log_softmax(logits, targets, 24, 1.0)[which]
    (gradient,) = torch.autograd.grad((wanted * pull[0]).sum(), logits)
    got = logprobs_and_entropy(logits, targets, ALONE, vocab_size=24, temperature=1.0, chunk_tokens=4)[which]
    (got * pull[0]).sum().backward()
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "gradient_error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_low_precision_logits_are_read_in_fp32(dtype, gradient_error):
    logits, targets, pull = example(dtype)
    wanted = by_log_softmax(logits, targets, 19, 0.5)
    (gradient,) = torch.autograd.grad((wanted[0] * pull[0] + wanted[1] * pull[1]).sum(), logits)
    got = logprobs_and_entropy(logits, targets, ALONE, vocab_size=19, temperature=0.5, chunk_tokens=4)
    (got[0] * pull[0] + got[1] * pull[1]).sum().backward()
    assert got.logprobs_T.dtype == torch.float32
    torch.testing.assert_close([x.double() for x in got], list(wanted), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits.grad, gradient, rtol=gradient_error, atol=gradient_error)
    assert logits.grad.dtype == dtype


def test_positions_that_are_not_asked_for_are_zeros():
    logits, targets, pull = example()
    asked = torch.arange(13) % 3 == 0
    got = logprobs_and_entropy(
        logits, targets.where(asked, IGNORED_TARGET), ALONE, vocab_size=19, temperature=1.0, chunk_tokens=2
    )
    (got[0] * pull[0] + got[1]).sum().backward()
    wanted = by_log_softmax(logits, targets, 19, 1.0)
    torch.testing.assert_close(got, tuple(x.where(asked, 0.0) for x in wanted), rtol=0, atol=1e-12)
    assert logits.grad[~asked].abs().max() == 0
    assert logits.grad[asked].abs().max() > 0


def test_nothing_asked_is_nothing_and_far_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    none = logprobs_and_entropy(
        logits, torch.tensor([IGNORED_TARGET] * 2), ALONE, vocab_size=3, temperature=1.0, chunk_tokens=2
    )
    assert [x.tolist() for x in none] == [[0.0, 0.0], [0.0, 0.0]]
    far = logprobs_and_entropy(
        logits, torch.tensor([1, 2]), ALONE, vocab_size=3, temperature=1.0, chunk_tokens=2
    )
    assert far.logprobs_T.tolist() == pytest.approx([-2e4, -1.0986123])
    assert far.entropy_T.tolist() == pytest.approx([0.0, 1.0986123])


def test_logits_of_minus_infinity_have_no_probability_and_no_gradient():
    """The oracle is log_softmax over the finite logits alone."""
    logits, targets, pull = example()
    finite = torch.arange(24) % 5 != 3
    targets = torch.where(finite[targets], targets, 0)
    with torch.no_grad():
        logits[:, ~finite] = -torch.inf
    wanted = by_log_softmax(logits[:, finite], (finite.cumsum(0) - 1)[targets], 24, 0.7)
    (gradient,) = torch.autograd.grad((wanted[0] * pull[0] + wanted[1] * pull[1]).sum(), logits)
    got = logprobs_and_entropy(logits, targets, ALONE, vocab_size=24, temperature=0.7, chunk_tokens=4)
    (got[0] * pull[0] + got[1] * pull[1]).sum().backward()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12, check_dtype=True)
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-12)
    impossible = logprobs_and_entropy(
        logits, torch.full((13,), 3), ALONE, vocab_size=24, temperature=0.7, chunk_tokens=4
    )
    assert impossible.logprobs_T.tolist() == [-torch.inf] * 13


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_the_kl_over_the_vocabulary_and_its_gradient_are_those_of_log_softmax(chunk_tokens):
    logits, _, pull = example()
    other = torch.randn(13, 24, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rows = torch.tensor([0, 3, 4, 9, 12])
    settings = {"vocab_size": 19, "temperature": 0.7, "chunk_tokens": chunk_tokens}
    logprobs_TV = torch.log_softmax(logits[:, :19] / 0.7, dim=-1)
    other_TV = torch.log_softmax(other[:, :19] / 0.7, dim=-1)
    wanted = (logprobs_TV.exp() * (logprobs_TV - other_TV)).sum(-1)[rows]
    (gradient,) = torch.autograd.grad((wanted * pull[0][rows]).sum(), logits)
    other_Nv = vocabulary_logprobs(other, rows, ALONE, **settings)
    torch.testing.assert_close(other_Nv, other_TV[rows].float(), rtol=0, atol=1e-6)
    got = reverse_kl(logits, other_TV[rows], rows, ALONE, **settings, limit_nats=20.0)
    (got * pull[0]).sum().backward()
    torch.testing.assert_close(got[rows], wanted, rtol=0, atol=1e-12)
    assert got.count_nonzero() == 5
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-12)


def test_a_token_that_a_teacher_excludes_counts_as_far_below_and_not_as_infinitely_far():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    excludes = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    settings = {"vocab_size": 3, "temperature": 1.0, "chunk_tokens": 8}
    kl = reverse_kl(logits, excludes, torch.tensor([0]), ALONE, **settings, limit_nats=20.0)
    kl.sum().backward()
    # p is a half at two tokens: log p - log q is log 0.5 at the first, and 20 at the second.
    wanted = 0.5 * math.log(0.5) + 0.5 * 20.0
    assert kl.tolist() == pytest.approx([wanted], rel=1e-12)
    pulls = [0.5 * (math.log(0.5) - wanted), 0.5 * (20.0 - wanted), 0.0]
    assert logits.grad[0].tolist() == pytest.approx(pulls, rel=1e-12)
