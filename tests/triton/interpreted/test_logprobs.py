"""The kernels of logprobs, computed by Triton's interpreter, beside torch's products.

Both sides are in float32; sums of `WIDTH` products and over the vocabulary in another order differ by some units in the
last place of the largest term: 2e-6 of numbers of the size of 10.
"""

from dataclasses import replace

import pytest
import torch

from mcore_rl.backend.gpu import logprobs
from mcore_rl.parallel import vocab
from mcore_rl.parallel.mesh import Axis

ALONE = Axis(None, 0, 1)
TOKENS, WIDTH, PADDED, VALID = 75, 40, 400, 389
ERROR = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several programs for the vocabulary, of which the last has a part of a tile."""
    monkeypatch.setattr(logprobs, "COLUMNS_PER_PROGRAM", 128)


def example(chunk_tokens=32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, generator=generator).div_(4).requires_grad_()
    targets = torch.randint(0, VALID, (TOKENS,), generator=generator)
    pull = torch.randn(2, TOKENS, generator=generator)
    return vocab.DeferredLogits(hidden, weight, chunk_tokens), targets, pull


def results(logits, call, pull):
    """The values, and the gradients of hidden states and weight."""
    values = call(logits)
    loss = sum((value * pull[index]).sum() for index, value in enumerate(values))
    return (*values, *torch.autograd.grad(loss, (logits.hidden_TD, logits.weight_vD)))


def both(call):
    logits, targets, pull = example()
    wanted = results(logits, lambda logits: call(logits, targets), pull)
    by_kernel = replace(logits, kernels=logprobs.KERNELS)
    return results(by_kernel, lambda logits: call(logits, targets), pull), wanted


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_their_gradients_are_torchs(temperature):
    """Rows that are not asked for, rows and ids that fill no block, and ids that pad the vocabulary."""

    def call(logits, targets):
        asked = targets.where(torch.arange(TOKENS) % 4 != 1, vocab.IGNORED_TARGET)
        return vocab.logprobs_and_entropy(
            logits, asked, ALONE, vocab_size=VALID, temperature=temperature, chunk_tokens=1
        )

    found, wanted = both(call)
    torch.testing.assert_close(found, wanted, **ERROR)
    logprobs_T, entropy_T, _, grad_weight = found
    assert not logprobs_T[1::4].any() and not entropy_T[1::4].any() and not grad_weight[VALID:].any()


@pytest.mark.parametrize("which", [0, 1])
def test_either_result_alone_has_torchs_gradient(which):
    def call(logits, targets):
        found = vocab.logprobs_and_entropy(
            logits, targets, ALONE, vocab_size=VALID, temperature=1.0, chunk_tokens=1
        )
        return (found[which],)

    torch.testing.assert_close(*both(call), **ERROR)


def test_the_cross_entropy_and_its_gradient_are_torchs():
    """Computed at every position; ids beyond the vocabulary, such as -1, have no logit."""

    def call(logits, targets):
        return (vocab.cross_entropy(logits, targets, ALONE, vocab_size=VALID),)

    torch.testing.assert_close(*both(call), **ERROR)
    logits, targets, pull = example()
    exact = torch.nn.functional.cross_entropy(
        logits.hidden_TD @ logits.weight_vD[:VALID].T, targets, reduction="none"
    )
    found = vocab.cross_entropy(replace(logits, kernels=logprobs.KERNELS), targets, ALONE, vocab_size=VALID)
    torch.testing.assert_close(found, exact, **ERROR)
    assert not pull.isnan().any()


def test_the_kl_to_a_teacher_uses_the_same_partition():
    rows = torch.tensor([0, 3, 4, 9, 74])
    other_NV = torch.randn(5, VALID, generator=torch.Generator().manual_seed(6)).log_softmax(-1)

    def call(logits, targets):
        return (
            vocab.reverse_kl(
                logits, other_NV, rows, ALONE,
                vocab_size=VALID, temperature=0.7, chunk_tokens=1, limit_nats=20.0,
            ),
        )  # fmt: skip

    torch.testing.assert_close(*both(call), **ERROR)


@pytest.mark.parametrize("has_entropy", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slice_of_the_vocabulary_has_the_sums_and_gradients_of_torchs_slice(rank, has_entropy):
    """One of two tensor-parallel ranks: what is added up between them, and the gradient of its own logits."""
    logits, targets, pull = example()
    half = PADDED // 2
    slices = replace(logits, weight_vD=logits.weight_vD[rank * half :][:half].detach())
    shard = vocab._shard(slices, Axis(None, rank, 2), VALID, 0.7, 1)._replace(has_entropy=has_entropy)
    rows_N = torch.arange(TOKENS)[::2]
    wanted = vocab._local_sums(slices, targets, rows_N, shard)
    by_kernel = replace(slices, kernels=logprobs.KERNELS)
    found = vocab._local_sums(by_kernel, targets, rows_N, shard._replace(kernels=logprobs.KERNELS))
    torch.testing.assert_close(found, wanted, **ERROR)
    log_partition_N, entropy_N = wanted[0] + wanted[1][0].log() + 0.3, torch.rand(len(rows_N))
    logprobs_Nv = shard.scaled(slices, rows_N) - log_partition_N[:, None]
    pull_Nv = -pull[0, rows_N, None] - pull[1, rows_N, None] * (logprobs_Nv + entropy_N[:, None])
    exact_Nv = logprobs_Nv.exp() * pull_Nv
    column_N, here_N = shard.column_of(targets[rows_N])
    exact_Nv[here_N, column_N[here_N]] += pull[0, rows_N][here_N]
    gradient_Nv = logprobs.gradient(
        slices.hidden_TD.detach(), slices.weight_vD[: shard.num_valid], targets, rows_N, log_partition_N, entropy_N,
        pull[0], pull[1], first=shard.first, inverse_temperature=shard.inverse_temperature,
    )  # fmt: skip
    torch.testing.assert_close(gradient_Nv, exact_Nv / 0.7, **ERROR)


def test_logits_that_are_not_finite_are_read_as_torch_does():
    """A state that is not a number makes its own row one, in values and gradients; far logits do not overflow."""
    logits, targets, pull = example()
    hidden = logits.hidden_TD.detach().clone()
    hidden[3], hidden[5] = torch.nan, 1e4 * hidden[5]
    broken = replace(logits, hidden_TD=hidden.requires_grad_())

    def call(logits):
        return vocab.logprobs_and_entropy(
            logits, targets, ALONE, vocab_size=VALID, temperature=1.0, chunk_tokens=1
        )

    wanted = results(broken, call, pull)
    found = results(replace(broken, kernels=logprobs.KERNELS), call, pull)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=2e-5, atol=2e-4)
    assert found[0][3].isnan() and not found[0][[0, 5]].isnan().any() and found[2][3].isnan().all()


def test_nothing_asked_is_nothing():
    logits, targets, _ = example()
    none = vocab.logprobs_and_entropy(
        replace(logits, kernels=logprobs.KERNELS),
        torch.full_like(targets, vocab.IGNORED_TARGET),
        ALONE,
        vocab_size=VALID,
        temperature=1.0,
        chunk_tokens=1,
    )
    (none.logprobs_T.sum() + none.entropy_T.sum()).backward()
    assert not none.logprobs_T.any() and not logits.weight_vD.grad.any()


def test_a_model_in_16_bits_has_unrounded_logits_and_gradients_in_its_format():
    """The oracle is in float64, of the same rounded factors: logits are as near as float32 sums are, and the gradients
    as near as products of operands rounded to 11 bits, 2^-11 each, are. In fp16: the interpreter has no bf16 products.
    """
    logits, targets, pull = example()
    rounded = vocab.DeferredLogits(
        *(x.detach().half().requires_grad_() for x in (logits.hidden_TD, logits.weight_vD)),
        32,
        logprobs.KERNELS,
    )
    exact = vocab.DeferredLogits(
        *(x.detach().double().requires_grad_() for x in (rounded.hidden_TD, rounded.weight_vD)), 32
    )

    def call(logits):
        return vocab.logprobs_and_entropy(
            logits, targets, ALONE, vocab_size=VALID, temperature=1.0, chunk_tokens=1
        )

    found, wanted = results(rounded, call, pull), results(exact, call, pull)
    torch.testing.assert_close(found[:2], tuple(x.float() for x in wanted[:2]), **ERROR)
    for gradient, right in zip(found[2:], wanted[2:], strict=True):
        assert gradient.dtype == torch.float16
        assert (gradient.double() - right).norm() <= 2e-3 * right.norm()
