"""A reward of your own: rl.reward.parts = ["exact", "examples.reward:brevity"].

It runs in a process of its own, with a time limit, and gets one completion at a time.
"""

from mcore_rl.rl.rewards.interface import RewardInput

LONGEST = 4.0
"""Length, in multiples of the reference answer, from which an answer earns nothing."""


def brevity(scored: RewardInput) -> float:
    """Return 1 for a completion no longer than the reference answer, falling linearly to 0 at LONGEST times that."""
    if scored.is_truncated:
        return 0.0
    ratio = len(scored.completion) / max(1, len(scored.answer))
    return min(1.0, max(0.0, (LONGEST - ratio) / (LONGEST - 1)))
