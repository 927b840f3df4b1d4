"""Heads of passes over the policy, on given logits."""

import pytest
import torch

from mcore_rl.data.packing import PackingLimits
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.rl.batch import LogprobHead, make_microbatch
from mcore_rl.rl.step.learner import PolicyHead
from mcore_rl.rl.step.objective import policy_objective
from mcore_rl.rl.step.texts import MixedHead
from tests.sections import loss_config
from tests.unit.rl.step.test_batch import ALONE, CPU, SAMPLES


def test_old_and_reference_logprobs_are_of_masked_completions_too(one_rank: Mesh) -> None:
    """A KL in the reward is paid by every completion of a group; sample 5 is masked."""
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    microbatch = make_microbatch(SAMPLES, [3, 5, 8], limits, ALONE, CPU)
    logits_1TV = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = LogprobHead(one_rank, 30, temperature=0.7, chunk_tokens=4)
    wanted_TV = (logits_1TV[0, :, :30] / 0.7).log_softmax(-1)
    # Position by position: the label where a token of a completion is predicted.
    labels = {1: 21, 2: 22, 3: 23, 4: 24, 8: 25, 9: 26}
    wanted_T = torch.tensor([wanted_TV[t, labels[t]].item() if t in labels else 0.0 for t in range(12)])
    got_T = head(microbatch, logits_1TV).outputs["logprobs"]
    torch.testing.assert_close(got_T.float(), wanted_T, rtol=0, atol=1e-6)


def test_the_gradient_of_texts_is_that_of_their_mean_beside_the_mean_of_completions(one_rank: Mesh) -> None:
    """Six trained tokens of completions and three of texts: the schedule divides the sum by six."""
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    completions = make_microbatch(SAMPLES, [3, 8], limits, ALONE, CPU)
    advantages = {3: torch.linspace(-1, 1, 8), 8: torch.linspace(1, 2, 8)}
    completions = completions.with_advantages(advantages, torch.ones(9, dtype=torch.float64))
    num_tokens = int(completions.mask_T.sum())
    labels = torch.tensor([[4, 0, 7, 29]])
    text = LocalMicrobatch(
        shape=(1, 4),
        tokens_Bs=labels,
        labels_Bs=labels,
        loss_mask_Bs=torch.tensor([[1.0, 0.0, 1.0, 1.0]]),
        position_ids_Bs=torch.arange(4)[None],
        rows_N=torch.tensor([0, 2, 3]),
    )
    generator = torch.Generator().manual_seed(0)
    logits_1TV, text_1TV = (
        torch.randn(1, size, 32, generator=generator, dtype=torch.float64).requires_grad_()
        for size in (completions.shape[1], 4)
    )
    logprobs = LogprobHead(one_rank, 30, temperature=0.7, chunk_tokens=4)
    policy = PolicyHead(logprobs, one_rank, policy_objective(loss_config(kind="ppo")))
    head = MixedHead(policy, one_rank, vocab_size=30, chunk_tokens=4, weight=0.5 * num_tokens / 3)
    parts = [head(completions, logits_1TV), head(text, text_1TV)]
    assert sum(int(part.count) for part in parts) == num_tokens
    (sum(part.loss for part in parts) / num_tokens).backward()

    cross_entropy = -text_1TV[0, :, :30].log_softmax(-1)[range(4), labels[0]]
    (wanted_TV,) = torch.autograd.grad(0.5 * cross_entropy[[0, 2, 3]].mean(), text_1TV)
    torch.testing.assert_close(text_1TV.grad, wanted_TV, rtol=0, atol=1e-12)
    alone = policy(completions, logits_1TV)
    (wanted_TV,) = torch.autograd.grad(alone.loss / num_tokens, logits_1TV)
    torch.testing.assert_close(logits_1TV.grad, wanted_TV, rtol=0, atol=1e-12)
    # What is reported of the completions is what it is without texts.
    for name, value in alone.outputs.items():
        values = [part.outputs[name] for part in parts]
        total = torch.stack(values).amax() if name.startswith("max/") else torch.stack(values).sum()
        assert total == value, name
    found = sum(part.outputs["ptx_loss"] for part in parts).item()
    assert found == pytest.approx(cross_entropy[[0, 2, 3]].sum().item(), rel=1e-12)
