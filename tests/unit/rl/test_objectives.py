"""Objectives from the rewards of a rollout batch to the gradient of logits, against the papers' formulas in float64.

The way is the learner's: minibatches, packed microbatches, advantages, loss weights, heads. Only the model is left out:
every position of every sample has logits of its own.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.rl.loss import AnyAdvantage, AnyLoss, UpdateConfig
from mcore_rl.config.rl.rollout import PromptConfig, RolloutConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.platform import start
from mcore_rl.rl.batch import LogprobHead, Minibatch, PolicyMicrobatch
from mcore_rl.rl.models.reference import ReferencePass
from mcore_rl.rl.step.learner import Learner, OptionalParts, PolicyHead, policy_logprobs
from mcore_rl.rl.step.objective import policy_objective
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.types import Completion, Rollout
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from tests.parallel.rl_steps import GROUPS, SIZE, rollout_of, sampled_positions
from tests.sections import advantage_config, loss_config
from tests.tiny_models import TINY

MODEL = TINY["qwen3"].model_copy(update={"num_layers": 1})
TEMPERATURE, MAX_TOKENS = 0.7, 12
PADDING = 0.37
"""Number at padding, which reaches no result."""
BySample = Mapping[int, Tensor]


def config_of(loss: AnyLoss, advantage: AnyAdvantage, max_tokens: int = 40) -> RlRunConfig:
    return RlRunConfig(
        model=MODEL,
        train=TrainConfig(steps=100, global_batch=GROUPS * SIZE // 2),
        rl=RlConfig(
            prompts=PromptConfig(max_tokens=8),
            rollout=RolloutConfig(
                prompts_per_step=GROUPS, group_size=SIZE, max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE
            ),
            loss=loss,
            advantage=advantage,
            update=UpdateConfig(max_tokens_per_microbatch=max_tokens),
        ),
    )


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    yield set_up(config_of(loss_config(), advantage_config()), start(PlatformConfig()))
    destroy_mesh()


def labels_of(prompt_T: tuple[int, ...], completion: Completion) -> list[int]:
    """The tokens that are predicted: all but the first of the prompt and of each further segment."""
    starts = (0, *(len(prompt_T) + start for start in completion.segments))
    return [token for n, token in enumerate((*prompt_T, *completion.tokens_T)) if n not in starts]


class Batch:
    """Ragged completions, some of one token or of several turns, three left out, and a group of equal rewards; float64
    numbers of each sampled token, by sample.
    """

    def __init__(self) -> None:
        plain = rollout_of(config_of(loss_config(), advantage_config()), 0, 1)
        rewards_PG = plain.rewards_PG.clone()
        rewards_PG[3] = 1 / 3
        rewards_PG[2, 1] = nan  # is not trained on
        shapes = {
            n: replace(shape, is_trained=shape.is_trained and n not in (0, 5)) for n, shape in plain.shapes.items()
        }
        self.rollout: Rollout = replace(plain, rewards_PG=rewards_PG, shapes=shapes)
        self.rewards = rewards_PG.tolist()
        self.labels = {
            p * SIZE + g: labels_of(group.prompt.tokens_T, completion)
            for p, group in plain.groups.items()
            for g, completion in enumerate(group.completions)
        }
        """The token that each position predicts."""
        self.positions = {n: sampled_positions(shape) for n, shape in shapes.items()}
        assert min(map(len, self.positions.values())) == 1
        generator = torch.Generator().manual_seed(4)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logits = {n: 2 * normal(len(t), MODEL.padded_vocab_size) for n, t in self.labels.items()}
        now = {n: self.distributions(n, logits)[0] for n, logits in self.logits.items()}
        self.old, self.reference, self.rollout_logprobs = (
            {n: logprobs + 0.3 * normal(len(logprobs)) for n, logprobs in now.items()} for _ in range(3)
        )
        self.values = {n: normal(len(logprobs)).float().double() for n, logprobs in now.items()}

    def distributions(self, sample: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logprob of each sampled token, and entropy of its distribution."""
        places = self.positions[sample]
        all_logprobs = (logits[places, : MODEL.vocab_size] / TEMPERATURE).log_softmax(-1)
        tokens = [self.labels[sample][place] for place in places]
        return all_logprobs[range(len(places)), tokens], -(all_logprobs.exp() * all_logprobs).sum(-1)

    def packed(self, one: PolicyMicrobatch, numbers: BySample) -> Tensor:
        """Numbers of a microbatch's positions: given for all of a sample's, or for those of sampled tokens."""
        width = next(iter(numbers.values())).shape[1:]
        rows = torch.full((one.shape[1], *width), PADDING, dtype=torch.float64)
        begin = 0
        for span in one.spans:
            given = numbers[span.sample]
            places = range(len(given)) if width else self.positions[span.sample]
            own = [n for n, place in enumerate(places) if 0 <= place - span.first_position < span.num_tokens]
            at = torch.tensor([begin + places[n] - span.first_position for n in own], dtype=torch.int64)
            rows = rows.index_put((at,), given[own])
            begin += span.num_positions
        return rows

    def with_numbers(self, minibatch: Minibatch) -> Minibatch:
        """The minibatch with the logprobs and values of this batch."""
        for name, numbers in (
            ("rollout_logprobs_T", self.rollout_logprobs),
            ("old_logprobs_T", self.old),
            ("reference_logprobs_T", self.reference),
            ("values_T", self.values),
        ):
            minibatch = minibatch.with_numbers(name, [self.packed(one, numbers) for one in minibatch.microbatches])
        return minibatch


