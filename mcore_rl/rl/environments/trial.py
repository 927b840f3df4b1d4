"""Trial of an environment on real prompts before a run starts."""

from collections.abc import Sequence

from mcore_rl.config.rl.prompts import PromptConfig
from mcore_rl.config.rl.reward import ENVIRONMENT_PART
from mcore_rl.config.rl.section import RlConfig
from mcore_rl.data.chat import Chat, Conversation
from mcore_rl.errors import DataError
from mcore_rl.rl.environments.conversations import prompt_tokens
from mcore_rl.rl.environments.make import environment_maker
from mcore_rl.rl.environments.processes import EnvironmentAnswer, EnvironmentCall, EnvironmentWorkers
from mcore_rl.rl.rewards.failures import FailedPart, failing_part
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.trial import NO_ANSWER
from mcore_rl.rl.types import Prompt
from mcore_rl.rl.workers.failure import FailedScore


def try_environment(rl: RlConfig, prompts: Sequence[Prompt], chat: Chat) -> tuple[FailedPart, ...]:
    """Start the environment for `prompts` and answer each prompt with its reference answer.

    This finds an environment that always fails, or returns messages that the chat template cannot append, before the
    run starts.

    Returns:
        The failures; empty without an environment.

    Raises:
        ConfigError: if the environment cannot be created.
        TrainingError: if it failed for every prompt, unless rl.reward.max_failed_fraction=1.
    """
    environment = rl.environment
    if environment.name is None:
        return ()
    texts = [prompt.problem.answer or NO_ANSWER for prompt in prompts]
    with EnvironmentWorkers(environment_maker(environment), environment) as workers:
        starts = workers.run([EnvironmentCall(None, prompt.problem) for prompt in prompts])
        calls = [
            EnvironmentCall(start.state, text)
            for start, text in zip(starts, texts, strict=True)
            if isinstance(start, EnvironmentAnswer)
        ]
        answers = iter(workers.run(calls))
    failures = []
    for prompt, text, start in zip(prompts, texts, starts, strict=True):
        failure = start
        if isinstance(start, EnvironmentAnswer):
            failure = _failure(rl.prompts, chat, start, text, next(answers))
        if failure is not None:
            problem = prompt.problem
            scored = RewardInput(
                prompt=problem.prompt,
                completion=text,
                answer=problem.answer,
                num_tokens=0,
                is_truncated=False,
                fields=problem.fields,
            )
            failures.append(
                FailedPart(
                    part=ENVIRONMENT_PART, problem_id=problem.problem_id, failure=failure, scored=scored
                )
            )
    if len(failures) == len(prompts) and rl.reward.max_failed_fraction < 1:
        counts = {ENVIRONMENT_PART: len(failures)}
        raise failing_part(counts, len(prompts), failures, "of a trial, before the start")
    return tuple(failures)


def _failure(
    prompts: PromptConfig,
    chat: Chat,
    start: EnvironmentAnswer,
    text: str,
    answer: EnvironmentAnswer | FailedScore,
) -> FailedScore | None:
    """Return the failure of a start or of the answer to one turn; None if both are valid."""
    if isinstance(answer, FailedScore):
        return answer
    try:
        prompt_tokens(chat, start, prompts.max_tokens)
        if not answer.is_done and not answer.is_too_long:
            before = Conversation(messages=start.messages)
            chat.reply(before, text, answer.messages, is_closed=bool(chat.turn_end_ids))
    except DataError as error:
        return FailedScore("template", str(error))
    return None
