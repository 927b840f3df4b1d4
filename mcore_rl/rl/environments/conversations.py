"""Conversations between a policy and environments, turn by turn. Sampled tokens are never re-encoded from text: a
conversation grows by the tokens of a turn, then by those that the chat template inserts before the next turn.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mcore_rl.config.rl.rollout import ENVIRONMENT_PART, PromptConfig
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.data.chat import Chat
from mcore_rl.data.chat import Conversation as Messages
from mcore_rl.errors import DataError
from mcore_rl.megatron.agree import from_first_of_model, on_every_rank, world_max
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Engine, Sampling, asking
from mcore_rl.rl.environments.interface import (
    EnvironmentAnswer,
    EnvironmentCall,
    EnvironmentWorkers,
    Message,
    environment_maker,
)
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import NO_ANSWER, FailedPart, failing_part
from mcore_rl.rl.rollouts.transcript import Transcript, completion_of, turn_text
from mcore_rl.rl.types import Completion, EpisodeEnd, Group, Prompt
from mcore_rl.rl.workers import FailedScore

T = TypeVar("T")
Generate = Callable[[Sequence[Prompt], Sampling, Sequence[Sequence[int]]], list[Group]]
"""Function that samples a turn for each seed of each prompt: `Engine.generate`, or a function with its signature."""
ByEnvironments = Callable[[Callable[[EnvironmentWorkers], T]], T]
"""Function that runs an action on the environment workers and returns its result."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Draft(Transcript):
    """A conversation in progress: its tokens after the prompt, which all ranks of a replica have."""

    group: int
    index: int
    """Index of the completion in its group."""
    seed: int


@dataclass(eq=False, kw_only=True, slots=True)
class _Record:
    """The environment's view of a conversation, on the rank of each replica that runs the environments."""

    messages: list[Message] = field(default_factory=list)
    state: bytes = b""
    rewards: list[float] = field(default_factory=list)
    text: str = ""
    """Text of the policy's last turn."""
    end: EpisodeEnd | None = None
    failure: FailedScore | None = None

    def fail(self, failure: FailedScore) -> None:
        self.end, self.failure = "failed", failure


