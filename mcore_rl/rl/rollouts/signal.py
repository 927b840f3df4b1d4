"""The signal of rollout batches, and warnings where a policy learns nothing, each with the reason and a remedy."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.obs.metrics import Metric
from mcore_rl.rl.objectives.advantages import constant_groups

NUM_BATCHES = 10
"""Rollout batches whose groups are counted together, and updates or batches after which a warning may come again."""
MOST_WITHOUT_SIGNAL = 0.8
"""Fraction of groups without a signal above which there is a warning."""
FEW, MOST = 0.1, 0.9
"""Accuracies below and above which the task is likely to be too hard and too easy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """Differences between the scores of a rollout batch, from which a policy learns."""

    num_scores: int
    """Scores that are not NaN."""
    are_equal: bool
    """Whether these are all the same."""
    mean_score: float
    num_groups: int
    num_without_signal: int
    """Groups whose scores are all the same, or fewer than two."""
    num_correct: int
    num_decided: int
    """Completions of which it is known whether they are correct."""


def signal_of(scores_PN: Tensor, correct: Sequence[bool | None]) -> Signal:
    """Return the signal of a rollout batch.

    Args:
        scores_PN: float64: scores of each group; NaN: there is none.
        correct: whether each completion is correct; None: not known.
    """
    scores_N = scores_PN[~scores_PN.isnan()]
    return Signal(
        num_scores=len(scores_N),
        are_equal=len(scores_N) > 0 and bool(constant_groups(scores_N[None])),
        mean_score=scores_N.mean().item() if len(scores_N) else 0.0,
        num_groups=len(scores_PN),
        num_without_signal=int(constant_groups(scores_PN).sum()) if scores_PN.numel() else len(scores_PN),
        num_correct=sum(one is True for one in correct),
        num_decided=sum(one is not None for one in correct),
    )


def update_signal(rewards_PG: Tensor, loss_weights_N: Tensor) -> Iterator[Metric]:
    """Yield how many groups an update trains on, and how many of them have rewards that are all the same.

    Args:
        rewards_PG: float64: rewards of a rollout batch; NaN: there is none.
        loss_weights_N: float64: weights of its samples in the update; 0: another update has the sample, or none.
    """
    is_trained_P = (loss_weights_N.view_as(rewards_PG) > 0).any(dim=1)
    yield Metric("policy/groups", int(is_trained_P.sum()))
    without_signal_P = constant_groups(rewards_PG) & is_trained_P
    yield Metric("policy/groups_without_signal", int(without_signal_P.sum()))


class Onset:
    """Lets a warning through where its condition begins; again after NUM_BATCHES calls without the condition."""

    def __init__(self) -> None:
        self._calls_without = NUM_BATCHES

    def begins(self, *, holds: bool) -> bool:
        """Return whether the condition `holds` and did not in the calls before."""
        begins = holds and self._calls_without >= NUM_BATCHES
        self._calls_without = 0 if holds else self._calls_without + 1
        return begins


class LearningWarnings:
    """Warnings of a run in which nothing is learned.

    Nothing of it is saved: a run that resumes counts its batches anew, and repeats a warning whose condition goes on.
    """

    def __init__(self, *, compares_groups: bool) -> None:
        """Take whether groups whose scores are all the same give no advantage."""
        self._compares_groups = compares_groups
        self._batches: deque[Signal] = deque(maxlen=NUM_BATCHES)
        self._equal, self._without_signal, self._balance = Onset(), Onset(), Onset()

    def of_batch(self, signal: Signal) -> list[str]:
        """Return the warnings that begin with a rollout batch."""
        self._batches.append(signal)
        warnings = []
        if self._equal.begins(holds=signal.num_scores > 1 and signal.are_equal):
            warnings.append(
                f"warning: all {signal.num_scores} scores of a rollout batch are {signal.mean_score:.4g}: nothing is "
                f"learned from them. {_reason([signal])}"
            )
        num_groups = sum(one.num_groups for one in self._batches)
        fraction = sum(one.num_without_signal for one in self._batches) / max(1, num_groups)
        is_known = self._compares_groups and len(self._batches) == NUM_BATCHES
        if self._without_signal.begins(holds=is_known and fraction > MOST_WITHOUT_SIGNAL):
            warnings.append(
                f"warning: {100 * fraction:.0f} % of the groups of the last {NUM_BATCHES} rollout batches have no "
                "signal: all completions of a prompt have the same score, and nothing is learned from them. "
                f"{_reason(self._batches)}"
            )
        return warnings

    def of_update(self, *, has_loss: bool, grad_norm: float) -> list[str]:
        """Return the warnings that begin with an optimizer step.

        Args:
            has_loss: whether an advantage or another term of the loss is not zero.
            grad_norm: norm of the gradient; NaN where the step was skipped.
        """
        if not self._balance.begins(holds=not has_loss and grad_norm > 0):
            return []
        return [
            f"warning: no token of an update has an advantage: the routers' balance or z-loss alone moves the weights "
            f"(gradient norm {grad_norm:.3g}; the optimizer scales small gradients up). Likely reason: no group of the "
            "minibatch has a signal. Replace such groups (rl.rollout.dynamic_sampling=true), or even out the load by "
            'model.moe.expert_bias=true, with model.moe.balance="none" and z_loss_coeff=0.'
        ]


def evaluation_warnings(name: str, start: float, end: float, interval: tuple[float, float]) -> list[str]:
    """Return a warning where an evaluation ends within its interval of the start; none where it has moved.

    Args:
        name: name of the metric.
        start: value before the first step.
        end: value after the last step.
        interval: interval of 95 % around `end`.
    """
    low, high = interval
    if not low <= start <= high:
        return []
    reason = (
        "the task was solved at the start: take harder prompts"
        if name == "eval/accuracy" and start > MOST
        else "the rewards of training have no signal (reward/groups_without_signal_fraction), there are too few steps, "
        "or optim.lr is too low; where reward/mean has risen, training and held-out prompts are of different kinds. "
        "More held-out prompts (rl.eval.num_prompts) or answers to each (rl.eval.samples) narrow the interval"
    )
    return [
        f"warning: {name} ends at {end:.4g} (95 %: {low:.4g} to {high:.4g}) and was {start:.4g} at the start: the run "
        f"has changed nothing that this evaluation can see. Likely reason: {reason}."
    ]


def _reason(signals: Sequence[Signal]) -> str:
    """Return the likely reason why scores do not differ, and what to change, by how many completions are correct."""
    num_decided = sum(one.num_decided for one in signals)
    if not num_decided:
        return (
            "Likely reason: the reward does not see how completions differ, or the task is too easy or too hard. Read "
            "samples/ in the run's folder, and try the reward (mcore-rl reward CONFIG --sample 4)."
        )
    accuracy = sum(one.num_correct for one in signals) / num_decided
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
        "rl.rollout.temperature or group_size, or replace such groups (rl.rollout.dynamic_sampling=true)."
    )
