"""Single-player games of TextArena."""

from collections.abc import Sequence
from typing import Any

from mcore_rl.metrics.loggers import optional_package
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.types import Problem


class TextArena:
    """A game set up from the problem's seed. The reward is the game's own, given at its end.

    Use it with rl.prompts.task="seeds". TextArena's games cannot be pickled, so the moves so far are replayed from the
    same seed before each move.
    """

    def __init__(self, game: str) -> None:
        """Create the environment of a game, given by its name, for example "GuessTheNumber-v0"."""
        self._game = game
        self._seed = 0
        self._moves: list[str] = []
        _package()

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Set up the game and return its first observation."""
        self._seed = prompt.fields["seed"]
        _, text = self._played()
        return [{"role": "user", "content": text}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Make a move and return the new part of the game's observation."""
        game, before = self._played()
        self._moves.append(completion)
        is_done, _ = game.step(action=completion)
        if is_done:
            rewards, _ = game.close()
            return [], float(rewards[0]), True
        # An observation repeats all earlier observations, which are already in the conversation.
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
