"""Logprobs and entropy against log_softmax in float64."""

import math

import pytest
import torch

from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Axis
from mcore_rl.megatron.vocab import (
    DeferredLogits,
    cross_entropy,
    forward_kl,
    logprobs_and_entropy,
    reverse_kl,
    vocabulary_logprobs,
)

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
        logits, targets, ALONE, rows_N=asked.nonzero()[:, 0], vocab_size=19, temperature=1.0, chunk_tokens=2
    )
    (got[0] * pull[0] + got[1]).sum().backward()
    wanted = by_log_softmax(logits, targets, 19, 1.0)
    torch.testing.assert_close(got, tuple(x.where(asked, 0.0) for x in wanted), rtol=0, atol=1e-12)
    assert logits.grad[~asked].abs().max() == 0
    assert logits.grad[asked].abs().max() > 0


def test_nothing_asked_is_nothing_and_far_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    settings = {"vocab_size": 3, "temperature": 1.0, "chunk_tokens": 2}
    none = logprobs_and_entropy(
        logits, torch.tensor([0, 0]), ALONE, rows_N=torch.zeros(0, dtype=torch.int64), **settings
    )
    assert [x.tolist() for x in none] == [[0.0, 0.0], [0.0, 0.0]]
    far = logprobs_and_entropy(logits, torch.tensor([1, 2]), ALONE, **settings)
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


def likeliest(teacher_NV, count):
    """Logprobs and ids of the likeliest tokens, in float64."""
    return teacher_NV.log_softmax(-1).topk(count)


def by_tail(logprobs_NV, ids_NK, taught_NK):
    """KL over the ids and one token for all others, by autograd in float64."""
    p_NK, q_NK = logprobs_NV.gather(1, ids_NK).exp(), taught_NK.exp()
    rests = 1 - q_NK.sum(-1), 1 - p_NK.sum(-1)
    return (q_NK * (q_NK / p_NK).log()).sum(-1) + rests[0] * (rests[0] / rests[1]).log()


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_forward_kl_with_a_tail_and_its_gradient_are_those_of_autograd(chunk_tokens, is_deferred):
    _, _, pull = example()
    hidden, weight = factors()
    rows = torch.tensor([0, 3, 4, 9, 12])
    generator = torch.Generator().manual_seed(6)
    taught_NK, ids_NK = likeliest(torch.randn(5, 19, generator=generator, dtype=torch.float64), 4)
    wanted = by_tail(torch.log_softmax((hidden @ weight.T)[rows, :19] / 0.7, dim=-1), ids_NK, taught_NK)
    gradients = torch.autograd.grad((wanted * pull[0, rows]).sum(), (hidden, weight))
    logits = DeferredLogits(hidden, weight, chunk_tokens) if is_deferred else hidden @ weight.T
    settings = {"vocab_size": 19, "temperature": 0.7, "chunk_tokens": chunk_tokens}
    got = forward_kl(logits, ids_NK, taught_NK, rows, ALONE, **settings)
    (got * pull[0]).sum().backward()
    torch.testing.assert_close(got[rows], wanted, rtol=0, atol=1e-12)
    assert got.count_nonzero() == 5
    torch.testing.assert_close((hidden.grad, weight.grad), gradients, rtol=0, atol=1e-12)


def test_the_gradient_of_the_forward_kl_is_that_of_finite_differences():
    logits, _, _ = example(tokens=2, padded=9)
    generator = torch.Generator().manual_seed(6)
    taught_NK, ids_NK = likeliest(torch.randn(2, 9, generator=generator, dtype=torch.float64), 3)
    settings = {"vocab_size": 9, "temperature": 1.0, "chunk_tokens": 8}
    assert torch.autograd.gradcheck(
        lambda x: forward_kl(x, ids_NK, taught_NK, torch.arange(2), ALONE, **settings), logits
    )


