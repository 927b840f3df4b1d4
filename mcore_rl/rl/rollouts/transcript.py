"""A sequence in progress that a policy and others write: its sampled tokens are never made from text again."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.chat import Chat
from mcore_rl.rl.types import Completion, Episode, EpisodeEnd, Turn, VersionSpan, grown_routes
from mcore_rl.rl.workers import FailedScore

TRUNCATED: tuple[EpisodeEnd, ...] = ("length", "turns", "context")
"""Ends that count as truncated, because a limit cut the conversation off."""


@dataclass(eq=False, kw_only=True, slots=True)
class Transcript:
    """The tokens of a growing sequence after its prompt, with what the engine returned of the sampled ones."""

    tokens_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    kept_T: list[float] | None = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    experts_TLK: Tensor | None = None
    """Routes of the prompt and turns, as the engine returned them with each turn's logprobs; None: it returned none."""
    num_prompt_routes: int = 0
    """Number of route rows of the prompt: its length minus one."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    newest: Completion | None = None

    def insert(self, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled here: an environment's, an agent's, or the prompt of a segment."""
        zeros = [0.0] * len(tokens)
        self.tokens_T += tokens
        self.logprobs_T += zeros
        if self.kept_T is not None:
            self.kept_T += zeros

    @property
    def routes(self) -> Tensor | None:
        """Routes of the whole sequence, with rows of -1 for turns without routes; None if no turn has routes."""
        if self.experts_TLK is None:
            return None
        num_tokens = self.num_prompt_routes + len(self.tokens_T)
        return grown_routes(self.experts_TLK, self.experts_TLK[:0], num_tokens)

    def add(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        start, before = len(self.tokens_T), self.spans[-1][1] if self.spans else None
        self.tokens_T += completion.tokens_T
        self.logprobs_T += completion.logprobs_T
        kept_T = completion.kept_logprobs_T
        self.kept_T = None if self.kept_T is None or kept_T is None else [*self.kept_T, *kept_T]
        self.spans.append((start, len(self.tokens_T)))
        for span in completion.versions:
            # Tokens before the turn belong to the turn's first span.
            begin = self.versions[-1].end if self.versions else 0
            if self.versions and self.versions[-1].version == span.version:
                begin = self.versions.pop().start
            self.versions.append(VersionSpan(span.version, begin, start + span.end))
        if completion.experts_TLK is not None:
            self.num_prompt_routes = len(completion.experts_TLK) - len(self.tokens_T)
            num_before = 0 if before is None else self.num_prompt_routes + before
            self.experts_TLK = grown_routes(self.experts_TLK, completion.experts_TLK, num_before)
        self.newest = completion


def completion_of(
    parts: Sequence[Transcript],
    rewards: Sequence[float],
    *,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    end: EpisodeEnd,
    failure: FailedScore | None,
    follows_prompt: bool = True,
) -> Completion:
    """Return transcripts as a completion with a segment for each after the first, which continues the prompt unless
    `follows_prompt` is False. `rewards` are those of all turns; `text` is the last turn's.
    """
    starts = [0, *accumulate(len(part.tokens_T) for part in parts)]
    placed = [*zip(starts, parts, strict=False)]
    spans = [(before + start, before + stop) for before, part in placed for start, stop in part.spans]
    kept = [part.kept_T for part in parts]
    routes = [rows for part in parts if (rows := part.routes) is not None]
    return Completion(
        text=text,
        tokens_T=tuple(token for part in parts for token in part.tokens_T),
        logprobs_T=tuple(logprob for part in parts for logprob in part.logprobs_T),
        kept_logprobs_T=None if None in kept else tuple(value for part in kept for value in part or ()),
        versions=tuple(
            VersionSpan(span.version, before + span.start, before + span.end)
            for before, part in placed
            for span in part.versions
        ),
        finish="length" if end in TRUNCATED else "stop",
        experts_TLK=torch.cat(routes) if len(routes) == len(parts) else None,
        episode=Episode(
            messages=tuple(messages),
            turns=tuple(Turn(*span, reward) for span, reward in zip(spans, rewards, strict=True)),
            end=end,
            failure=failure,
        ),
        segments=tuple(starts[follows_prompt:-1]),
    )


def turn_text(
    completion: Completion, stop_tokens: Collection[int], chat: Chat, decode: Callable[[Sequence[int]], str]
) -> str:
    """Return a turn's text without its end token; one of rl.rollout.stop_tokens stays, as it is the policy's mark."""
    last = completion.tokens_T[-1]
    if last in stop_tokens and last not in chat.turn_end_ids:
        return decode(completion.tokens_T)
    return completion.text
