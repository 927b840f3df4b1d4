"""Verdict on a run of reinforcement learning: whether it learned, and whether its reward rises while its aim falls.

A run's log and the report call the same functions, on the records of metrics.jsonl.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

Z_95 = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""
WINDOWS = (5, 10, 20)
"""Numbers of neighbouring rollout batches whose means are compared."""
FALSE_ALARM = 0.01
"""Chance of a false alarm, which is divided by the number of comparisons. The tests simulate the rate of whole runs."""
LEAST_FALL = 0.05
"""Fall relative to the best value up to which there is no alarm: small falls are certain in a long run."""


def wilson(share: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Return the interval of a share of `count` prompts, by default of 95 % (Wilson 1927). With several answers a
    prompt it is on the wide side: the prompts are independent, the answers to a prompt are not.
    """
    spread = z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(max(0.0, share * (1 - share)) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def interval_of_difference(
    before: float, num_before: float, after: float, num_after: float, z: float = Z_95
) -> tuple[float, float]:
    """Return the interval of `after - before`, two shares of so many prompts (Newcombe 1998, method 10)."""
    (low_before, high_before), (low, high) = wilson(before, num_before, z), wilson(after, num_after, z)
    low, high = math.hypot(after - low, high_before - before), math.hypot(high - after, before - low_before)
    return after - before - low, after - before + high


def student_t(degrees: float, z: float = Z_95) -> float:
    """Return Student's t where the normal distribution has the quantile `z`, by default 97.5 % with the table; beyond
    it by the Cornish-Fisher expansion, accurate to 1e-3.
    """
    if z == Z_95 and degrees <= len(T_95):
        return T_95[int(degrees) - 1]
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


SOLVED = 0.9
"""Accuracy at the start above which a task was too easy to learn from."""
REASONS = {
    "learned": "",
    "got worse": "optim.lr is too high, or the reward asks for something else. Lower optim.lr, raise rl.loss.kl_coeff, "
    "or take an earlier checkpoint",
    "no difference shown": "the rewards of training have no signal (reward/groups_without_signal_fraction), there are "
    "too few steps, or optim.lr is too low; where reward/mean has risen, training and held-out prompts are of "
    "different kinds. More prompts (rl.eval.num_prompts) or answers to each (rl.eval.samples) narrow the interval",
}


class Verdict(NamedTuple):
    """Difference of a metric between the start and the end of a run, with its interval of 95 %."""

    metric: str
    before: float
    after: float
    low: float
    high: float
    basis: str
    """Text that names what was compared."""

    @property
    def word(self) -> str:
        """One of the keys of REASONS."""
        return "learned" if self.low > 0 else "got worse" if self.high < 0 else "no difference shown"

    @property
    def text(self) -> str:
        """The word with its numbers."""
        return (
            f"{self.word}: {self.metric} {self.before:.4g} -> {self.after:.4g}, difference "
            f"{self.after - self.before:+.4g} (95 %: {self.low:+.4g} to {self.high:+.4g}; {self.basis})"
        )

    @property
    def line(self) -> str:
        """The text for the log: a warning with likely reasons unless the run learned."""
        reason = REASONS[self.word]
        if self.high >= 0 and self.metric == "eval/accuracy" and self.before > SOLVED:
            reason = reason and "the task was solved at the start. Take harder prompts"
        return f"warning: {self.text}. Likely reason: {reason}." if reason else self.text


def verdict(records: Iterable[Mapping[str, object]]) -> Verdict | None:
    """Return the verdict on a run with these records; None if they are too few.

    The last evaluation is compared with one before the first step, by eval/accuracy or, without it, by eval/reward.
    With neither, the rewards of the first and last 10 rollout batches, or of both halves of the run, are (Welch).
    """
    records = list(records)
    for metric, size in (("eval/accuracy", "eval/prompts"), ("eval/reward", "eval/reward_half_width")):
        found = [(record["step"], numbers) for record in records if (numbers := _numbers(record, metric, size))]
        if found and found[0][0] == 0 != found[-1][0]:
            (before, size_before), (after, size_after) = found[0][1], found[-1][1]
            half = math.hypot(size_before, size_after)
            interval = (after - before - half, after - before + half)
            basis = "held-out prompts"
            if metric == "eval/accuracy":
                interval = interval_of_difference(before, size_before, after, size_after)
                basis = f"{size_after:.0f} held-out prompts"
            return Verdict(metric, before, after, *interval, basis)
    rewards = [numbers[0] for record in records if (numbers := _numbers(record, "reward/mean"))]
    length = min(10, len(rewards) // 2)
    if length < 2:
        return None
    before, after = fmean(rewards[:length]), fmean(rewards[-length:])
    squares = [variance(values) / length for values in (rewards[:length], rewards[-length:])]
    # Welch-Satterthwaite: the two samples have the same size, and each its own variance.
    degrees = (length - 1) * sum(squares) ** 2 / (sum(square**2 for square in squares) or 1.0)
    half = student_t(max(1.0, degrees)) * math.sqrt(sum(squares))
    basis = f"first and last {length} of {len(rewards)} rollout batches"
    return Verdict("reward/mean", before, after, after - before - half, after - before + half, basis)


class _Batches:
    """A metric and the reward of the rollout batches so far, with the best windows of the metric."""

    def __init__(self) -> None:
        self._values: list[tuple[float, float, int]] = []
        """Metric, reward and step."""
        self._squares = 0.0
        """Sum of squared differences of neighbouring batches, to which slow changes add little."""
        self._best: dict[int, int] = {}
        """Start of the best window by its length; it does not overlap the last window."""

    def add(self, name: str, step: int, value: float, reward: float) -> str | None:
        """Return an alarm if the mean of the last window is below that of the best one by more than the noise."""
        self._squares += (value - self._values[-1][0]) ** 2 if self._values else 0.0
        self._values.append((value, reward, step))
        end = len(self._values)
        for length in (length for length in WINDOWS if 2 * length <= end):
            start = end - 2 * length
            best = max(self._best.get(length, start), start, key=lambda at: self._means(at, length))
            self._best[length] = best
            # The mean square is twice a batch's variance, with about 2/3 of the degrees of freedom. Each of `end`
            # batches so far has compared its window with as many as end / length that do not overlap.
            limit = student_t(2 * (end - 1) / 3, NormalDist().inv_cdf(1 - FALSE_ALARM * length / end**2))
            noise = math.sqrt(self._squares / (end - 1) / length)
            before, after = self._means(best, length), self._means(end - length, length)
            if before[0] - after[0] > limit * noise and (
                alarm := _alarm(name, before, after, self._values[best + length - 1][2], step)
            ):
                return alarm
        return None

    def _means(self, start: int, length: int) -> tuple[float, float]:
        window = self._values[start : start + length]
        return fmean(value for value, _, _ in window), fmean(reward for _, reward, _ in window)


class OverOptimization:
    """Alarm for a reward that rises while its aim falls (arXiv 2210.10760).

    The aim is the accuracy, in training or on held-out prompts, or a part of the reward with a weight of 0. A window of
    rollout batches, or an evaluation, is compared with the best before it.
    """

    def __init__(
        self, parts: Sequence[str], weights: Sequence[float] | None, earlier: Iterable[Mapping[str, object]] = ()
    ) -> None:
        """Watch a run with these `rl.reward.parts` and `rl.reward.weights`, after the records of `earlier` starts."""
        names = [f"reward/part/{part}" for part, weight in zip(parts, weights or (), strict=False) if not weight]
        self._batches = {name: _Batches() for name in ("reward/accuracy", *names)}
        self._rewards: list[float] = []
        self._evaluations: list[tuple[float, float, int, int]] = []
        """Accuracy, number of prompts, step, number of rollout batches before."""
        for record in earlier:
            self.of_record(record)

    def of_record(self, record: Mapping[str, object]) -> str | None:
        """Take the next record of metrics.jsonl; return the alarm if there is a reason for it now."""
        step, alarms = int(str(record["step"])), []
        self._rewards += _numbers(record, "reward/mean") or ()
        for name, batches in self._batches.items():
            if numbers := _numbers(record, name, "reward/mean"):
                alarms.append(batches.add(name, step, *numbers))
        if numbers := _numbers(record, "eval/accuracy", "eval/prompts"):
            alarms.append(self._of_evaluation(step, *numbers))
        return next(filter(None, alarms), None)

    def _of_evaluation(self, step: int, accuracy: float, prompts: float) -> str | None:
        best, num_best, best_step, first = max(self._evaluations, default=(accuracy, prompts, step, 0))
        self._evaluations.append((accuracy, prompts, step, len(self._rewards)))
        z = NormalDist().inv_cdf(1 - FALSE_ALARM / len(self._evaluations) ** 2)
        rewards = self._rewards[first:]
        length = min(WINDOWS[0], len(rewards) // 2)
        if not length or interval_of_difference(best, num_best, accuracy, prompts, z)[1] >= 0:
            return None
        before, after = (best, fmean(rewards[:length])), (accuracy, fmean(rewards[-length:]))
        return _alarm("eval/accuracy", before, after, best_step, step)


def _alarm(name: str, before: tuple[float, float], after: tuple[float, float], best_step: int, step: int) -> str | None:
    """Return the alarm for two means of metric and reward; None if the fall is small or the reward did not rise."""
    if before[0] - after[0] <= LEAST_FALL * abs(before[0]) or after[1] <= before[1]:
        return None
    return (
        f"warning: the reward is over-optimised: from step {best_step} to {step} reward/mean rose from {before[1]:.4g} "
        f"to {after[1]:.4g} while {name} fell from {before[0]:.4g} to {after[0]:.4g}. Read samples/ in the run's "
        f"folder. Go on from a checkpoint of step {best_step} or before, with a larger rl.loss.kl_coeff"
    )


def _numbers(record: Mapping[str, object], *names: str) -> tuple[float, ...]:
    """Return these metrics of a record, empty unless it has all of them as finite numbers."""
    values = [value for name in names if isinstance(value := record.get(name), int | float) and math.isfinite(value)]
    return tuple(map(float, values)) if len(values) == len(names) else ()
