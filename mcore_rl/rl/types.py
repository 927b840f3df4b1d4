"""Records passed between the stages of an RL step: Problem -> Prompt -> Completion -> Group -> Rollout."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_rl.metrics.metrics import Metric
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
    """Answer of an engine to a prompt. `logprobs_T[t]` belongs to `tokens_T[t]`. With an environment, the completion is
    everything after the prompt: the policy's turns, and the environment's tokens between them.
    """

    text: str
    """Text of the sampled tokens; with an environment, the text of the policy's last turn."""
    tokens_T: tuple[int, ...]
    """Sampled tokens, including a stop token that ended the completion, and the environment's tokens."""
    logprobs_T: tuple[float, ...]
    """Logprobs at the sampling temperature, before top-k, top-p and min-p, in nats; 0 for the environment's tokens."""
    versions: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens: consecutive spans that cover all tokens, of increasing version
    in each segment. There are several if the weights were updated while the completion was in progress."""
    finish: FinishReason
    """`stop`: a stop token, a stop string or the environment ended the completion; `length`: it reached the maximum
    number of new tokens or turns."""
    kept_logprobs_T: tuple[float, ...] | None = None
    """For each token, the log of the probability mass that top-k, top-p and min-p keep, at the sampling temperature;
    None if the engine does not report it."""
    experts_TLK: Tensor | None = None
    """Experts of each token of prompt and completion but the last of each segment, which enters no layer, for all MoE
    layers or for this pipeline stage's. A row of -1 is a token without routes. None if routes were not requested."""
    episode: Episode | None = None
    """The conversation with an environment; None without an environment."""
    segments: tuple[int, ...] = ()
    """Index of the first token of each segment after the first, which begins with the prompt. Attention does not cross
    segments, and positions begin anew in each. A session of an agent that changes its history has several."""
    teacher_CW: Tensor | None = None
    """float32: numbers of a teacher on a server of each token: its logprob and, for the forward KL, the K likeliest ids
    in its place and their logprobs; NaN without an answer. None: no teacher is on a server."""

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.logprobs_T), (len(self.tokens_T), len(self.logprobs_T))
        ends = [span.end for span in self.versions]
        starts = [span.start for span in self.versions]
        assert ends and starts == [0, *ends[:-1]] and ends[-1] == len(self.tokens_T), self.versions
        for span, after in pairwise(self.versions):
            assert span.version <= after.version or after.start in self.segments, self.versions

    @property
    def policy_version(self) -> int:
        """Version (optimizer step) of the oldest weights that sampled a token."""
        return min(span.version for span in self.versions)

    def stale_spans(self, version: int) -> tuple[tuple[int, int], ...]:
        """Return (start, end) of the leading tokens of each segment that weights older than `version` sampled."""
        bounds = [*pairwise((0, *self.segments, len(self.tokens_T)))]
        older = [span for span in self.versions if span.version < version]
        ends = [max((min(span.end, end) for span in older if span.start < end), default=0) for _, end in bounds]
        return tuple((start, end) for (start, _), end in zip(bounds, ends, strict=True) if end > start)

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
    """Return the routes of a completion or conversation after an engine has continued it: earlier rows stay, because a
    logprob belongs to the experts that it was computed with, and tokens left out earlier stay without routes (-1).

    `now_TLK` has the whole sequence; its row `num_before`, the number of tokens that had entered the layers, is the
    first new one and belongs to the last earlier token.
    """
    num_given = 0 if before_TLK is None else len(before_TLK)
    left_out_TLK = torch.full((num_before - num_given, *now_TLK.shape[1:]), -1, dtype=torch.int16)
    parts = [part for part in (before_TLK, left_out_TLK) if part is not None and len(part)]
    new_TLK = now_TLK[num_before:]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """Lengths of a sample (a prompt with one completion), known to all ranks."""

    replica_rank: int
    """Rank, in the data- and context-parallel group, of the replica that generated the completion."""
    num_prompt_tokens: int
    num_completion_tokens: int
    is_trained: bool
    """Whether the completion takes part in the loss."""
    stale_spans: tuple[tuple[int, int], ...] = ()
    """(start, end) in the completion of each segment's leading tokens that weights older than the current ones
    sampled."""
    is_truncated: bool = False
    """Whether the completion was cut off at the largest number of new tokens."""
    teacher: int = 0
    """Index of the prompt's teacher in `rl.distill.paths`."""
    sampled_spans: tuple[tuple[int, int], ...] | None = None
    """(start, end) in the completion of each run of tokens that the policy sampled, in order; None: all tokens."""
    segments: tuple[int, ...] = ()
    """`Completion.segments`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in prompt and completion."""
        return self.num_prompt_tokens + self.num_completion_tokens

    @property
    def num_positions(self) -> int:
        """Number of positions that enter the model; the last token of each segment is only a label."""
        return self.num_tokens - 1 - len(self.segments)

    @property
    def segment_positions(self) -> tuple[int, ...]:
        """Number of positions of each segment; the first one begins with the prompt."""
        starts = (0, *(self.num_prompt_tokens + start for start in self.segments), self.num_tokens)
        return tuple(end - start - 1 for start, end in pairwise(starts))

    @property
    def input_P(self) -> Tensor:
        """Index in the sample of the token that enters the model at each position, int64; the next one is its label."""
        is_input_T = torch.ones(self.num_tokens, dtype=torch.bool)
        ends = (*self.segments, self.num_completion_tokens)
        is_input_T[[self.num_prompt_tokens + end - 1 for end in ends]] = False
        return is_input_T.nonzero()[:, 0]

    @property
    def num_sampled(self) -> int:
        """Number of the completion's tokens that the policy sampled; an environment wrote the rest."""
        if self.sampled_spans is None:
            return self.num_completion_tokens
        return sum(end - start for start, end in self.sampled_spans)

    @property
    def num_trained(self) -> int:
        """Number of tokens in the loss."""
        return self.num_sampled if self.is_trained else 0

    @property
    def sampled_positions(self) -> Tensor:
        """Positions at which the sampled tokens are predicted, int64, in order."""
        # The first token of the completion is predicted at the last position of the prompt.
        return torch.searchsorted(self.input_P, self.num_prompt_tokens - 1 + self.sampled_C.nonzero()[:, 0])

    @property
    def sampled_C(self) -> Tensor:
        """bool: True for tokens of the completion that the policy sampled."""
        return self._marked_C(((0, self.num_completion_tokens),) if self.sampled_spans is None else self.sampled_spans)

    @property
    def stale_C(self) -> Tensor:
        """bool: True for tokens of the completion in `stale_spans`."""
        return self._marked_C(self.stale_spans)

    def _marked_C(self, spans: tuple[tuple[int, int], ...]) -> Tensor:
        is_marked_C = torch.zeros(self.num_completion_tokens, dtype=torch.bool)
        for start, end in spans:
            is_marked_C[start:end] = True
        return is_marked_C


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSample:
    """One prompt with one completion, `T` tokens, on the CPU."""

    tokens_T: Tensor
    """int64: tokens of the prompt, then of the completion."""
    rollout_logprobs_C: Tensor
    """float32: logprob of each completion token at the time it was sampled."""
    shape: SampleShape
    teacher_CW: Tensor | None = None
    """`Completion.teacher_CW`."""


