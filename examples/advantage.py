"""An advantage of your own: rl.advantage.kind = "examples.advantage:median_centered"."""

from torch import Tensor

from mcore_rl.config.rl.loss import OwnAdvantage


def median_centered(rewards_PG: Tensor, config: OwnAdvantage, parts_PGK: Tensor) -> Tensor:
    """Subtract each prompt's median reward and divide by the mean distance from it, which outliers change little.

    Args:
        rewards_PG: Rewards `[prompts, group]`, float64; groups of equal rewards are set to zero by the caller.
        config: The fields of `rl.advantage`.
        parts_PGK: Unweighted parts of the rewards, `[prompts, group, parts]`, which this function does not use.

    Returns:
        Advantages of the same shape.
    """
    distance_PG = rewards_PG - rewards_PG.quantile(0.5, dim=1, keepdim=True)
    return distance_PG / (distance_PG.abs().mean(dim=1, keepdim=True) + config.eps)
