"""Records that travel between the stages of an RL step: Problem -> Prompt -> Completion -> Group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_rl.rl.workers.failure import FailedScore

FinishReason = Literal["stop", "length"]
EpisodeEnd = Literal["done", "document", "length", "turns", "context", "failed"]
BYTE_EXPERTS = 256
"""Largest number of experts of a layer for which a completion's experts are of one byte each, and not of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Text of a prompt, with its reference answer."""

    problem_id: str
    """Identity that is the same in every run: seed and index in a built-in task, or name and line of a file."""
    prompt: str
    """Text of the prompt; of a conversation its last turn."""
    answer: str
    """Reference answer; empty where the prompt came without one."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Turns of a conversation, each with "role" and "content"; empty: `prompt` is the user's only turn."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields that came with the prompt, for reward functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem in the model's tokens."""

    problem: Problem
    tokens_T: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens of a completion that the weights of one version sampled."""

    version: int
    """Version (optimizer step) of the weights."""
    start: int
    """Index in the completion of the first of these tokens."""
    end: int
    """Index after the last of these tokens."""


def single_version(version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion of `num_tokens` tokens that one version of the weights sampled."""
    return (VersionSpan(version, 0, num_tokens),)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy within a conversation with an environment."""

    start: int
    """Index in the completion of the first token that was sampled in this turn."""
    end: int
    """Index after the last one."""
    reward: float
    """Reward that the environment gave for it; 0 where the environment failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """The conversation with an environment that a completion is."""

    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation, with the messages of the prompt."""
    turns: tuple[Turn, ...]
    """The policy's answers, in order. Tokens between them are the environment's, and are not trained on."""
    end: EpisodeEnd
    """Reason why it ended: `done`: the environment ended it; `document`: the policy ended the document; `length`: a
    turn reached rl.rollout.max_new_tokens; `turns`: rl.environment.max_turns; `context`: rl.environment.max_tokens had
    no room for another turn; `failed`: the environment failed."""
    failure: FailedScore | None = None
    """Failure of the environment; None: it did not fail."""

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First index and end of the sampled tokens of each turn."""
        return tuple((turn.start, turn.end) for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Answer of an engine to one prompt. `logprobs_T[t]` belongs to `tokens_T[t]`.

    With an environment it is all that follows the prompt: the policy's turns, and the environment's between them.
    """

    text: str
    """Text of the sampled tokens; in a conversation with an environment that of the policy's last turn."""
    tokens_T: tuple[int, ...]
    """Sampled tokens, with the one that ended the completion, if one did; and those of an environment."""
    logprobs_T: tuple[float, ...]
    """Logprobs at the sampling temperature, before top-k, top-p and min-p cut the distribution, in nats; 0 for tokens
    of an environment."""
    versions: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens: consecutive spans of rising versions, together all tokens. More
    than one: the weights were updated while the completion was in progress."""
    finish: FinishReason
    """`stop`: a stop token or string, or the environment, ended it; `length`: it reached the largest number of new
    tokens or turns."""
    untempered_logprobs_T: tuple[float, ...] | None = None
    """Logprobs at temperature 1; None: the engine does not report them."""
    kept_logprobs_T: tuple[float, ...] | None = None
    """For each token the logprob, at the sampling temperature, of all tokens together that top-k, top-p and min-p left
    to draw from; None: the engine does not report it."""
    experts_TLK: Tensor | None = None
    """Experts of each token of prompt and completion but the last, which enters no layer, for all layers that route
    or for those of this pipeline stage. A row of -1: the engine left this token out. None: not asked for."""
    episode: Episode | None = None
    """The conversation with an environment; None: there was no environment."""

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.logprobs_T), (len(self.tokens_T), len(self.logprobs_T))
        ends = [span.end for span in self.versions]
        starts = [span.start for span in self.versions]
        assert ends and starts == [0, *ends[:-1]] and ends[-1] == len(self.tokens_T), self.versions
        versions = [span.version for span in self.versions]
        assert versions == sorted(versions), self.versions

    @property
    def policy_version(self) -> int:
        """Version (optimizer step) of the weights that sampled the first token: the oldest one."""
        return self.versions[0].version

    @property
    def sampled_spans(self) -> tuple[tuple[int, int], ...]:
        """First index and end of the tokens that the policy sampled; the others are an environment's."""
        return ((0, len(self.tokens_T)),) if self.episode is None else self.episode.spans

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(end - start for start, end in self.sampled_spans)

    @property
    def is_truncated(self) -> bool:
        """Whether it reached the largest number of new tokens or turns without an end."""
        return self.finish == "length"


def grown_routes(before_TLK: Tensor | None, now_TLK: Tensor, num_before: int) -> Tensor:
    """Return the routes of a completion, or of a conversation, that an engine has continued.

    A logprob belongs to the experts with which it was computed: rows that the engine gave before stay as they are,
    although it has computed these tokens once more, perhaps with newer weights. For the same reason what it left out
    then stays without routes.

    Args:
        before_TLK: Rows that the engine gave before; None: it gave none.
        now_TLK: Rows of the whole. The first that is new is that of the last token before: it entered no layer then.
        num_before: Tokens that had entered a layer before.
    """
    num_given = 0 if before_TLK is None else len(before_TLK)
    left_out_TLK = torch.full((num_before - num_given, *now_TLK.shape[1:]), -1, dtype=torch.int16)
    parts, new_TLK = (
        [one for one in (before_TLK, left_out_TLK) if one is not None and len(one)],
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
    """Remarks of the parts of the reward on each completion, by part; empty before scoring."""


class WaitingBytes(NamedTuple):
    """Bytes of models that are not trained, while they wait for their passes."""

    device: int = 0
    host: int = 0
    file: int = 0
