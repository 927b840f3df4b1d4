"""Evaluation of the policy on held-out prompts."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb

from mcore_rl.config.rl.rollout import EvalConfig
from mcore_rl.metrics.intervals import Z_95, wilson
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.rollouts.prompts import HELD_OUT_SEED
from mcore_rl.rl.rollouts.rollout import GroupSummary, Rollouts, sample_seed
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Group, Prompt


def evaluate_policy(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvalConfig
) -> tuple[dict[int, Group], list[GroupSummary]]:
    """Collective over the world: answer the prompts, with seeds that no rollout uses.

    Returns:
        This replica's groups by prompt index, and the summaries of all groups.
    """
    sampling = replace(rollouts.sampling, cut=Cut(temperature=config.temperature), with_routes=False)
    seeds_PG = [
        [sample_seed(rollouts.seed, HELD_OUT_SEED + p, g) for g in range(config.samples)]
        for p in range(len(prompts))
    ]
    groups, summaries, _ = rollouts.generate_and_score(prompts, sampling, seeds_PG)
    return groups, summaries


def evaluation_metrics(summaries: Sequence[GroupSummary]) -> Iterator[Metric]:
    """Yield means over all answers, and pass@k for powers of two up to the number of answers per prompt.

    Accuracy, reward and pass@k leave out answers with a failed score.
    """
    rewards = [reward for summary in summaries for reward in summary.rewards_G if not math.isnan(reward)]
    scored_PG = [
        [is_correct for is_correct in summary.correct_G if is_correct is not None] for summary in summaries
    ]
    num_answers = sum(len(summary.lengths_G) for summary in summaries)
    num_scored = sum(map(len, scored_PG))
    if num_scored:
        yield Metric("eval/accuracy", sum(map(sum, scored_PG)), num_scored)
    if rewards:
        yield Metric("eval/reward", sum(rewards), len(rewards))
    yield Metric("eval/prompts", sum(1 for scored_G in scored_PG if scored_G))
    num_sampled = sum(sum(summary.num_sampled_G) for summary in summaries)
    yield Metric("eval/completion_tokens", num_sampled, num_answers)
    num_truncated = sum(sum(summary.truncated_G) for summary in summaries)
    yield Metric("eval/truncated_fraction", num_truncated, num_answers)
    k = 2
    while k <= len(summaries[0].correct_G):
        passes = [pass_at_k(sum(scored_G), len(scored_G), k) for scored_G in scored_PG if len(scored_G) >= k]
        if passes:
            yield Metric(f"eval/pass_at_{k}", sum(passes), len(passes))
        k *= 2


def evaluation_interval(summaries: Sequence[GroupSummary]) -> tuple[str, tuple[float, float]] | None:
    """Return the name and 95 % confidence interval of the main metric: eval/accuracy, or eval/reward without it.

    The result is None if fewer than two prompts have the metric.
    """
    correct_PG = [
        [float(is_correct) for is_correct in group.correct_G if is_correct is not None] for group in summaries
    ]
    if any(correct_PG):
        scored = [score for of_prompt in correct_PG for score in of_prompt]
        num_prompts = sum(map(bool, correct_PG))
        return ("eval/accuracy", wilson(statistics.fmean(scored), num_prompts)) if num_prompts > 1 else None
    rewards_PG = [[reward for reward in group.rewards_G if not math.isnan(reward)] for group in summaries]
    means_P = [statistics.fmean(of_prompt) for of_prompt in rewards_PG if of_prompt]
    if len(means_P) < 2:
        return None
    middle, half = statistics.fmean(means_P), Z_95 * statistics.stdev(means_P) / math.sqrt(len(means_P))
    return "eval/reward", (middle - half, middle + half)


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement, is correct
    (arXiv 2107.03374, equation 1).
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
