"""Rewards of groups of completions: the weighted sum of the parts in the config, failed scores, and the trial."""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.rollout import ENVIRONMENT_PART, RewardConfig
from mcore_rl.errors import TrainingError
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.rewards import interface
from mcore_rl.rl.rewards.rules import RULES
from mcore_rl.rl.types import Completion, Group, Problem, Prompt, single_version
from mcore_rl.rl.workers import FailedScore, cut
from mcore_rl.storage.files import checkpoint_errors_explained

FILE_NAME = "reward_failures.jsonl"
"""File in the run folder that records the first failure of each kind."""
SHOWN = 1000
"""Maximum number of characters of a prompt, completion or answer in a report."""


ROUNDING = 1e-12
"""Relative difference below which float64 sums count as equal: their last bits depend on the order of summation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedPart:
    """A reward part that returned no number for one completion."""

    part: str
    problem_id: str
    failure: FailedScore
    scored: interface.RewardInput
    """Input of the part that failed."""

    @property
    def kind(self) -> tuple[str, str, str]:
        """Key that failures of one kind share: the part, how it failed, and the exception class."""
        return self.part, self.failure.kind, self.failure.error

    def sample(self) -> dict[str, str]:
        """Return the prompt, completion and answer, each shortened."""
        scored = self.scored
        texts = {"prompt": scored.prompt, "completion": scored.completion, "answer": scored.answer}
        return {name: cut(text, SHOWN) for name, text in texts.items()}

    def describe(self) -> str:
        """Return a description of several lines: the failure, its traceback and its sample."""
        sample = "\n".join(f"  {name}: {text!r}" for name, text in self.sample().items())
        trace = f"\n{self.failure.traceback.rstrip()}" if self.failure.traceback else ""
        how = "raised " if self.failure.kind == "raised" else f"failed ({self.failure.kind}): "
        return f'part "{self.part}" {how}{self.failure.text}{trace}\n  of {self.problem_id}:\n{sample}'


def first_of_each_kind(failures: Sequence[FailedPart]) -> Iterator[FailedPart]:
    """Yield the first failure of each kind, in order."""
    kinds = set()
    for failed in failures:
        if failed.kind not in kinds:
            kinds.add(failed.kind)
            yield failed


class FailureReport:
    """Reports the first failure of each kind since this object was created, in a file and as a log message."""

    def __init__(self, message: Callable[[str], None], folder: Path | None) -> None:
        """Log through `message`, and write FILE_NAME in `folder` unless it is None."""
        self._message, self._folder = message, folder
        self._reported: set[tuple[str, str, str]] = set()

    def add(self, failures: Sequence[FailedPart]) -> None:
        """Report failures of kinds not seen before."""
        for failed in first_of_each_kind(failures):
            if failed.kind in self._reported:
                continue
            self._reported.add(failed.kind)
            if self._folder is not None:
                line = {
                    "time": time.time(),
                    "part": failed.part,
                    "kind": failed.failure.kind,
                    "error": failed.failure.text,
                    "traceback": failed.failure.traceback,
                    "problem": failed.problem_id,
                    **failed.sample(),
                }
                path = self._folder / FILE_NAME
                with (
                    checkpoint_errors_explained(path, "writing"),
                    path.open("a", encoding="utf-8", errors="replace") as file,
                ):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._message(f"warning: reward {failed.describe()}\n  (later failures of this kind are only counted)")


def refuse_failing_parts(
    num_failed: Mapping[str, int], num_scores: int, failures: Sequence[FailedPart], max_failed_fraction: float
) -> None:
    """Raise a TrainingError for the part that fails most often, if it exceeds the allowed fraction of its `num_scores`.
    `num_failed` has the parts that training depends on; `failures` has at least the first of each part.
    """
    if not num_failed or not num_scores:
        return
    part = max(num_failed, key=num_failed.__getitem__)
    if num_failed[part] / num_scores > max_failed_fraction:
        limit = f"of this batch, more than rl.reward.max_failed_fraction={max_failed_fraction:g} allows"
        raise failing_part(num_failed, num_scores, failures, limit)


def failing_part(
    num_failed: Mapping[str, int], num_scores: int, failures: Sequence[FailedPart], where: str
) -> TrainingError:
    """Return the error for the part that fails most often; `where` completes the sentence that gives the count."""
    part = max(num_failed, key=num_failed.__getitem__)
    first = next(failed for failed in failures if failed.part == part)
    return TrainingError(
        f'rl.reward.parts "{part}" failed for {num_failed[part]} of {num_scores} completions {where}: '
        f"{first.failure.text}\nThe first one: {first.describe()}\nCorrect the function (try it with `mcore-rl reward "
        "CONFIG --sample 4`), or set rl.reward.max_failed_fraction=1 to go on whatever fails."
    )


LOADED_PARTS = {
    "math": "mcore_rl.rl.rewards.mathematics:math_function",
    "code": "mcore_rl.rl.rewards.sandbox:code_function",
}
"""Function that makes each part's reward function; its module is imported only for a config that names the part."""
SERVED_PARTS = "mcore_rl.rl.rewards.served:served_parts"
ANSWER_PARTS = ("exact", "positions", "numeric", "math")
"""Parts that compare a completion with the prompt's reference answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Rewards of the groups, with the values of their parts."""

    rewards_PG: Tensor
    """Weighted sum of each completion's parts, float64. NaN (no reward) if a part with a nonzero weight failed and
    rl.reward.error_value is none."""
    parts: dict[str, Tensor]
    """Unweighted values `[P, G]` of each part, NaN where the part failed or does not apply; `overlong` is the length
    penalty."""
    steps_PG: list[list[tuple[interface.TextStep, ...]]]
    """Weighted steps of each completion; steps with the same end are summed over the parts. A plain number, and the
    length penalty, are a step that ends with the text. The environment's part counts as 0, because each of its turns
    is a separate step: together with these, a completion's steps add up to its reward. Empty without a reward."""
    reasons_PG: list[list[dict[str, str]]]
    """Reasons that the parts gave for their score of each completion, by part."""
    failures: tuple[FailedPart, ...]
    """Failed parts, in the order of the completions."""
    correct_part: str | None
    """Part that decides whether a completion is correct; None: no part decides."""

    @property
    def correct_PG(self) -> Tensor | None:
        """1 for a correct completion, else 0; NaN where the deciding part has no value. None if no part decides."""
        if self.correct_part is None:
            return None
        values_PG = self.parts[self.correct_part]
        # Ten steps or parts of 0.1 do not add up to exactly 1.
        return (values_PG >= 1 - ROUNDING).double().masked_fill(values_PG.isnan(), torch.nan)

    def leave_out(self, is_out_PG: Sequence[Sequence[bool]]) -> None:
        """Take the rewards and steps of completions away, as if a part had failed."""
        self.rewards_PG[torch.tensor(is_out_PG, dtype=torch.bool)] = torch.nan
        for steps_G, is_out_G in zip(self.steps_PG, is_out_PG, strict=True):
            steps_G[:] = [() if is_out else steps for steps, is_out in zip(steps_G, is_out_G, strict=True)]

    def metrics(self) -> Iterator[Metric]:
        """Yield this rank's metrics of rewards, parts, accuracy and errors. Means ignore NaN."""
        yield from _mean("reward/mean", self.rewards_PG)
        for name, values_PG in self.parts.items():
            yield from _mean(f"reward/part/{name}", values_PG)
        if self.correct_PG is not None:
            yield from _mean("reward/accuracy", self.correct_PG)
        for kind, count_of_kind in Counter(failed.failure.kind for failed in self.failures).items():
            yield Metric(f"reward/errors_{kind}", count_of_kind)
        yield Metric("reward/errors", len(self.failures))
        yield Metric("reward/unscored_completions", self.rewards_PG.isnan().sum())


