"""Intervals of 95 % of values measured on some prompts."""

import math

Z_95 = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the interval of 95 % of a share of `count` prompts (Wilson 1927). With several answers a prompt it is on
    the wide side: the prompts are independent, the answers to a prompt are not.
    """
    spread = Z_95**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(max(0.0, share * (1 - share)) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