BATCH = Batch()


@dataclass(frozen=True, kw_only=True)
class Token:
    """The sampled tokens of one completion."""

    log_ratio: Tensor
    logprobs: Tensor
    entropy: Tensor
    advantage: Tensor
    to_reference: Tensor
    """Log of the reference's over the policy's probability."""
    log_weight: Tensor
    """Log of the old policy's over the engine's probability."""

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()


def least(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def zscore(rewards: list[float], index: int) -> float:
    known = [reward for reward in rewards if reward == reward]
    if rewards[index] != rewards[index] or len(set(known)) == 1:
        return 0.0
    return (rewards[index] - statistics.mean(known)) / (statistics.stdev(known) + 1e-6)


def centred(rewards: list[float], index: int) -> float:
    known = [reward for reward in rewards if reward == reward]
    is_nothing = rewards[index] != rewards[index] or len(set(known)) == 1
    return 0.0 if is_nothing else rewards[index] - statistics.mean(known)


def dual_clipped(t: Token) -> Tensor:
    value = least(t.ratio, t.advantage, 0.2, 0.2)
    return -torch.where(t.advantage < 0, torch.maximum(value, 1.3 * t.advantage), value)


def gspo_token(t: Token) -> Tensor:
    ratio = t.log_ratio.mean().exp().detach() * (t.logprobs - t.logprobs.detach()).exp()
    return -least(ratio, t.advantage, 0.05, 0.07)


def masked(t: Token) -> Tensor:
    weight = t.log_weight.mean().exp()
    return -least(t.ratio, t.advantage, 0.2, 0.2) * weight * float(0.9 <= weight <= 1.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective, and its formula: losses of tokens, and how they are averaged over completions."""

    loss: dict[str, Any]
    formula: Callable[[Token], Tensor]
    advantage: Callable[[list[float], int], float] = zscore
    advantage_kind: str = "zscore"
    average: Callable[[list[Tensor]], Tensor] = field(
        default=lambda losses: torch.stack([each.mean() for each in losses]).mean()
    )


def over_tokens(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def of_constant_length(losses: list[Tensor]) -> Tensor:
    return torch.stack([each.sum() / MAX_TOKENS for each in losses]).mean()


CASES = {
    "grpo": Case(
        loss={"clip_high": 0.28, "kl_coeff": 0.1, "entropy_coeff": 0.03},
        formula=lambda t: (
            -least(t.ratio, t.advantage, 0.2, 0.28)
            + 0.1 * (t.to_reference.exp() - t.to_reference - 1)
            - 0.03 * t.entropy
        ),
    ),
    "dual_clip": Case(loss={"dual_clip": 1.3, "aggregation": "token_mean"}, formula=dual_clipped, average=over_tokens),
    "dr_grpo": Case(
        loss={"aggregation": "seq_mean_token_sum_norm"},
        formula=lambda t: -least(t.ratio, t.advantage, 0.2, 0.2),
        advantage=centred,
        advantage_kind="mean",
        average=of_constant_length,
    ),
    "gspo": Case(
        loss={"kind": "gspo", "clip_low": 0.05, "clip_high": 0.07},
        formula=lambda t: -least(t.log_ratio.mean().exp(), t.advantage, 0.05, 0.07),
    ),
    "gspo_token": Case(loss={"kind": "gspo_token", "clip_low": 0.05, "clip_high": 0.07}, formula=gspo_token),
    "kimi_k2": Case(
        loss={"kind": "kimi_k2", "tau": 0.3},
        formula=lambda t: (t.advantage - 0.3 * t.log_ratio.sum()).square(),
        advantage=centred,
        advantage_kind="mean",
    ),
    "cispo": Case(
        loss={"kind": "cispo"},
        formula=lambda t: -t.ratio.detach().clamp(max=1.28) * t.advantage * t.logprobs,
        average=over_tokens,
    ),
    "masked sequences": Case(
        loss={"importance_sampling": "sequence_mask", "importance_sampling_low": 0.9, "importance_sampling_high": 1.1},
        formula=masked,
    ),
}


def learner_of(state: TrainState, config: RlRunConfig) -> Learner:
    routes = PolicyRoutes(state, config.rl, config.replay)
    logprobs = policy_logprobs(state, config.rl, MODEL.vocab_size)
    # The numbers of a reference are given: what is left of its pass is the KL that rewards pay.
    kl = ReferencePass(None, config.rl.loss, config.replay, logprobs, routes, state, updates_per_rollout=1)
    return Learner(state, config, routes, logprobs, OptionalParts(reference=kl))


@pytest.mark.matrix("dual_clip-40", "dr_grpo-40", "cispo-40", "masked sequences-40", "gspo-200")
@pytest.mark.parametrize(("name", "max_tokens"), [*((name, 40) for name in CASES), ("gspo", 200)])
def test_objectives_of_packed_completions_are_those_of_the_papers(name, max_tokens, state):
    case = CASES[name]
    config = config_of(loss_config(**case.loss), advantage_config(kind=case.advantage_kind), max_tokens)
    learner = learner_of(state, config)
    minibatches = [BATCH.with_numbers(one) for one in learner.minibatches(BATCH.rollout)]
    advantages = learner.advantages(BATCH.rollout, minibatches)
    logprobs = LogprobHead(state.mesh, MODEL.vocab_size, temperature=TEMPERATURE, chunk_tokens=5)
    head = PolicyHead(logprobs, state.mesh, policy_objective(config.rl.loss))
    half = GROUPS * SIZE // 2
    for minibatch, samples in zip(minibatches, (range(half), range(half, 2 * half)), strict=True):
        assert (len(minibatch.microbatches) > 2) == (max_tokens == 40)
        ours, theirs = ({n: BATCH.logits[n].clone().requires_grad_() for n in samples} for _ in range(2))
        loss, count = torch.zeros((), dtype=torch.float64), 0
        for one in minibatch.microbatches:
            weighted = one.with_advantages(advantages.of_samples, minibatch.loss_weights_N)
            found = head(weighted, BATCH.packed(one, ours)[None])
            loss, count = loss + found.loss, count + int(found.count)
        loss = loss / count
        losses = []
        for n in (n for n in samples if BATCH.rollout.shapes[n].is_trained):
            now, entropy = BATCH.distributions(n, theirs[n])
            advantage = case.advantage(BATCH.rewards[n // SIZE], n % SIZE)
            token = Token(
                log_ratio=now - BATCH.old[n],
                logprobs=now,
                entropy=entropy,
                advantage=torch.full_like(now, advantage),
                to_reference=BATCH.reference[n] - now,
                log_weight=BATCH.old[n] - BATCH.rollout_logprobs[n],
            )
            losses.append(case.formula(token))
        wanted = case.average(losses)
        assert loss.item() == pytest.approx(wanted.item(), rel=0, abs=1e-12)
        gradients = torch.autograd.grad(loss, list(ours.values()))
        wanted_gradients = torch.autograd.grad(wanted, list(theirs.values()), allow_unused=True)
        for n, gradient, other in zip(samples, gradients, wanted_gradients, strict=True):
            reference = torch.zeros_like(gradient) if other is None else other
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12, msg=str(n))


@pytest.mark.parametrize("reward", [0.1, 1.0])
def test_equal_returns_have_no_variance_to_explain(reward: float, state: TrainState) -> None:
    """Of a reward of 0.1 the returns, sums of values and rewards, differ in their last bits."""
    config = config_of(loss_config(kind="ppo"), advantage_config(kind="gae", gae_lambda=1.0))
    learner = learner_of(state, config)
    rewards_PG = torch.full_like(BATCH.rollout.rewards_PG, reward)
    rollout = replace(BATCH.rollout, rewards_PG=rewards_PG)
    minibatches = [BATCH.with_numbers(one) for one in learner.minibatches(rollout)]
    metrics = {one.name: one.value for one in learner.advantages(rollout, minibatches).metrics}
    assert metrics["values/returns_mean"] == pytest.approx(reward)
    assert metrics["values/advantages_std"] > 0.5
    assert "values/explained_variance" not in metrics
    metrics = {one.name: one.value for one in learner.advantages(BATCH.rollout, minibatches).metrics}
    assert -100 < metrics["values/explained_variance"] < 1
