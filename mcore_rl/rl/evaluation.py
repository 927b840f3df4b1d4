"""How well the policy answers prompts that it never trains on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb

from mcore_rl.config.rl import EvalConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.rl.prompts import HELD_OUT_SEED
from mcore_rl.rl.rollout import GroupFacts, Rollouts, sample_seed
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Group, Prompt


def evaluate_policy(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvalConfig
) -> tuple[dict[int, Group], list[GroupFacts]]:
    """Collective over the world: this replica's answers by the place of their prompt, and facts of all prompts'."""
    sampling = replace(rollouts.sampling, cut=Cut(temperature=config.temperature), with_routes=False)
    seed = rollouts.config.train.seed
    seeds_PG = [
        [sample_seed(seed, HELD_OUT_SEED + place, number) for number in range(config.samples)]
        for place in range(len(prompts))
    ]
    groups, facts, _ = rollouts.judged(prompts, sampling, seeds_PG)
    return groups, facts


def evaluation_metrics(facts: Sequence[GroupFacts]) -> Iterator[Metric]:
    """Means over all answers; pass@k where there are several a prompt."""
    rewards = [reward for one in facts for reward in one.rewards_G]
    solved = [is_solved for one in facts for is_solved in one.solved_G]
    yield Metric("eval/accuracy", sum(solved), len(solved))
    yield Metric("eval/reward", sum(rewards), len(rewards))
    yield Metric("eval/completion_tokens", sum(sum(one.lengths_G) for one in facts), len(solved))
    yield Metric("eval/truncated_fraction", sum(sum(one.truncated_G) for one in facts), len(solved))
    num_samples = len(facts[0].solved_G)
    k = 2
    while k <= num_samples:
        passes = [pass_at_k(sum(one.solved_G), num_samples, k) for one in facts]
        yield Metric(f"eval/pass_at_{k}", sum(passes), len(passes))
        k *= 2


def pass_at_k(num_solved: int, num_samples: int, k: int) -> float:
    """Probability that one of k samples, drawn from these without replacement, is right (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)
