"""A task of your own: rl.prompts.task = "examples.task:count_ones"."""

import random

from mcore_rl.rl.rollouts.prompts import TaskProblem


def count_ones(generator: random.Random, size: int) -> TaskProblem:
    """Make one problem of `size` binary digits, whose answer is the number of ones.

    Args:
        generator: The only source of randomness to use: the same seed and index make the same problem on every rank.
        size: A number from rl.prompts.smallest to rl.prompts.largest, for tasks that can be easy or hard.
    """
    digits = "".join(generator.choices("01", k=size))
    return TaskProblem(prompt=f"{digits}=", answer=str(digits.count("1")))
