"""What travels between the stages of an RL step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt in words, with what a right answer is."""

    problem_id: str
    """The same in every run: of a built-in task its seed and number, of a file its name and line."""
    prompt: str
    """Of a conversation, its last turn."""
    answer: str
    messages: tuple[Mapping[str, Any], ...] = ()
    """The turns of a conversation; empty: `prompt` is the one turn of the user."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else came with it, for reward functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem in the model's tokens."""

    problem: Problem
    tokens_T: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returns for one prompt. `logprobs_T[t]` is of `tokens_T[t]` as it was sampled."""

    text: str
    tokens_T: tuple[int, ...]
    """With the token that ended it, if one did."""
    logprobs_T: tuple[float, ...]
    """Under the tempered distribution, before top-k, top-p and min-p cut it."""
    policy_version: int
    """Of the weights; those of its first token when they changed on the way."""
    finish: FinishReason
    untempered_logprobs_T: tuple[float, ...] | None = None
    """The same at temperature 1; None: the engine does not tell."""
    experts_TLK: Tensor | None = None
    """Routes of prompt + completion without the last token, which enters no layer, for all layers that route or for
    those of this pipeline stage; None: not asked for."""

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.logprobs_T), (len(self.tokens_T), len(self.logprobs_T))

    @property
    def is_truncated(self) -> bool:
        """Whether it reached the longest length without an end."""
        return self.finish == "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]
