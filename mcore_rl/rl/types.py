"""Records passed between the stages of an RL step: Problem -> Prompt -> Completion -> Group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_rl.rl.workers import FailedScore

FinishReason = Literal["stop", "length"]
EpisodeEnd = Literal["done", "document", "length", "turns", "context", "failed"]
BYTE_EXPERTS = 256
"""Maximum number of experts per layer for which a completion's routes are stored in one byte per expert, not two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Text of a prompt, with its reference answer."""

    problem_id: str
    """Id that is the same in every run: seed and index in a task, or name and line of a file."""
    prompt: str
    """Text of the prompt; in a conversation, the text of its last turn."""
    answer: str
    """Reference answer; empty if the prompt has none."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Turns of a conversation, each with "role" and "content"; empty: `prompt` is the user's only turn."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the prompt's record, for reward functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem, encoded as tokens of the model."""

    problem: Problem
    tokens_T: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Span of a completion's tokens that a single version of the weights sampled."""

    version: int
    """Version (optimizer step) of the weights."""
    start: int
    """Index of the span's first token in the completion."""
    end: int
    """Index after the span's last token."""


def single_version(version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion of `num_tokens` tokens, all sampled by the same version of the weights."""
    return (VersionSpan(version, 0, num_tokens),)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy in a conversation with an environment."""

    start: int
    """Index in the completion of the turn's first sampled token."""
    end: int
    """Index after the turn's last sampled token."""
    reward: float
    """Reward that the environment gave for the turn; 0 if the environment failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A completion's conversation with an environment."""

    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation, including the messages of the prompt."""
    turns: tuple[Turn, ...]
    """The policy's turns, in order. Tokens between them are the environment's, and are not trained on."""
    end: EpisodeEnd
    """Reason for the end. `done`: the environment ended the conversation; `document`: the policy ended the document;
    `length`: a turn reached rl.rollout.max_new_tokens; `turns`: it reached rl.environment.max_turns; `context`:
    rl.environment.max_tokens leaves no room for another turn; `failed`: the environment failed."""
    failure: FailedScore | None = None
    """Failure of the environment; None if it did not fail."""

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the sampled tokens of each turn."""
        return tuple((turn.start, turn.end) for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Answer of an engine to a prompt. `logprobs_T[t]` belongs to `tokens_T[t]`.

    With an environment, the completion is everything after the prompt: the policy's turns, and the environment's tokens
    between them.
    """

    text: str
    """Text of the sampled tokens; with an environment, the text of the policy's last turn."""
    tokens_T: tuple[int, ...]
    """Sampled tokens, including a stop token that ended the completion, and the environment's tokens."""
    logprobs_T: tuple[float, ...]
    """Logprobs at the sampling temperature, before top-k, top-p and min-p, in nats; 0 for the environment's tokens."""
    versions: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens: consecutive spans of increasing version that cover all tokens.
    There are several if the weights were updated while the completion was in progress."""
    finish: FinishReason
    """`stop`: a stop token, a stop string or the environment ended the completion; `length`: it reached the maximum
    number of new tokens or turns."""
    kept_logprobs_T: tuple[float, ...] | None = None
    """For each token, the log of the probability mass that top-k, top-p and min-p keep, at the sampling temperature;
    None if the engine does not report it."""
    experts_TLK: Tensor | None = None
    """Experts of each token of prompt and completion but the last, which enters no layer, for all MoE layers or for
    this pipeline stage's. A row of -1 is a token without routes. None if routes were not requested."""
    episode: Episode | None = None
    """The conversation with an environment; None without an environment."""

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.logprobs_T), (len(self.tokens_T), len(self.logprobs_T))
        ends = [span.end for span in self.versions]
        starts = [span.start for span in self.versions]
        assert ends and starts == [0, *ends[:-1]] and ends[-1] == len(self.tokens_T), self.versions
        versions = [span.version for span in self.versions]
        assert versions == sorted(versions), self.versions

    @property
    def policy_version(self) -> int:
        """Version (optimizer step) of the weights that sampled the first token, the oldest version."""
        return self.versions[0].version

    @property
    def sampled_spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of each span of tokens that the policy sampled; all other tokens are the environment's."""
        return ((0, len(self.tokens_T)),) if self.episode is None else self.episode.spans

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(end - start for start, end in self.sampled_spans)

    @property
    def is_truncated(self) -> bool:
        """Whether the completion reached the maximum number of new tokens or turns before it ended."""
        return self.finish == "length"


def grown_routes(before_TLK: Tensor | None, now_TLK: Tensor, num_before: int) -> Tensor:
    """Return the routes of a completion or conversation after an engine has continued it.

    A logprob belongs to the experts that it was computed with. Earlier rows therefore stay as they are, although the
    engine has computed their tokens again, perhaps with newer weights. For the same reason tokens that were left out
    earlier stay without routes (-1).

    Args:
        before_TLK: Rows that the engine returned earlier; None if it returned none.
        now_TLK: Rows of the whole sequence. The first new row belongs to the last earlier token, which had entered no
            layer before.
        num_before: Number of tokens that had entered the layers before.
    """
    num_given = 0 if before_TLK is None else len(before_TLK)
    left_out_TLK = torch.full((num_before - num_given, *now_TLK.shape[1:]), -1, dtype=torch.int16)
    parts, new_TLK = (
        [part for part in (before_TLK, left_out_TLK) if part is not None and len(part)],
        now_TLK[num_before:],
    )
    if before_TLK is not None and not (new_TLK < 0).any():
        new_TLK = new_TLK.to(before_TLK.dtype)
    return torch.cat([*parts, new_TLK])


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    reasons_G: Sequence[Mapping[str, str]] = ()
    """Reasons that the reward parts gave for their score of each completion, by part; empty before scoring."""


class WaitingBytes(NamedTuple):
    """Bytes that frozen models occupy between their passes, by location."""

    device: int = 0
    host: int = 0
