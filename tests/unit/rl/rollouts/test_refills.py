"""How many groups dynamic sampling generates in vain: those with a signal for which a rollout batch has no place."""

import random

import pytest

from mcore_rl.rl.rollouts.rollout import _refill_size

MAX_REFILLS = 4
BATCHES = 2000


@pytest.mark.full
@pytest.mark.parametrize("has_signal", [0.25, 0.5, 0.8])
@pytest.mark.parametrize(("num_groups", "most"), [(8, 0.07), (32, 0.03), (128, 0.011)])
def test_few_groups_of_a_refill_are_too_many(num_groups: int, most: float, has_signal: float) -> None:
    draw = random.Random(1)
    num_generated = num_surplus = 0
    for _ in range(BATCHES):
        chosen = taken = 0
        for _ in range(1 + MAX_REFILLS):
            size = _refill_size(num_groups, chosen, taken)
            taken += size
            chosen += sum(draw.random() < has_signal for _ in range(size))
            if chosen >= num_groups:
                break
        num_generated += taken
        num_surplus += max(0, chosen - num_groups)
    assert num_surplus / num_generated < most


def test_a_refill_is_as_large_as_the_share_of_groups_with_a_signal_asks() -> None:
    assert _refill_size(32, 0, 32) == 32  # nothing is known yet
    assert _refill_size(32, 16, 32) == 32
    assert _refill_size(32, 24, 32) == 11  # 8 / (24 / 32)
    assert _refill_size(32, 31, 96) == 4
