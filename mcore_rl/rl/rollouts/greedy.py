"""The baseline of ReMax: the reward of each prompt's greedy completion."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.rollouts.rollout import Rollouts, rewards_of
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Prompt


def greedy_baseline(rollouts: Rollouts, prompts: Sequence[Prompt]) -> tuple[Tensor, list[Metric]]:
    """Collective over the world: generate and score a greedy completion of each prompt (arXiv 2310.10505).

    Returns:
        Their rewards, float64 `[P]`, NaN where a score failed; and their metrics.
    """
    greedy = replace(rollouts.sampling, cut=Cut(temperature=0.0), with_routes=False)
    # Greedy decoding draws nothing, so the seed does not matter.
    _, summaries, _ = rollouts.generate_and_score(prompts, greedy, [[0] for _ in prompts])
    rewards_P = rewards_of(summaries)[:, 0]
    scored_P = rewards_P[~rewards_P.isnan()]
    return rewards_P, [Metric("rollout/greedy_reward", scored_P.sum().item(), len(scored_P))]