def _mean(name: str, values_PG: Tensor) -> Iterator[Metric]:
    if num_values := int((~values_PG.isnan()).sum()):
        yield Metric(name, values_PG.nansum(), num_values)


class ServedPart(Protocol):
    """A reward part that a server scores."""

    def outcomes(self, inputs: Sequence[interface.RewardInput]) -> list[interface.Outcome]:
        """Return the outcome of each completion. A missing answer is a failed score, not an exception."""


class Reward:
    """Scores completions in worker processes. Close it, or use it as a context manager."""

    def __init__(self, config: RewardConfig, *, max_new_tokens: int) -> None:
        """Start the worker processes; `max_new_tokens` is a completion's maximum length, for the length penalty."""
        self._config, self._max_new_tokens = config, max_new_tokens
        self._weights = config.weights or (1.0,) * len(config.parts)
        self._served: Mapping[str, ServedPart] = {}
        if config.served_parts:
            self._served = load_extension("rl.reward.parts", SERVED_PARTS)(config)
        others = (*config.model_parts, *self._served, ENVIRONMENT_PART)
        self._functions = [name for name in config.parts if name not in others]
        # Modules are imported before the processes are forked, so that an import error is raised in this process.
        functions = [part_function(name, config) for name in self._functions]
        self._workers = interface.RewardWorkers(
            functions, workers=config.workers, timeout_s=config.timeout_s, max_memory_gib=config.max_memory_gib
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def __call__(
        self, groups: Sequence[Group], of_models: Mapping[str, Sequence[interface.Outcome]] | None = None
    ) -> Scores:
        """Return the rewards of all completions, in groups of equal size. `of_models` has, for each part that is a
        reward model, each completion's outcome, in order.
        """
        names = self._config.parts
        pairs = [(group.prompt.problem, completion) for group in groups for completion in group.completions]
        inputs = [_reward_input(problem, completion) for problem, completion in pairs]
        jobs = [interface.Job(function, scored) for scored in inputs for function in range(len(self._functions))]
        of_functions: Iterator[interface.Outcome] = iter(self._workers.run(jobs))
        of_servers = {name: part.outcomes(inputs) for name, part in self._served.items()}
        of_others = {**(of_models or {}), **of_servers}

        def outcome_of(name: str, index: int) -> interface.Outcome:
            if name in self._functions:
                return next(of_functions)
            if name == ENVIRONMENT_PART:
                episode = pairs[index][1].episode
                assert episode is not None, "a part of the reward is the environment's, and there was none"
                return interface.Score(episode.reward) if episode.failure is None else episode.failure
            return of_others[name][index]

        scores: list[interface.Score] = []
        failures: list[FailedPart] = []
        value = torch.nan if self._config.error_value is None else self._config.error_value
        for index, ((problem, _), scored) in enumerate(zip(pairs, inputs, strict=True)):
            outcomes = _with_an_applying_part([outcome_of(name, index) for name in names], self._weights)
            for part, outcome in zip(names, outcomes, strict=True):
                if isinstance(outcome, FailedScore):
                    failed = FailedPart(part=part, problem_id=problem.problem_id, failure=outcome, scored=scored)
                    failures.append(failed)
                    scores.append(interface.Score(value))
                else:
                    scores.append(outcome)
        values = [score.value for score in scores]
        values_PGR = torch.tensor(values, dtype=torch.float64).view(len(groups), -1, len(names))
        parts = dict(zip(names, values_PGR.unbind(2), strict=True))
        # A failed part makes the sum NaN unless its weight is 0, in which case it is only reported. A part that does
        # not apply is left out.
        applies_PGR = torch.tensor([score.applies for score in scores]).view_as(values_PGR)
        summed_PGR = values_PGR.where(applies_PGR, 0.0)
        # Summed part by part: a matrix product adds up its last rows in a different order, so the rewards of equal
        # completions could differ in the last bit, which their group would learn from.
        rewards_PG = torch.zeros(values_PGR.shape[:2], dtype=torch.float64)
        for values_PG, weight in zip(summed_PGR.unbind(2), self._weights, strict=True):
            if weight:
                rewards_PG = rewards_PG + weight * values_PG
        if self._config.overlong_buffer_tokens:
            parts["overlong"] = self._overlong(groups)
            rewards_PG = rewards_PG + parts["overlong"]
        return Scores(
            rewards_PG=rewards_PG,
            parts=parts,
            steps_PG=self._steps(groups, scores, parts.get("overlong")),
            reasons_PG=_reasons(groups, names, scores),
            failures=tuple(failures),
            correct_part=self._config.correct_part,
        )

    def _steps(
        self, groups: Sequence[Group], scores: Sequence[interface.Score], overlong_PG: Tensor | None
    ) -> list[list[tuple[interface.TextStep, ...]]]:
        of_parts = iter(scores)
        steps_PG: list[list[tuple[interface.TextStep, ...]]] = []
        for p, group in enumerate(groups):
            steps_PG.append([])
            for g, completion in enumerate(group.completions):
                whole = len(completion.text)
                values: defaultdict[int, float] = defaultdict(float)
                for name, weight in zip(self._config.parts, self._weights, strict=True):
                    score = next(of_parts)
                    if not score.applies:
                        continue
                    plain = interface.TextStep(whole, score.value)
                    if name == ENVIRONMENT_PART and completion.episode and not completion.episode.failure:
                        plain = interface.TextStep(whole, 0.0)  # each of its turns is a separate step
                    for step in (plain,) if score.steps is None else score.steps:
                        values[step.end] += weight * step.value if weight else 0.0
                if overlong_PG is not None:
                    values[whole] += overlong_PG[p, g].item()
                steps = tuple(interface.TextStep(end, values[end]) for end in sorted(values))
                steps_PG[-1].append(() if any(math.isnan(step.value) for step in steps) else steps)
        return steps_PG

    def _overlong(self, groups: Sequence[Group]) -> Tensor:
        # An environment's tokens count too: they use up the token budget that all turns share.
        lengths = [[len(completion.tokens_T) for completion in group.completions] for group in groups]
        return overlong_penalty(
            torch.tensor(lengths, dtype=torch.float64),
            max_tokens=self._max_new_tokens,
            buffer_tokens=self._config.overlong_buffer_tokens or 0,
            penalty=self._config.overlong_penalty,
        )


def _with_an_applying_part(outcomes: Sequence[interface.Outcome], weights: Sequence[float]) -> list[interface.Outcome]:
    """Return a completion's outcomes; if no part with a weight applies, mark the first such part as failed: an empty
    sum is not a reward, and this catches a function without a return statement.
    """
    found = list(outcomes)
    weighted = [index for index, weight in enumerate(weights) if weight]
    if weighted and not any(isinstance(outcome := found[r], FailedScore) or outcome.applies for r in weighted):
        text = f"returned None (does not apply), as did every other part with a weight; {interface.SCORE_FORMS}"
        found[weighted[0]] = FailedScore("bad_reply", text)
    return found


def part_function(name: str, config: RewardConfig) -> interface.RewardFunction:
    """Return the reward function of a part, with its settings from the config; a user-defined function is imported."""
    if name in RULES:
        return RULES[name](config)
    function: Any = load_extension("rl.reward.parts", LOADED_PARTS.get(name, name))
    made: interface.RewardFunction = function(config) if name in LOADED_PARTS else function
    return made


def _reasons(
    groups: Sequence[Group], names: Sequence[str], scores: Sequence[interface.Score]
) -> list[list[dict[str, str]]]:
    of_parts = iter(scores)
    return [
        [{name: score.reason for name in names if (score := next(of_parts)).reason} for _ in group.completions]
        for group in groups
    ]


def _reward_input(problem: Problem, completion: Completion) -> interface.RewardInput:
    return interface.RewardInput(
        prompt=problem.prompt,
        completion=completion.text,
        answer=problem.answer,
        num_tokens=completion.num_sampled,
        is_truncated=completion.is_truncated,
        fields=problem.fields,
        messages=() if completion.episode is None else completion.episode.messages,
    )


ANSWER = "{answer}"
"""Placeholder of the reference answer in the template of a trial completion."""
NO_ANSWER = "no reference answer"
"""Answer used for a prompt without a reference answer."""
TRIED_AT_START = 2
"""Number of prompts in the trial before a training run starts."""


def trial_groups(prompts: Sequence[Prompt], encode: Callable[[str], list[int]], template: str = ANSWER) -> list[Group]:
    """Return two completions per prompt: `template` with its own reference answer, and with the next prompt's."""
    groups = []
    for index, prompt in enumerate(prompts):
        other = prompts[(index + 1) % len(prompts)]
        answers = [source.problem.answer or NO_ANSWER for source in (prompt, other)]
        texts = [template.replace(ANSWER, answer) for answer in answers]
        completions = tuple(
            Completion(
                text=text,
                tokens_T=tuple(tokens),
                logprobs_T=(0.0,) * len(tokens),
                versions=single_version(0, len(tokens)),
                finish="stop",
            )
            for text, tokens in zip(texts, map(encode, texts), strict=True)
        )
        groups.append(Group(prompt=prompt, completions=completions))
    return groups


def try_reward(
    config: RewardConfig, max_new_tokens: int, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]
) -> tuple[FailedPart, ...]:
    """Score the reference answers of `prompts`, so that a reward function that always fails is found before the start,
    and return the failed scores. Reward models and the environment are left out. Raises TrainingError as
    `refuse_failing_trial` does.
    """
    functions = config.scored_by_functions
    if functions is None:
        return ()
    with Reward(functions, max_new_tokens=max_new_tokens) as reward:
        scores = reward(trial_groups(prompts, encode))
    refuse_failing_trial(scores, functions)
    return scores.failures


