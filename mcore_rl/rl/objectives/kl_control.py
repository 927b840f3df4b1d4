"""A controller of the KL coefficient (arXiv 1909.08593, section 2.2)."""

from math import exp

LARGEST_ERROR = 0.2
"""Relative distance from the target beyond which the coefficient changes no faster."""


def next_kl_coeff(
    coeff: float, kl_nats: float, *, target: float, horizon: int, num_completions: int
) -> float:
    """Return the coefficient of the next rollout batch: larger where the KL is above its target, smaller below it.

    The paper multiplies by 1 + error x completions / horizon, which is negative for a batch of more than five horizons;
    e to that power is the same for small steps and positive for any.

    Args:
        coeff: the coefficient of this rollout batch.
        kl_nats: mean over its completions of the KL to the reference, summed over tokens.
        target: the KL to keep.
        horizon: completions over which an error of `LARGEST_ERROR` or more changes the coefficient by that share.
        num_completions: completions of this rollout batch.
    """
    error = min(max(kl_nats / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return coeff * exp(error * num_completions / horizon)
