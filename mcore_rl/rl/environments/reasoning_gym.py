"""Datasets of reasoning-gym as single-turn environments, with their verifiers."""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.metrics.loggers import optional_package
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.types import Problem

HELP = "Give your final answer between <answer> and </answer>."


class ReasoningGym:
    """A problem generated from the prompt's seed by a dataset. The reward is the verifier's score, from 0 to 1.

    Use it with rl.prompts.task="seeds". The answer is the text between <answer> and </answer>.
    """

    def __init__(self, dataset: str, help: str = HELP, **settings: str | bool | int | float) -> None:
        """Create the environment of a dataset.

        Args:
            dataset: name of the dataset, for example "chain_sum".
            help: text of a system message before the problem; empty: no system message.
            settings: fields of the dataset's config, for example max_terms=4.
        """
        self._name, self._help, self._settings = dataset, help, settings
        self._seed = 0
        _package()

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Generate the problem."""
        self._seed = prompt.fields["seed"]
        _, entry = self._problem()
        system = [{"role": "system", "content": self._help}] if self._help else []
        return [*system, {"role": "user", "content": entry["question"]}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Score the answer."""
        dataset, entry = self._problem()
        answer = _package(".utils").extract_answer(completion)
        return [], float(dataset.score_answer(answer, entry)), True

    def _problem(self) -> tuple[Any, Mapping[str, Any]]:
        """Recreate the dataset and problem from the seed: not every dataset can be pickled between calls."""
        dataset = _package().create_dataset(self._name, size=1, seed=self._seed, **self._settings)
        return dataset, dataset[0]


def _package(part: str = "") -> Any:
    return optional_package(
        f"reasoning_gym{part}", 'rl.environment.name="reasoning_gym"', "'mcore-rl[environments]'"
    )