def refuse_failing_trial(scores: Scores, config: RewardConfig) -> None:
    """Raise a TrainingError for a part if all its scores failed, unless rl.reward.max_failed_fraction=1; a reward
    server or judge that gives no score before the start is always an error.
    """
    num_failed = Counter(failed.part for failed in scores.failures)
    num_scores = scores.rewards_PG.numel()
    for part in config.served_parts:
        if num_failed[part] == num_scores:
            first = next(failed for failed in scores.failures if failed.part == part)
            raise TrainingError(
                f'rl.reward.parts "{part}" gave no score for any of {num_scores} reference answers, before the start: '
                f"{first.failure.text}. Start the server, or correct the address, the key or the template."
            )
    if config.max_failed_fraction < 1 and max(num_failed.values(), default=0) == num_scores:
        raise failing_part(num_failed, num_scores, scores.failures, "of a trial on reference answers, before the start")


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Return the penalty to add to each reward: 0 up to max - buffer tokens, then falling linearly to -penalty at max
    tokens (DAPO, arXiv 2503.14476).
    """
    excess_N = lengths_N - (max_tokens - buffer_tokens)
    return -penalty * (excess_N / buffer_tokens).clamp(0.0, 1.0)


class Moments(NamedTuple):
    """Moments of a quantity over all tokens of the world."""

    num_values: int
    mean: float
    squares: float
    """Sum of squared differences from the mean."""

    @property
    def size(self) -> float:
        """Root mean square of the values."""
        return math.hypot(self.mean, self.std(0))

    def are_equal(self, size: float) -> bool:
        """Return whether the values are equal up to the rounding of sums of numbers of magnitude `size`."""
        return self.squares <= self.num_values * (ROUNDING * size) ** 2

    def std(self, ddof: int) -> float:
        """Return the standard deviation; 0 for fewer than 1 + ddof values."""
        return (self.squares / (self.num_values - ddof)) ** 0.5 if self.num_values > ddof else 0.0
