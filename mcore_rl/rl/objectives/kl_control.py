"""Adaptive control of the KL coefficient (arXiv 1909.08593, section 2.2)."""

from math import exp

LARGEST_ERROR = 0.2
"""Largest relative error of the KL that the controller responds to."""


def next_kl_coeff(
    coeff: float, kl_nats: float, *, target: float, horizon: int, num_completions: int
) -> float:
    """Return the coefficient of the next rollout batch: larger where the KL is above its target, smaller below it.

    The paper multiplies by 1 + error x completions / horizon, which is negative for batches of more than five horizons;
    exp(error x completions / horizon) is the same for small steps and always positive.

    Args:
        coeff: the coefficient of this rollout batch.
        kl_nats: KL to the reference, summed over a completion's tokens, mean over completions.
        target: the desired KL, in nats per completion.
        horizon: number of completions over which an error changes the coefficient by a factor of exp(error).
        num_completions: completions in this rollout batch.
    """
    error = min(max(kl_nats / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return coeff * exp(error * num_completions / horizon)
