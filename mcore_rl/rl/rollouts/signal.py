"""Metrics and learning signal of rollout batches, and warnings with a reason and a remedy where nothing is learned."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.rewards.score import ROUNDING
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import EpisodeEnd, Group, GroupSummary, Signal

NUM_BATCHES = 10
"""Largest number of rollout batches over which groups are counted, and calls after which a warning may be repeated."""
MOST_WITHOUT_SIGNAL = 0.8
"""Fraction of groups without a signal above which a warning is given."""
REPLACING = "Replace such groups (rl.rollout.dynamic_sampling=true; where it is, by more rl.rollout.max_refills)"
FEW, MOST = 0.1, 0.9
"""Accuracy below which a task is probably too hard, and accuracy above which it is probably too easy."""


def constant_groups(rewards_XN: Tensor) -> Tensor:
    """Return a mask of groups without a signal, bool `[X]`: of the last axis, fewer than two rewards are not NaN, or
    all are equal up to rounding (0.1 + 0.2 for two parts is not exactly 0.3).
    """
    has_none_XN = rewards_XN.isnan()
    largest_X = rewards_XN.masked_fill(has_none_XN, -torch.inf).amax(dim=-1)
    smallest_X = rewards_XN.masked_fill(has_none_XN, torch.inf).amin(dim=-1)
    return largest_X - smallest_X <= ROUNDING * rewards_XN.nan_to_num(nan=0.0).abs().amax(dim=-1)


def groups_to_train_on(scores_PG: Tensor, num_groups: int) -> list[int]:
    """Return the first `num_groups` indices of groups with unequal scores, or fewer (DAPO, arXiv 2503.14476)."""
    indices: list[int] = (~constant_groups(scores_PG)).nonzero().flatten().tolist()
    return indices[:num_groups]


def signal_of(scores_PN: Tensor, correct: Sequence[bool | None]) -> Signal:
    """Return the signal of a batch; `scores_PN`, float64, are NaN where missing, `correct` is None where unknown."""
    scores_N = scores_PN[~scores_PN.isnan()]
    return Signal(
        num_scores=len(scores_N),
        are_equal=len(scores_N) > 0 and bool(constant_groups(scores_N[None])),
        mean_score=scores_N.mean().item() if len(scores_N) else 0.0,
        num_groups=len(scores_PN),
        num_without_signal=int(constant_groups(scores_PN).sum()) if scores_PN.numel() else len(scores_PN),
        num_correct=sum(is_correct is True for is_correct in correct),
        num_decided=sum(is_correct is not None for is_correct in correct),
    )


def update_signal(rewards_PG: Tensor, loss_weights_N: Tensor) -> Iterator[Metric]:
    """Yield the number of groups that an update trains on, and of those without a signal. `rewards_PG`, float64, are
    NaN where missing; `loss_weights_N`, float64, are 0 for samples that are not part of the update.
    """
    is_trained_P = (loss_weights_N.view_as(rewards_PG) > 0).any(dim=1)
    yield Metric("policy/groups", int(is_trained_P.sum()))
    without_signal_P = constant_groups(rewards_PG) & is_trained_P
    yield Metric("policy/groups_without_signal", int(without_signal_P.sum()))


class Onset:
    """Rate limit of a warning: it is given when its condition begins, after NUM_BATCHES calls without it."""

    def __init__(self) -> None:
        self._calls_without = NUM_BATCHES

    def begins(self, *, holds: bool) -> bool:
        """Return whether the condition `holds` now and has not held in the last NUM_BATCHES calls."""
        begins = holds and self._calls_without >= NUM_BATCHES
        self._calls_without = 0 if holds else self._calls_without + 1
        return begins


class LearningWarnings:
    """Warnings of a run that learns nothing. The state is not saved: a resumed run counts its batches anew."""

    def __init__(self, *, compares_groups: bool, num_rollouts: int) -> None:
        """Create the warnings of a run of `num_rollouts` rollout batches, at most half of which are counted together.
        `compares_groups`: whether a group with equal scores gives no advantage.
        """
        self._compares_groups = compares_groups
        self._num_counted = max(1, min(NUM_BATCHES, num_rollouts // 2))
        self._batches: deque[Signal] = deque(maxlen=self._num_counted)
        self._equal, self._without_signal, self._balance = Onset(), Onset(), Onset()

    def of_batch(self, signal: Signal) -> list[str]:
        """Return the warnings that start with a rollout batch."""
        self._batches.append(signal)
        warnings = []
        if self._equal.begins(holds=signal.num_scores > 1 and signal.are_equal):
            warnings.append(
                f"warning: all {signal.num_scores} scores of a rollout batch are {signal.mean_score:.4g}: nothing is "
                f"learned from them. {_reason([signal])}"
            )
        num_groups = sum(batch.num_groups for batch in self._batches)
        fraction = sum(batch.num_without_signal for batch in self._batches) / max(1, num_groups)
        is_known = self._compares_groups and len(self._batches) == self._num_counted
        if self._without_signal.begins(holds=is_known and fraction > MOST_WITHOUT_SIGNAL):
            warnings.append(
                f"warning: {100 * fraction:.0f} % of the groups of the last {self._num_counted} rollout batches have "
                "no signal: all completions of a prompt have the same score, and nothing is learned from them. "
                f"{_reason(self._batches)}"
            )
        return warnings

    def of_update(self, *, has_loss: bool, grad_norm: float) -> list[str]:
        """Return the warnings that start with an optimizer step. `has_loss`: whether any advantage or other term of the
        loss is nonzero; `grad_norm` is NaN if the step was skipped.
        """
        if not self._balance.begins(holds=not has_loss and grad_norm > 0):
            return []
        return [
            f"warning: no token of an update has an advantage: the routers' balance or z-loss alone moves the weights "
            f"(gradient norm {grad_norm:.3g}; the optimizer scales small gradients up). Likely reason: no group of the "
            f"minibatch has a signal. {REPLACING}, or even out the load by "
            'model.moe.expert_bias=true, with model.moe.balance="none" and z_loss_coeff=0.'
        ]


def _reason(signals: Sequence[Signal]) -> str:
    num_decided = sum(signal.num_decided for signal in signals)
    if not num_decided:
        return (
            "Likely reason: the reward does not see how completions differ, or the task is too easy or too hard. Read "
            "samples/ in the run's folder, and try the reward (mcore-rl reward CONFIG --sample 4)."
        )
    accuracy = sum(signal.num_correct for signal in signals) / num_decided
    if accuracy < FEW:
        return (
            f"Likely reason: {100 * accuracy:.0f} % of the completions are correct: the task is too hard, or answers "
            "are not in the form that the reward reads. Read samples/ in the run's folder; correct "
            "rl.reward.answer_pattern or the prompt, fine-tune first (mcore-rl sft), take easier prompts, or raise "
            "rl.rollout.group_size."
        )
    if accuracy > MOST:
        return (
            f"Likely reason: {100 * accuracy:.0f} % of the completions are correct: the task is too easy. Take harder "
            "prompts, or end the run."
        )
    return (
        f"Likely reason: {100 * accuracy:.0f} % of the completions are correct, and those of a prompt are alike. Raise "
        f"rl.rollout.temperature or group_size. {REPLACING}."
    )


def episodes_reason(groups: Collection[Group], sampling: Sampling) -> str:
    """Return a warning that counts which limits ended the conversations, for use if all of them ended at a limit."""
    ends = Counter(
        completion.episode.end for group in groups for completion in group.completions if completion.episode is not None
    )
    limits: dict[EpisodeEnd, str] = {
        "length": f"rl.rollout.max_new_tokens={sampling.max_new_tokens} within a turn",
        "turns": "rl.environment.max_turns",
        "context": "rl.environment.max_tokens",
    }
    counts = ", ".join(f"{ends[end]} by {limit}" for end, limit in limits.items() if ends[end])
    return (
        f"warning: all conversations were ended by a limit ({counts or 'on other replicas'}), none by the environment. "
        "Raise the limit, or fine-tune the model to end its turns and to answer (mcore-rl sft)."
    )


def truncation_reason(
    groups: Collection[Group], sampling: Sampling, special_ids: frozenset[int], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return a warning with the likely reason and a remedy, for truncated `groups`: a special token that occurs in at
    least half of the completions, and is no stop token, is probably the end token that the model was trained with.
    """
    completions = [completion for group in groups for completion in group.completions]
    holders = Counter(
        token
        for completion in completions
        for token in special_ids.intersection(completion.tokens_T) - sampling.stop_tokens
    )
    what = f"warning: all completions reached rl.rollout.max_new_tokens={sampling.max_new_tokens} without an end"
    token, count = holders.most_common(1)[0] if holders else (-1, 0)
    if 2 * count >= max(1, len(completions)):
        return (
            f"{what}. Likely reason: {count} of {len(completions)} hold the special token "
            f"{_named_token(token, decode)}, which is no end here and may be the one that the model was trained to end "
            f"with. Set data.chat_template to the template of its fine-tuning, or rl.rollout.stop_tokens=[{token}]."
        )
    ends = ", ".join(_named_token(token, decode) for token in sorted(sampling.stop_tokens))
    return (
        f"{what}. Likely reason: the model was not trained to end with {ends or 'a stop token (there is none)'}: "
        "fine-tune it with the same data.chat_template first (mcore-rl sft). Or its answers are longer: raise "
        "rl.rollout.max_new_tokens."
    )


