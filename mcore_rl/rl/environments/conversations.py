"""Conversations of a policy with environments: turn by turn, for all that are open.

Tokens that were sampled are never made from text again: a conversation grows by the tokens of the policy's turn, then
by those that the chat template puts between it and the next one.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.chat import Chat
from mcore_rl.data.chat import Conversation as Messages
from mcore_rl.errors import DataError
from mcore_rl.parallel.agree import from_first_of_model, on_every_rank, world_max
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import Engine, Sampling, asking
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.environments.processes import EnvironmentAnswer, EnvironmentCall, EnvironmentWorkers
from mcore_rl.rl.types import (
    Completion,
    Episode,
    EpisodeEnd,
    Group,
    Prompt,
    Turn,
    VersionSpan,
    grown_routes,
)
from mcore_rl.rl.workers.failure import FailedScore

T = TypeVar("T")
Generate = Callable[[Sequence[Prompt], Sampling, Sequence[Sequence[int]]], list[Group]]
"""Function that samples a turn of each seed of each prompt: `Engine.generate`, or one with its arguments."""
ByEnvironments = Callable[[Callable[[EnvironmentWorkers], T]], T]
"""Function that lets the environments do something, and returns the outcome."""
TRUNCATED: tuple[EpisodeEnd, ...] = ("length", "turns", "context")
"""Ends of conversations that a limit has cut."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Draft:
    """A conversation in the making: its tokens, which all ranks of a model have."""

    group: int
    index: int
    """Index among the completions of its group."""
    seed: int
    tokens_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    untempered_T: list[float] | None = field(default_factory=list)
    kept_T: list[float] | None = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    experts_TLK: Tensor | None = None
    """Routes of prompt and turns, each as the engine gave them with its logprobs; None: it gave none."""
    num_prompt_routes: int = 0
    """Rows of them before those of the tokens here: one less than the prompt has tokens."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    newest: Completion | None = None

    def insert(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment."""
        zeros = [0.0] * len(tokens)
        self.tokens_T += tokens
        self.logprobs_T += zeros
        for numbers in (self.untempered_T, self.kept_T):
            if numbers is not None:
                numbers += zeros

    @property
    def routes(self) -> Tensor | None:
        """Routes of the whole conversation; of turns that came without them there are none."""
        if self.experts_TLK is None:
            return None
        num_tokens = self.num_prompt_routes + len(self.tokens_T)
        return grown_routes(self.experts_TLK, self.experts_TLK[:0], num_tokens)

    def add(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        start, before = len(self.tokens_T), self.spans[-1][1] if self.spans else None
        self.tokens_T += completion.tokens_T
        self.logprobs_T += completion.logprobs_T
        self.untempered_T = _extended(self.untempered_T, completion.untempered_logprobs_T)
        self.kept_T = _extended(self.kept_T, completion.kept_logprobs_T)
        self.spans.append((start, len(self.tokens_T)))
        for span in completion.versions:
            # The environment's tokens before the turn count with its first span.
            begin = self.versions[-1].end if self.versions else 0
            if self.versions and self.versions[-1].version == span.version:
                begin = self.versions.pop().start
            self.versions.append(VersionSpan(span.version, begin, start + span.end))
        if completion.experts_TLK is not None:
            self.num_prompt_routes = len(completion.experts_TLK) - len(self.tokens_T)
            num_before = 0 if before is None else self.num_prompt_routes + before
            self.experts_TLK = grown_routes(self.experts_TLK, completion.experts_TLK, num_before)
        self.newest = completion


@dataclass(eq=False, kw_only=True, slots=True)
class _Record:
    """A conversation as its environment sees it, on the one rank of a replica that has the environments."""

    messages: list[Message] = field(default_factory=list)
    state: bytes = b""
    rewards: list[float] = field(default_factory=list)
    text: str = ""
    """Text of the policy's last turn."""
    end: EpisodeEnd | None = None
    failure: FailedScore | None = None

    def fail(self, failure: FailedScore) -> None:
        """End the conversation by a failure of its environment."""
        self.end, self.failure = "failed", failure


class Conversations:
    """Holds conversations with environments over any engine: on all ranks together (`hold`), or one group on the
    rank that asks servers (`hold_group`).
    """

    def __init__(
        self,
        config: RlRunConfig,
        engine: Engine,
        chat: Chat,
        mesh: Mesh,
        workers: EnvironmentWorkers | None,
    ) -> None:
        """Take the engine and the environments.

        Args:
            config: the run's config.
            engine: engine that samples the policy's turns.
            chat: chat template of the tokens between turns.
            mesh: the mesh.
            workers: processes of the environments, on the first rank of each replica; None on the others.
        """
        self._config, self._engine, self._chat, self._mesh, self._workers = (
            config,
            engine,
            chat,
            mesh,
            workers,
        )
        self.environment_s = 0.0
        """Seconds that environments have taken in the last `hold`."""

    def hold(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Collective over the world: hold a conversation for each seed of each prompt, and return a group for each
        prompt, both in order.

        A turn has the tokens so far as its prompt, and at most `sampling.max_new_tokens` tokens. The first turn of a
        conversation has its seed, a later one a hash of the seed and the turn.

        Args:
            prompts: this replica's problems; the environment makes the prompts of them.
            sampling: rules of each turn.
            seeds_PG: a seed for each completion.
        """
        self.environment_s = 0.0
        return self._hold(
            prompts, sampling, seeds_PG, self._engine.generate, self._by_environments, world_max
        )

    def hold_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the group of prompt `index`, whose conversations `hold` would hold alike; their turns wait for each
        other, and for no other group.

        Not collective; threads of the rank that asks may call it at the same time, also while the policy trains, or its
        new weights go to the servers: a conversation goes on with these from its next token on.

        Raises:
            EngineError: no server gives a turn.
        """
        engine, workers = asking(self._engine), self._workers
        assert workers is not None, "only the rank that asks holds groups"
        with ThreadPoolExecutor(len(seeds_G), f"turn-{index}") as threads:

            def generate(
                prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
            ) -> list[Group]:
                return list(
                    threads.map(
                        lambda one, seeds: engine.request_group(index, one, sampling, seeds),
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
        """Hold conversations, as `hold` does.

        Args:
            prompts: this replica's problems.
            sampling: rules of each turn.
            seeds_PG: a seed for each completion.
            generate: samples turns.
            by_environments: lets the environments begin and answer.
            most_open: returns, of the number of conversations that are open here, the largest one of all that
                generate together.
        """
        drafts = [
            _Draft(group=p, index=g, seed=seed)
            for p, seeds in enumerate(seeds_PG)
            for g, seed in enumerate(seeds)
        ]
        records = [_Record() for _ in drafts]
        tokens_of_prompts = by_environments(lambda workers: self._begin(workers, prompts, drafts, records))
        begun = [
            Prompt(problem=prompt.problem, tokens_T=tokens_T)
            for prompt, tokens_T in zip(prompts, tokens_of_prompts, strict=True)
        ]
        requests: Mapping[int, Sequence[int]] = dict.fromkeys(range(len(drafts)), ())
        # Replicas that share experts generate together: those without an open conversation do so without prompts.
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
            completions[draft.group].append(_completion(draft, record))
        return [
            Group(prompt=prompt, completions=tuple(of_prompt))
            for prompt, of_prompt in zip(begun, completions, strict=True)
        ]

    def _by_environments(self, action: Callable[[EnvironmentWorkers], T]) -> T:
        """Return on all ranks of this replica what `action` returns on the one that has the environments."""
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
        """Start the environments and return the tokens of each prompt; a conversation without a start has its problem's
        own, or those of its group, and ends after one turn.
        """
        outcomes = workers.run([EnvironmentCall(None, prompts[draft.group].problem) for draft in drafts])
        limit = self._config.rl.prompts.max_tokens
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
                    FailedScore(
                        "bad_reply", "start returned other messages than for another completion of the prompt"
                    )
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
        """Have the environments answer the newest turns, and return the tokens with which conversations go on."""
        for index in indices:
            records[index].text = self._text(drafts[index], sampling)
            if records[index].failure is not None:  # it did not start
                records[index].rewards.append(0.0)
                records[index].messages.append({"role": "assistant", "content": records[index].text})
        living = [index for index in indices if records[index].failure is None]
        outcomes = workers.run(
            [EnvironmentCall(records[index].state, records[index].text) for index in living]
        )
        requests = {}
        for index, outcome in zip(living, outcomes, strict=True):
            tokens = self._next(drafts[index], records[index], outcome, sampling)
            if tokens is not None:
                requests[index] = tokens
        return requests

    def _next(
        self, draft: _Draft, record: _Record, outcome: EnvironmentAnswer | FailedScore, sampling: Sampling
    ) -> list[int] | None:
        """Take an answer in, and return the tokens with which the conversation goes on; None where it has ended."""
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
        environment, last = self._config.rl.environment, draft.newest.tokens_T[-1]
        is_closed = last in self._chat.turn_end_ids
        if outcome.is_done:
            record.end = "done"
        elif draft.newest.is_truncated:
            record.end = "length"
        elif (
            last in sampling.stop_tokens and not is_closed and last not in self._config.rl.rollout.stop_tokens
        ):
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

    def _text(self, draft: _Draft, sampling: Sampling) -> str:
        """Return the text of the newest turn: without the token that ends turns or documents, with a stop token that
        the config names, which is the policy's own mark.
        """
        assert draft.newest is not None
        tokens_T = draft.newest.tokens_T
        is_mark = tokens_T[-1] in self._config.rl.rollout.stop_tokens
        if is_mark and tokens_T[-1] not in self._chat.turn_end_ids:
            return self._engine.decode(tokens_T)
        return draft.newest.text


def _generate(
    generate: Generate, prompts: Sequence[Prompt], sampling: Sampling, drafts: Sequence[_Draft]
) -> None:
    """Sample the next turn of each draft; those with the same tokens so far are completions of one prompt."""
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
    """Return the tokens of the messages with which an environment starts; DataError beyond rl.prompts.max_tokens."""
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
    """Return the seed of a turn: that of the completion for the first one, another for each later one."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a seed is a positive int64


def _completion(draft: _Draft, record: _Record) -> Completion:
    assert record.end is not None
    turns = zip(draft.spans, record.rewards, strict=True)
    return Completion(
        text=record.text,
        tokens_T=tuple(draft.tokens_T),
        logprobs_T=tuple(draft.logprobs_T),
        untempered_logprobs_T=None if draft.untempered_T is None else tuple(draft.untempered_T),
        kept_logprobs_T=None if draft.kept_T is None else tuple(draft.kept_T),
        versions=tuple(draft.versions),
        finish="length" if record.end in TRUNCATED else "stop",
        experts_TLK=draft.routes,
        episode=Episode(
            messages=tuple(record.messages),
            turns=tuple(Turn(start, end, reward) for (start, end), reward in turns),
            end=record.end,
            failure=record.failure,
        ),
    )


def _extended(numbers: list[float] | None, more: Sequence[float] | None) -> list[float] | None:
    """Return the numbers with `more` of the next turn; None where the engine does not report them."""
    return None if numbers is None or more is None else [*numbers, *more]