@pytest.mark.full
def test_a_student_of_the_forward_kl_keeps_the_teachers_mass_outside_of_its_likeliest_tokens():
    """Without a tail the student's mass there is 1.6e-4 in the end, of the teacher's .50 (TRL's tail bucket)."""
    torch.manual_seed(0)
    teacher_1V = torch.softmax(2 * torch.randn(1, 1000, dtype=torch.float64), -1)
    taught_1K, ids_1K = teacher_1V.log().topk(20)
    student_1V = torch.zeros(1, 1000, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([student_1V], 0.05)
    settings = {"vocab_size": 1000, "temperature": 1.0, "chunk_tokens": 8}
    for _ in range(1000):
        optimizer.zero_grad()
        forward_kl(student_1V, ids_1K, taught_1K, torch.tensor([0]), ALONE, **settings).sum().backward()
        optimizer.step()
    rest = 1 - student_1V.softmax(-1).gather(1, ids_1K).sum().item()
    assert rest == pytest.approx(1 - teacher_1V.gather(1, ids_1K).sum().item(), abs=1e-3)
    assert rest > 0.4


@pytest.mark.parametrize("excess", [1.0, 1.002])
def test_ids_that_have_all_of_a_teachers_probability_leave_no_tail(excess):
    """The probabilities of a bf16 model sum to up to 1.002."""
    logits, _, _ = example(torch.float32, tokens=1, padded=8)
    taught_1V = torch.randn(1, 8, generator=torch.Generator().manual_seed(6)).softmax(-1)
    settings = {"vocab_size": 8, "temperature": 1.0, "chunk_tokens": 8}
    got = forward_kl(logits, torch.arange(8)[None], (excess * taught_1V).log(), torch.tensor([0]), ALONE, **settings)
    got.sum().backward()
    wanted = (taught_1V * (taught_1V.log() - logits.log_softmax(-1))).sum()
    torch.testing.assert_close(got[0], wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits.grad, (logits.softmax(-1) - taught_1V).detach(), rtol=0, atol=1e-6)


def test_ids_of_a_teacher_that_the_student_lacks_count_among_the_others_and_far_logits_stay_finite():
    logits = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    taught = torch.tensor([[0.5, 0.3, 0.1]]).log()
    settings = {"vocab_size": 3, "temperature": 1.0, "chunk_tokens": 8}
    got = forward_kl(logits, torch.tensor([[0, 3, 1]]), taught, torch.tensor([0]), ALONE, **settings)
    got.sum().backward()
    # q: .5 at token 0, .1 at 1, .4 at all others, of which the student has token 2.
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.1, -0.4, 0.0], abs=1e-6)
    wanted = 0.5 * math.log(0.5) + 0.1 * (math.log(0.1) + 60) + 0.4 * (math.log(0.4) + 60)
    assert got.item() == pytest.approx(wanted, rel=1e-5)
    beyond = forward_kl(10 * logits, torch.tensor([[0, 3, 1]]), taught, torch.tensor([0]), ALONE, **settings)
    assert 60 < beyond.item() < 600