def _named_token(token: int, decode: Callable[[Sequence[int]], str]) -> str:
    text = decode([token])
    return f"{text!r} ({token})" if text else f"token {token}"


def group_metrics(rewards_PG: Tensor) -> list[Metric]:
    """Return metrics of how much rewards differ within a group."""
    # Without any group nothing has a signal: the fraction is then 1, rather than 0 of 0.
    num_constant = int(constant_groups(rewards_PG).sum()) if len(rewards_PG) else 1
    of_scored = [row_G[~row_G.isnan()] for row_G in rewards_PG]
    stds = [row_G.std(correction=0).item() for row_G in of_scored if len(row_G)]
    return [
        Metric("reward/groups_without_signal_fraction", num_constant, max(1, len(rewards_PG))),
        Metric("reward/group_std", sum(stds), max(1, len(stds))),
    ]


def cut_metrics(groups: Sequence[Group], cut: Cut) -> Iterator[Metric]:
    """Yield the KL divergence of the sampling from the trained distribution if top-k, top-p or min-p cut: -log m per
    token, for kept tokens of mass m.
    """
    completions = [completion for group in groups for completion in group.completions]
    if not cut.is_open and all(completion.kept_logprobs_T is not None for completion in completions):
        kept_T = [
            logprob
            for completion in completions
            for start, end in completion.sampled_spans
            for logprob in (completion.kept_logprobs_T or ())[start:end]
        ]
        yield Metric("rollout/cut_kl_nats", -sum(kept_T), len(kept_T))


