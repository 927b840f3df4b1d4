"""An environment of your own: rl.environment.name = "examples.environment:Retry", rl.reward.parts = ["environment"].

The policy may correct a wrong answer; each try is told how many characters were right.
"""

from collections.abc import Mapping, Sequence

from mcore_rl.rl.types import Problem


class Retry:
    """One conversation. It runs in a worker process, and is pickled between two calls."""

    def __init__(self, tries: int = 3) -> None:
        """Take the number of tries: rl.environment.arguments = {tries = 3}."""
        self.tries = tries
        self.answer = ""

    def start(self, prompt: Problem) -> Sequence[Mapping[str, str]]:
        """Return the messages that the policy answers first."""
        self.answer = prompt.answer
        return [{"role": "user", "content": prompt.prompt}]

    def step(self, completion: str) -> tuple[Sequence[Mapping[str, str]], float, bool]:
        """Return the next messages, the reward of this turn, and whether the conversation has ended."""
        if completion.strip() == self.answer:
            return [], 1.0, True
        self.tries -= 1
        right = sum(given == wanted for given, wanted in zip(completion, self.answer, strict=False))
        return [{"role": "user", "content": f"{right} right="}], 0.0, self.tries == 0