def factors(dtype=torch.float64, tokens=13, padded=24, width=6):
    """Hidden states and an output weight whose product is logits of `example`'s size."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).mul_(2).to(dtype)
    weight = torch.randn(padded, width, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_deferred_logits_have_the_values_and_gradients_of_whole_ones(chunk_tokens):
    """Logprobs and entropy, the KL to a teacher, and the teacher's logprobs; against log_softmax of the product."""
    _, targets, pull = example()
    hidden, weight = factors()
    asked = torch.arange(13) % 4 != 1
    rows = torch.tensor([0, 3, 4, 9, 12])
    other_TV = torch.randn(13, 19, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    other_TV = other_TV.log_softmax(-1)
    logprobs_TV = torch.log_softmax((hidden @ weight.T)[:, :19] / 0.7, dim=-1)
    wanted = [x.where(asked, 0.0) for x in by_log_softmax(hidden @ weight.T, targets, 19, 0.7)]
    kl = (logprobs_TV.exp() * (logprobs_TV - other_TV)).sum(-1)[rows]
    loss = (wanted[0] * pull[0] + wanted[1] * pull[1]).sum() + (kl * pull[0, rows]).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    settings = {"vocab_size": 19, "temperature": 0.7, "chunk_tokens": 2}
    deferred = DeferredLogits(hidden, weight, chunk_tokens)
    got = logprobs_and_entropy(deferred, targets, ALONE, rows_N=asked.nonzero()[:, 0], **settings)
    got_kl = reverse_kl(deferred, other_TV[rows], rows, ALONE, **settings, limit_nats=20.0)
    ((got[0] * pull[0] + got[1] * pull[1]).sum() + (got_kl * pull[0]).sum()).backward()
    torch.testing.assert_close(list(got), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_kl[rows], kl, rtol=0, atol=1e-12)
    torch.testing.assert_close((hidden.grad, weight.grad), gradients, rtol=0, atol=1e-12)
    assert not weight.grad[19:].any() and not hidden.grad[1].any()
    teacher = vocabulary_logprobs(deferred, rows, ALONE, **settings)
    torch.testing.assert_close(teacher, logprobs_TV[rows].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_cross_entropy_of_deferred_logits_is_torchs(dtype, error):
    """Its products are of the model's format, and the sums over the vocabulary are in fp32."""
    _, targets, pull = example()
    hidden, weight = factors(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = (exact[0] @ exact[1].T)[:, :19]
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    gradients = torch.autograd.grad((wanted * pull[0]).sum(), exact)
    got = cross_entropy(DeferredLogits(hidden, weight, 4), targets, ALONE, vocab_size=19)
    (got * pull[0]).sum().backward()
    assert got.dtype == torch.float32 and (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(got.double(), wanted.detach(), rtol=error, atol=error)
    for found, gradient in zip((hidden.grad, weight.grad), gradients, strict=True):
        assert (found.double() - gradient).norm() <= error * gradient.norm()


def test_a_backward_pass_of_deferred_logits_keeps_nothing_of_the_vocabularys_size():
    """Elements that the graph saves: of whole logits [T, v] of them, of deferred ones a few numbers a token."""
    tokens, padded, width = 64, 4096, 8
    hidden, weight = factors(torch.float32, tokens, padded, width)
    targets = torch.randint(0, padded, (tokens,), generator=torch.Generator().manual_seed(1))
    inputs = {x.untyped_storage().data_ptr() for x in (hidden, weight)}

    def saved(logits):
        found = []
        hooks = torch.autograd.graph.saved_tensors_hooks
        settings = {"vocab_size": padded, "temperature": 1.0, "chunk_tokens": 16}
        with hooks(lambda x: found.append(x) or x, lambda x: x):
            logprobs_and_entropy(logits(), targets, ALONE, **settings)
        return sum(x.numel() for x in found if x.untyped_storage().data_ptr() not in inputs)

    assert saved(lambda: hidden @ weight.T) >= tokens * padded
    assert saved(lambda: DeferredLogits(hidden, weight, 16)) <= 4 * tokens


def test_logits_of_more_than_two_gibibytes_are_deferred_unless_set():
    """152k ids on 1 rank, whose 2^31 bytes are 3533 positions and 2^29 are 883, 6 multiples of 128; and on 8."""
    auto = PlatformConfig()
    assert [auto.logits_chunk(tokens, 151936) for tokens in (3533, 3534, 32768)] == [None, 768, 768]
    assert auto.logits_chunk(16384, 151936 // 8) is None
    assert auto.logits_chunk(10**6, 2**30) == 128
    assert PlatformConfig(logits_chunk_tokens=None).logits_chunk(10**6, 151936) is None
    assert PlatformConfig(logits_chunk_tokens=7).logits_chunk(4, 8) == 7