def episode_metrics(groups: Sequence[Group], environment_s: float | None) -> Iterator[Metric]:
    """Yield metrics of conversations with an environment, with its time `environment_s` unless unknown (None)."""
    completions = [completion for group in groups for completion in group.completions]
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    count = len(episodes)
    yield Metric("environment/turns", sum(len(episode.turns) for episode in episodes), count)
    num_tokens = sum(len(completion.tokens_T) - completion.num_sampled for completion in completions)
    yield Metric("environment/tokens", num_tokens, count)
    ends = Counter(episode.end for episode in episodes)
    for end in get_args(EpisodeEnd):
        yield Metric(f"environment/ended_{end}_fraction", ends[end], count)
    if environment_s is not None:
        yield Metric("time/environment_s", environment_s)


def rollout_metrics(summaries: Sequence[GroupSummary], waited_s: float, generation_s: float) -> list[Metric]:
    """Return metrics of lengths, truncation and speed; `waited_s` and `generation_s` are seconds."""
    lengths = [length for summary in summaries for length in summary.num_sampled_G]
    num_truncated = sum(sum(summary.truncated_G) for summary in summaries)
    num_prompt_tokens = sum(summary.num_prompt_tokens for summary in summaries)
    return [
        Metric("rollout/completion_tokens", sum(lengths), len(lengths)),
        Metric("rollout/longest_completion_tokens", max(lengths)),
        Metric("rollout/prompt_tokens", num_prompt_tokens, len(summaries)),
        Metric("rollout/truncated_fraction", num_truncated, len(lengths)),
        Metric("rollout/tokens_per_s_per_replica", sum(lengths), generation_s),
        Metric("time/rollout_s", waited_s),
    ]