class Conversations:
    """Holds conversations: on all ranks (`hold`), or a group on the rank that asks servers (`hold_group`)."""

    def __init__(
        self, rl: RlConfig, engine: Engine, chat: Chat, mesh: Mesh, workers: EnvironmentWorkers | None
    ) -> None:
        """Take an engine, a chat template, and the workers on the first rank of each replica; None elsewhere."""
        self._rl, self._engine, self._chat, self._mesh, self._workers = (rl, engine, chat, mesh, workers)
        self.environment_s = 0.0
        """Seconds that the last `hold` spent in environments."""

    def hold(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Collective over the world: hold a conversation for each seed of each of this replica's prompts. Each turn has
        at most `sampling.max_new_tokens` tokens; the first uses the conversation's seed, a later one a hash of it and
        the turn's index. Returns a group for each prompt, in order.
        """
        self.environment_s = 0.0
        return self._hold(prompts, sampling, seeds_PG, self._engine.generate, self._by_environments, world_max)

    def hold_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Hold the conversations of prompt `index` as `hold` would, without waiting for other groups. Not collective;
        safe in several threads, also while the policy trains or its weights are pushed. Raises EngineError if no server
        returns a turn.
        """
        engine, workers = asking(self._engine), self._workers
        assert workers is not None, "only the rank that asks holds groups"
        with ThreadPoolExecutor(len(seeds_G), f"turn-{index}") as threads:

            def generate(
                prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
            ) -> list[Group]:
                return list(
                    threads.map(
                        lambda turn_prompt, seeds: engine.request_group(index, turn_prompt, sampling, seeds),
                        prompts,
                        seeds_PG,
                    )
                )

            [group] = self._hold(
                [prompt], sampling, [seeds_G], generate, lambda action: action(workers), lambda count: count
            )
        return group

    def _hold(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds_PG: Sequence[Sequence[int]],
        generate: Generate,
        by_environments: ByEnvironments[Any],
        most_open: Callable[[int], int],
    ) -> list[Group]:
        """Hold conversations with turns of `generate`. `most_open` returns the largest number of open conversations
        among the replicas that generate together, given this replica's number.
        """
        drafts = [
            _Draft(group=p, index=g, seed=seed) for p, seeds in enumerate(seeds_PG) for g, seed in enumerate(seeds)
        ]
        records = [_Record() for _ in drafts]
        tokens_of_prompts = by_environments(lambda workers: self._begin(workers, prompts, drafts, records))
        begun = [
            Prompt(problem=prompt.problem, tokens_T=tokens_T)
            for prompt, tokens_T in zip(prompts, tokens_of_prompts, strict=True)
        ]
        requests: Mapping[int, Sequence[int]] = dict.fromkeys(range(len(drafts)), ())
        # Replicas that share experts generate together: a replica without open conversations takes part without
        # prompts.
        while most_open(len(requests)):
            for index, tokens in requests.items():
                drafts[index].insert(tokens)
            answered = list(requests)
            _generate(generate, begun, sampling, [drafts[index] for index in answered])
            requests = by_environments(
                partial(self._answer, drafts=drafts, records=records, indices=answered, sampling=sampling)
            )
        records = by_environments(lambda _: records)
        completions: list[list[Completion]] = [[] for _ in prompts]
        for draft, record in zip(drafts, records, strict=True):
            assert record.end is not None
            completion = completion_of(
                [draft],
                record.rewards,
                text=record.text,
                messages=record.messages,
                end=record.end,
                failure=record.failure,
            )
            completions[draft.group].append(completion)
        return [
            Group(prompt=prompt, completions=tuple(of_prompt))
            for prompt, of_prompt in zip(begun, completions, strict=True)
        ]

    def _by_environments(self, action: Callable[[EnvironmentWorkers], T]) -> T:
        """Run `action` on the rank that has the environments. Returns its result on all ranks of this replica."""
        workers, start_s = self._workers, time.perf_counter()
        value = on_every_rank(lambda: None if workers is None else action(workers))
        found = from_first_of_model(value, self._mesh)
        assert found is not None
        self.environment_s += time.perf_counter() - start_s
        return found

    def _begin(
        self,
        workers: EnvironmentWorkers,
        prompts: Sequence[Prompt],
        drafts: Sequence[_Draft],
        records: Sequence[_Record],
    ) -> list[tuple[int, ...]]:
        """Start the environments and return the tokens of each prompt, the problem's own if no environment of its group
        has started. A conversation whose environment fails to start ends after one turn.
        """
        outcomes = workers.run([EnvironmentCall(None, prompts[draft.group].problem) for draft in drafts])
        limit = self._rl.prompts.max_tokens
        starts: dict[int, tuple[tuple[Message, ...], tuple[int, ...]]] = {}
        for draft, record, outcome in zip(drafts, records, outcomes, strict=True):
            if isinstance(outcome, FailedScore):
                record.fail(outcome)
                continue
            if draft.group not in starts:
                try:
                    starts[draft.group] = outcome.messages, prompt_tokens(self._chat, outcome, limit)
                except DataError as error:
                    record.fail(FailedScore("template", str(error)))
                    continue
            messages, _ = starts[draft.group]
            if outcome.messages != messages:
                record.fail(
                    FailedScore("bad_reply", "start returned other messages than for another completion of the prompt")
                )
                continue
            record.messages, record.state = list(messages), outcome.state
        return [starts[p][1] if p in starts else prompt.tokens_T for p, prompt in enumerate(prompts)]

    def _answer(
        self,
        workers: EnvironmentWorkers,
        *,
        drafts: Sequence[_Draft],
        records: Sequence[_Record],
        indices: Sequence[int],
        sampling: Sampling,
    ) -> dict[int, list[int]]:
        """Let the environments answer the newest turns. Returns the tokens to append to each open conversation."""
        for index in indices:
            newest = drafts[index].newest
            assert newest is not None
            records[index].text = turn_text(newest, self._rl.rollout.stop_tokens, self._chat, self._engine.decode)
            if records[index].failure is not None:  # the environment did not start
                records[index].rewards.append(0.0)
                records[index].messages.append({"role": "assistant", "content": records[index].text})
        living = [index for index in indices if records[index].failure is None]
        outcomes = workers.run([EnvironmentCall(records[index].state, records[index].text) for index in living])
        requests = {}
        for index, outcome in zip(living, outcomes, strict=True):
            tokens = self._next(drafts[index], records[index], outcome, sampling)
            if tokens is not None:
                requests[index] = tokens
        return requests

    def _next(
        self, draft: _Draft, record: _Record, outcome: EnvironmentAnswer | FailedScore, sampling: Sampling
    ) -> list[int] | None:
        """Record an environment's answer and return the tokens to append; None if the conversation has ended."""
        assert draft.newest is not None
        before = Messages(messages=tuple(record.messages))
        record.messages.append({"role": "assistant", "content": record.text})
        if isinstance(outcome, FailedScore):
            record.rewards.append(0.0)
            record.fail(outcome)
            return None
        record.rewards.append(outcome.reward)
        record.messages += outcome.messages
        record.state = outcome.state
        environment, last = self._rl.environment, draft.newest.tokens_T[-1]
        is_closed = last in self._chat.turn_end_ids
        if outcome.is_done:
            record.end = "done"
        elif draft.newest.is_truncated:
            record.end = "length"
        elif last in sampling.stop_tokens and not is_closed and last not in self._rl.rollout.stop_tokens:
            record.end = "document"
        elif len(draft.spans) >= environment.max_turns:
            record.end = "turns"
        elif outcome.is_too_long:
            record.end = "context"
        if record.end is not None:
            return None
        try:
            tokens = self._chat.reply(before, record.text, outcome.messages, is_closed=is_closed)
        except DataError as error:
            record.fail(FailedScore("template", str(error)))
            return None
        if len(draft.tokens_T) + len(tokens) + sampling.max_new_tokens > environment.max_tokens:
            record.end = "context"
            return None
        return tokens


def _generate(generate: Generate, prompts: Sequence[Prompt], sampling: Sampling, drafts: Sequence[_Draft]) -> None:
    """Sample the next turn of each draft; drafts with the same tokens so far are completions of the same prompt."""
    by_prompt: dict[tuple[int, tuple[int, ...]], list[_Draft]] = {}
    for draft in drafts:
        tokens_T = (*prompts[draft.group].tokens_T, *draft.tokens_T)
        by_prompt.setdefault((draft.group, tokens_T), []).append(draft)
    groups = generate(
        [Prompt(problem=prompts[group].problem, tokens_T=tokens_T) for group, tokens_T in by_prompt],
        sampling,
        [[turn_seed(draft.seed, len(draft.spans)) for draft in same] for same in by_prompt.values()],
    )
    for same, group in zip(by_prompt.values(), groups, strict=True):
        for draft, completion in zip(same, group.completions, strict=True):
            draft.add(completion)


def prompt_tokens(chat: Chat, start: EnvironmentAnswer, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of an environment's first messages. Raises DataError if there are none or more than
    `max_tokens`, the last is the assistant's, or the chat template cannot render them.
    """
    if start.is_too_long:
        raise DataError("the environment starts with messages that are longer than rl.environment.max_tokens")
    if start.messages and start.messages[-1]["role"] == "assistant":
        raise DataError(
            "the environment starts with messages that end in a turn of the assistant, which it would have to answer. "
            "End them in a turn of another role"
        )
    tokens_T = tuple(chat.prompt(Messages(messages=start.messages)))
    if not 0 < len(tokens_T) <= max_tokens:
        raise DataError(
            f"the environment starts with messages of {len(tokens_T)} tokens; wanted: 1 to rl.prompts.max_tokens="
            f"{max_tokens}"
        )
    return tokens_T


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: the completion's seed for the first turn, a hash of it for each later turn."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a seed is a positive int64


def try_environment(rl: RlConfig, prompts: Sequence[Prompt], chat: Chat) -> tuple[FailedPart, ...]:
    """Answer each prompt with its reference answer before a run, to find an environment that always fails or messages
    that the template cannot append. Returns the failures. Raises ConfigError if the environment cannot be created, and
    TrainingError if it failed for every prompt, unless rl.reward.max_failed_fraction=1.
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
    for text, start in zip(texts, starts, strict=True):
        failure = start
        if isinstance(start, EnvironmentAnswer):
            failure = _trial_failure(rl.prompts, chat, start, text, next(answers))
        failures.append(failure)
    return failed_trials(rl, prompts, failures)


def failed_trials(
    rl: RlConfig, prompts: Sequence[Prompt], failures: Sequence[FailedScore | None]
) -> tuple[FailedPart, ...]:
    """Return the failures of a trial with the reference answers of these prompts. Raises TrainingError if it failed for
    every prompt, unless rl.reward.max_failed_fraction=1.
    """
    found = [
        FailedPart(
            part=ENVIRONMENT_PART,
            problem_id=prompt.problem.problem_id,
            failure=failure,
            scored=RewardInput(
                prompt=prompt.problem.prompt,
                completion=prompt.problem.answer or NO_ANSWER,
                answer=prompt.problem.answer,
                num_tokens=0,
                is_truncated=False,
                fields=prompt.problem.fields,
            ),
        )
        for prompt, failure in zip(prompts, failures, strict=True)
        if failure is not None
    ]
    if len(found) == len(prompts) and rl.reward.max_failed_fraction < 1:
        counts = {ENVIRONMENT_PART: len(found)}
        raise failing_part(counts, len(prompts), found, "of a trial, before the start")
    return tuple(found)


def _trial_failure(
    prompts: PromptConfig, chat: Chat, start: EnvironmentAnswer, text: str, answer: EnvironmentAnswer | FailedScore
) -> FailedScore | None:
    """Return the failure of a start or of the answer to one turn; None if both are valid."""
    if isinstance(answer, FailedScore):
        return answer
    try:
        prompt_tokens(chat, start, prompts.max_tokens)
        if not answer.is_done and not answer.is_too_long:
            before = Messages(messages=start.messages)
            chat.reply(before, text, answer.messages, is_closed=bool(chat.turn_end_ids))
    except DataError as error:
        return FailedScore("template", str(error))
    return None
