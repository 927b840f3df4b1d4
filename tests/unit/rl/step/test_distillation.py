"""The KL to a teacher in advantages and losses: closed forms in float64, and students that become their teachers."""

import pytest
import torch
from torch import Tensor

from mcore_rl.config.rl.loss import DistillConfig
from mcore_rl.megatron.mesh import Axis
from mcore_rl.megatron.vocab import reverse_kl
from mcore_rl.rl.step.losses import PolicyTokens, policy_loss
from mcore_rl.rl.step.objective import policy_objective
from tests.sections import loss_config

ALONE = Axis(None, 0, 1)
PLAIN = loss_config(kind="ppo")


def tokens_of(
    logprobs_T: Tensor, teacher_T: Tensor, advantages_T: Tensor, weights_T: Tensor, kl_T: Tensor | None = None
) -> PolicyTokens:
    """Tokens of one on-policy sequence."""
    size = len(logprobs_T)
    return PolicyTokens(
        logprobs_T=logprobs_T,
        entropy_T=torch.zeros(size, dtype=torch.float64),
        old_logprobs_T=logprobs_T.detach(),
        reference_logprobs_T=None,
        rollout_logprobs_T=None,
        advantages_T=advantages_T,
        mask_T=torch.ones(size, dtype=torch.bool),
        loss_weights_T=weights_T,
        sequence_T=torch.zeros(size, dtype=torch.int64),
        lengths_N=torch.tensor([size]),
        teacher_logprobs_T=teacher_T,
        teacher_kl_T=kl_T,
    )


def pair(size: int = 7) -> tuple[Tensor, Tensor]:
    """Logits of a student and logprobs of its teacher at one position."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher.log_softmax(0)


@pytest.mark.parametrize("use", ["advantage", "loss"])
def test_the_gradient_of_sampled_tokens_is_that_of_the_kl_in_expectation(use: str) -> None:
    """Every token of the vocabulary once, weighted by its probability, is the expectation over samples."""
    logits_V, teacher_V = pair()
    logprobs_V = logits_V.log_softmax(0)
    kl = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    (wanted_V,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    gap_V = (teacher_V - logprobs_V).detach()
    advantages_V = 0.3 * gap_V if use == "advantage" else torch.zeros_like(gap_V)
    tokens = tokens_of(logprobs_V, teacher_V, advantages_V, logprobs_V.detach().exp())
    loss = policy_loss(tokens, policy_objective(PLAIN, DistillConfig(teacher="T", use=use, coeff=0.3)), ALONE)
    (got_V,) = torch.autograd.grad(loss.loss, logits_V)
    torch.testing.assert_close(got_V, 0.3 * wanted_V, rtol=0, atol=1e-12)
    if use == "loss":
        assert loss.loss.item() == pytest.approx(0.3 * kl.item(), rel=1e-12)


def test_the_kl_over_the_vocabulary_is_added_as_it_is() -> None:
    logits_V, teacher_V = pair()
    settings = {"vocab_size": 7, "temperature": 1.0, "chunk_tokens": 8, "limit_nats": 20.0}
    kl_T = reverse_kl(logits_V[None], teacher_V[None], torch.tensor([0]), ALONE, **settings)
    logprobs_V = logits_V.log_softmax(0)
    one = torch.ones(1, dtype=torch.float64)
    tokens = tokens_of(logprobs_V[2:3], teacher_V[2:3], 0 * one, one, kl_T)
    distill = DistillConfig(teacher="T", use="loss", estimator="vocabulary", coeff=0.3)
    loss = policy_loss(tokens, policy_objective(PLAIN, distill), ALONE)
    wanted = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    assert loss.loss.item() == pytest.approx(0.3 * wanted.item(), rel=1e-12)
    assert loss.sums["kl_teacher"].item() == pytest.approx(wanted.item(), rel=1e-12)
    (got_V,) = torch.autograd.grad(loss.loss, logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad(wanted, logits_V)
    torch.testing.assert_close(got_V, 0.3 * wanted_V, rtol=0, atol=1e-12)


@pytest.mark.matrix("loss-vocabulary")
@pytest.mark.parametrize(("use", "estimator"), [("advantage", "token"), ("loss", "token"), ("loss", "vocabulary")])
def test_a_student_becomes_as_accurate_as_its_teacher_on_its_own_samples(use: str, estimator: str) -> None:
    """Twenty questions with six answers each: the teacher knows nine in ten, the student one in six or so."""
    generator = torch.Generator().manual_seed(0)
    right_Q = torch.randint(0, 6, (20,), generator=generator)
    taught_Q = right_Q.clone()
    taught_Q[:2] = (right_Q[:2] + 1) % 6
    teacher_QV = (4.0 * torch.nn.functional.one_hot(taught_Q, 6)).double().log_softmax(1)
    student_QV = torch.randn(20, 6, generator=generator, dtype=torch.float64).requires_grad_()

    def accuracy(logits_QV: Tensor) -> float:
        return (logits_QV.argmax(1) == right_Q).double().mean().item()

    assert accuracy(student_QV) < 0.5
    optimizer = torch.optim.Adam([student_QV], lr=0.1)
    distill = DistillConfig(teacher="T", use=use, estimator=estimator)
    for _ in range(300):
        logprobs_QV = student_QV.log_softmax(1)
        sampled_Q1 = torch.multinomial(logprobs_QV.detach().exp(), 1, generator=generator)
        logprobs_Q, taught_logprobs_Q = (of.gather(1, sampled_Q1)[:, 0] for of in (logprobs_QV, teacher_QV))
        advantages_Q = torch.zeros(20, dtype=torch.float64)
        if use == "advantage":
            advantages_Q = taught_logprobs_Q - logprobs_Q.detach()
        kl_Q = None
        if estimator == "vocabulary":
            settings = {"vocab_size": 6, "temperature": 1.0, "chunk_tokens": 8, "limit_nats": 20.0}
            kl_Q = reverse_kl(student_QV, teacher_QV, torch.arange(20), ALONE, **settings)
        weights_Q = torch.full((20,), 1 / 20, dtype=torch.float64)
        tokens = tokens_of(logprobs_Q, taught_logprobs_Q, advantages_Q, weights_Q, kl_Q)
        optimizer.zero_grad()
        policy_loss(tokens, policy_objective(PLAIN, distill), ALONE).loss.backward()
        optimizer.step()
    assert accuracy(student_QV) == accuracy(teacher_QV) == 0.9