class StepReward(NamedTuple):
    """Reward of a completion's step, whose last token has the index `end` among the sampled tokens."""

    end: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """Statistics on the differences between a rollout batch's scores, from which a policy learns."""

    num_scores: int
    """Number of scores that are not NaN."""
    are_equal: bool
    """Whether all these scores are the same."""
    mean_score: float
    num_groups: int
    num_without_signal: int
    """Number of groups in which all scores are the same, or that have fewer than two scores."""
    num_correct: int
    num_decided: int
    """Number of completions known to be correct or incorrect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The scored groups of a rollout batch. Completion g of group p is the sample with index p * G + g, on all ranks;
    texts, tokens and logprobs stay on the replica that generated them until `exchange_samples`.
    """

    groups: dict[int, Group]
    """Groups that this replica generated, by index."""
    rewards_PG: Tensor
    """Rewards of all groups, float64. A completion with NaN has no reward and is left out of its group and the loss."""
    shapes: dict[int, SampleShape]
    """Shapes of all samples, by index."""
    num_prompts: int
    """Number of prompts used up, including prompts that dynamic sampling left out."""
    metrics: list[Metric]
    """Metrics of all replicas."""
    steps_PGI: Sequence[Sequence[Sequence[StepReward]]] = ()
    """Rewards of the steps of each completion; empty unless rl.advantage rewards steps."""
    parts_PGK: Tensor | None = None
    """Unweighted parts of the rewards, float64, the length penalty last, NaN where one failed or does not apply; None
    unless rl.advantage compares them."""
    truncation_warning: str | None = None
    """Likely reason why all completions are truncated; None if some are not."""
    signal: Signal | None = None
    """Signal in all groups generated for this batch; None if unknown."""
    baseline_P: Tensor | None = None
    """Reward with which each prompt's completions are compared, float64, NaN if its score failed; None: they are
    compared with each other."""
    refused: frozenset[int] = frozenset()
    """Samples left out of all passes and updates because of the engine's routes; their reward is NaN."""

    def without(self, samples: Collection[int]) -> "Rollout":
        """Return the rollout batch with these samples refused. All samples keep their indices."""
        group_size = self.rewards_PG.shape[1]
        rewards_PG = self.rewards_PG.clone()
        rewards_PG.view(-1)[list(samples)] = torch.nan
        return replace(
            self,
            rewards_PG=rewards_PG,
            steps_PGI=[
                [() if p * group_size + g in samples else steps_I for g, steps_I in enumerate(steps_GI)]
                for p, steps_GI in enumerate(self.steps_PGI)
            ],
            refused=self.refused | frozenset(samples),
        )

    def samples(self) -> dict[int, TrainedSample]:
        """Return the samples that this replica generated, by index."""
        group_size = self.rewards_PG.shape[1]
        return {
            (index := p * group_size + g): TrainedSample(
                tokens_T=torch.tensor(group.prompt.tokens_T + completion.tokens_T),
                rollout_logprobs_C=torch.tensor(completion.logprobs_T, dtype=torch.float32),
                shape=self.shapes[index],
                teacher_CW=completion.teacher_CW,
            )
            for p, group in self.groups.items()
            for g, completion in enumerate(group.completions)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """Summary of a group, available on all ranks."""

    index: int
    """Index of the group's prompt among the prompts taken for this rollout batch."""
    replica_rank: int
    """Rank of the replica that generated the group, among the data- and context-parallel ranks."""
    num_prompt_tokens: int
    lengths_G: list[int]
    """Number of tokens of each completion, including an environment's tokens."""
    num_sampled_G: list[int]
    """Number of tokens of each completion that the policy sampled."""
    spans_G: list[tuple[tuple[int, int], ...] | None]
    """For each completion, (start, end) of the sampled tokens of each turn; None: all tokens are sampled."""
    segments_G: list[tuple[int, ...]]
    """For each completion, the beginnings of its further segments."""
    truncated_G: list[bool]
    rewards_G: list[float]
    """Rewards; NaN if a score failed."""
    stale_G: list[tuple[tuple[int, int], ...]]
    """`Completion.stale_spans` of each completion, older than the engine's current weights."""
    correct_G: list[bool | None]
    """Whether each completion is correct; None if the deciding score failed, or no part decides."""
    steps_GI: Sequence[Sequence[StepReward]] = ()
    """Rewards of the steps of each completion; empty unless rl.advantage rewards steps."""
    parts_GK: Sequence[Sequence[float]] = ()
    """Unweighted parts of each completion's reward; empty unless rl.advantage compares them."""
    teacher: int = 0
    """Index of the prompt's teacher in `rl.distill.paths`."""
