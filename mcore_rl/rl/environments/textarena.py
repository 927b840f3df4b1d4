"""Games of TextArena for one player."""

from collections.abc import Sequence
from typing import Any

from mcore_rl.obs.sinks import optional_package
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.types import Problem


class TextArena:
    """A game, which the problem's seed sets up; the reward is the game's, at its end.

    It is for rl.prompts.task="seeds". TextArena's games cannot be pickled; the moves so far are made again before each
    move, from the same seed.
    """

    def __init__(self, game: str) -> None:
        """Take the name of the game, as "GuessTheNumber-v0"."""
        self._game = game
        self._seed = 0
        self._moves: list[str] = []
        _package()

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Set the game up and return its first observation."""
        self._seed = prompt.fields["seed"]
        _, text = self._played()
        return [{"role": "user", "content": text}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Make a move and return what the game adds to its observation."""
        game, before = self._played()
        self._moves.append(completion)
        is_done, _ = game.step(action=completion)
        if is_done:
            rewards, _ = game.close()
            return [], float(rewards[0]), True
        # An observation repeats those before it, which the conversation has.
        return [{"role": "user", "content": _observation(game).removeprefix(before).strip()}], 0.0, False

    def _played(self) -> tuple[Any, str]:
        """Return the game after the moves so far, and its observation."""
        game = _package().make(self._game)
        game.reset(num_players=1, seed=self._seed)
        text = _observation(game)
        for move in self._moves:
            game.step(action=move)
            text = _observation(game)
        return game, text


def _observation(game: Any) -> str:
    _, text = game.get_observation()
    return str(text)


def _package() -> Any:
    return optional_package("textarena", 'rl.environment.name="textarena"', "'mcore-rl[environments]'")
