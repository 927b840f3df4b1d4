"""Trial of a reward before a run starts: each reference answer is scored on its own prompt and on another prompt."""

from collections import Counter
from collections.abc import Callable, Sequence

from mcore_rl.config.rl.reward import RewardConfig
from mcore_rl.errors import TrainingError
from mcore_rl.rl.rewards.failures import FailedPart, failing_part
from mcore_rl.rl.rewards.score import Reward, Scores
from mcore_rl.rl.types import Completion, Group, Prompt, single_version

ANSWER = "{answer}"
"""Placeholder of the reference answer in the template of a trial completion."""
NO_ANSWER = "no reference answer"
"""Answer used for a prompt without a reference answer."""
TRIED_AT_START = 2
"""Number of prompts in the trial before a training run starts."""


def trial_groups(
    prompts: Sequence[Prompt], encode: Callable[[str], list[int]], template: str = ANSWER
) -> list[Group]:
    """Return two completions per prompt: `template` with its own reference answer, and with the next prompt's."""
    groups = []
    for index, prompt in enumerate(prompts):
        other = prompts[(index + 1) % len(prompts)]
        answers = [source.problem.answer or NO_ANSWER for source in (prompt, other)]
        texts = [template.replace(ANSWER, answer) for answer in answers]
        completions = tuple(_completion(text, tuple(encode(text))) for text in texts)
        groups.append(Group(prompt=prompt, completions=completions))
    return groups


def try_reward(
    config: RewardConfig, max_new_tokens: int, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]
) -> tuple[FailedPart, ...]:
    """Score the reference answers of `prompts`, so that a reward function that always fails is found before the start.

    Reward models and the environment are left out.

    Returns:
        The failed scores.

    Raises:
        TrainingError: if every score of a part failed, unless rl.reward.max_failed_fraction=1. A served part with only
            failed scores always raises.
    """
    functions = config.of_functions
    if functions is None:
        return ()
    with Reward(functions, max_new_tokens=max_new_tokens) as reward:
        scores = reward(trial_groups(prompts, encode))
    refuse_failing_trial(scores, functions)
    return scores.failures


def refuse_failing_trial(scores: Scores, config: RewardConfig) -> None:
    """Raise a TrainingError for a part if all its scores failed, unless rl.reward.max_failed_fraction=1.

    A reward server or judge that gives no score before the start is always an error.
    """
    num_failed = Counter(failed.part for failed in scores.failures)
    num_scores = scores.rewards_PG.numel()
    for part in config.served_parts:
        if num_failed[part] == num_scores:
            first = next(failed for failed in scores.failures if failed.part == part)
            raise TrainingError(
                f'rl.reward.parts "{part}" gave no score for any of {num_scores} reference answers, before the start: '
                f"{first.failure.text}. Start the server, or correct the address, the key or the template."
            )
    if config.max_failed_fraction < 1 and max(num_failed.values(), default=0) == num_scores:
        raise failing_part(
            num_failed, num_scores, scores.failures, "of a trial on reference answers, before the start"
        )


def _completion(text: str, tokens_T: tuple[int, ...]) -> Completion:
    return Completion(
        text=text,
        tokens_T=tokens_T,
        logprobs_T=(0.0,) * len(tokens_T),
        versions=single_version(0, len(tokens_T)),
        finish="stop",
    )
