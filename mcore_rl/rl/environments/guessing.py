"""A game in which the policy guesses a number and learns whether the number is higher or lower."""

from collections.abc import Sequence
from random import Random

from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.rewards.numbers import last_number
from mcore_rl.rl.types import Problem


class Guessing:
    """Guess a number below 10 ** size, drawn with the problem's seed. The reward is 1 for the right guess.

    Use it with rl.prompts.task="seeds", which draws sizes from rl.prompts.smallest to largest.
    """

    def __init__(
        self,
        guesses: int = 8,
        prompt: str = "I have a number from 0 to {largest}. Guess it: write a number alone.",
    ) -> None:
        """Create the game.

        Args:
            guesses: number of guesses, after which the game is lost.
            prompt: text of the prompt; {largest} is replaced by the largest possible number.
        """
        self._left = guesses
        self._prompt = prompt
        self._secret = -1

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Draw the number and return the prompt."""
        end = 10 ** prompt.fields["size"]
        self._secret = Random(prompt.fields["seed"]).randrange(end)
        return [{"role": "user", "content": self._prompt.replace("{largest}", str(end - 1))}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Compare the last number of the turn with the secret number."""
        guess = last_number(completion)
        if guess == self._secret:
            return [], 1.0, True
        self._left -= 1
        hint = "no number" if guess is None else "higher" if guess < self._secret else "lower"
        return [{"role": "user", "content": hint}], 0.0, self._left <= 0
