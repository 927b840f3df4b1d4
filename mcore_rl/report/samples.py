"""Sampled completions at the start and the end of a run, with their rewards."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mcore_rl.errors import escaped

MAX_GROUPS, MAX_COMPLETIONS, MAX_CHARACTERS = 4, 8, 2000


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of a file of samples, as rl/rollouts/samples.py writes it."""

    step: int
    problem: str
    prompt: str
    answer: str | None
    completion: str
    reward: float | None
    tokens: int
    finish: str
    reasons: dict[str, str] = field(default_factory=dict)


_SAMPLE = TypeAdapter(_Sample)


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion with its reward."""

    text: str
    reward: float | None
    """Reward; None where a score failed."""
    reason: str
    """Remarks of the reward's parts; empty where there are none."""
    tokens: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A prompt with its completions, best first."""

    prompt: str
    answer: str
    completions: tuple[SampledCompletion, ...]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Samples of one step: some prompts, and the mean reward of all of them."""

    step: int
    mean: float | None
    """Mean over the samples that have a reward; None where none has."""
    groups: tuple[SampleGroup, ...]


def before_and_after(run_dir: Path) -> list[SampledStep]:
    """Return the first and the last samples of a run, for the same prompts where there are such."""
    files = sorted((run_dir / "samples").glob("step_*.jsonl"))
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    read = [table for path in chosen if (table := _read(path))]
    if not read:
        return []
    common = [problem for problem in read[0] if all(problem in table for table in read)]
    return [_sampled(table, common) for table in read]


def _read(path: Path) -> dict[str, list[_Sample]]:
    """Return problem -> samples in the order of the file; lines that are torn or damaged are left out."""
    groups: dict[str, list[_Sample]] = {}
    for line in path.read_bytes().splitlines():
        with suppress(ValidationError):
            sample = _SAMPLE.validate_json(line)
            groups.setdefault(sample.problem, []).append(sample)
    return groups


def _sampled(table: Mapping[str, Sequence[_Sample]], common: Sequence[str]) -> SampledStep:
    every = [sample for samples in table.values() for sample in samples]
    shown = list(common or table)[:MAX_GROUPS]
    rewards = [sample.reward for sample in every if sample.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return SampledStep(every[0].step, mean, tuple(_group(table[problem]) for problem in shown))


def _group(samples: Sequence[_Sample]) -> SampleGroup:
    best_first = sorted(samples, key=lambda sample: (sample.reward is None, -(sample.reward or 0.0)))
    completions = tuple(
        SampledCompletion(
            text=shortened(sample.completion),
            reward=sample.reward,
            reason=shortened("; ".join(sample.reasons.values())),
            tokens=sample.tokens,
            is_truncated=sample.finish == "length",
        )
        for sample in best_first[:MAX_COMPLETIONS]
    )
    first = samples[0]
    return SampleGroup(shortened(first.prompt), shortened(first.answer or ""), completions)


def shortened(text: str) -> str:
    """Return at most MAX_CHARACTERS of a text, control characters escaped, and the number of characters left out."""
    text = escaped(text)
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]} … ({left_out} characters more)"
