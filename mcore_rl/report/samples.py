"""Sampled completions: at the start and the end of a run with what has changed, and the last ones token by token."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from mcore_rl.errors import escaped

MAX_GROUPS, MAX_COMPLETIONS, MAX_CHARACTERS = 4, 8, 2000
MAX_TOKENS = 400
"""Tokens of a completion that are shown one by one."""
WORD = re.compile(r"^\s+|\w+\s*|[^\w\s]\s*")
SHADES = (0.01, 0.1, 0.5)
"""Absolute log ratios from which a token has the first, second and third shade."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of a file of samples, as rl/rollouts/evaluation.py writes it."""

    step: int
    problem: str
    prompt: str
    answer: str | None
    completion: str
    reward: float | None
    tokens: int
    finish: str
    reasons: dict[str, str] = field(default_factory=dict)
    advantage: float | None = None
    pieces: list[str] = field(default_factory=list)
    log_ratios: list[float | None] = field(default_factory=list)
    changed_routes: dict[str, list[int]] = field(default_factory=dict)


_SAMPLE = TypeAdapter(_Sample)
_Table: TypeAlias = Mapping[str, Sequence[_Sample]]
"""Problem -> its samples."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of a completion."""

    text: str
    shade: str
    """Class of its colour, `up1` to `up3` and `down1` to `down3`; empty for a ratio near 1 or without a ratio."""
    has_changed_routes: bool
    title: str


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion with its reward."""

    parts: tuple[tuple[str, str], ...]
    """Text in parts, each with its kind: "same", "gone" (not in the completion after) or "new" (not in that before)."""
    reward: float | None
    reason: str
    """Remarks of the reward's parts; empty where there are none."""
    tokens: int
    is_truncated: bool
    advantage: float | None = None
    shown: tuple[ShownToken, ...] = ()
    """First tokens, where the run has recorded them."""

    @property
    def text(self) -> str:
        """The completion, shortened."""
        return "".join(text for _, text in self.parts)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A prompt with its completions, best first."""

    prompt: str
    answer: str
    completions: tuple[SampledCompletion, ...]
    kind: str = ""
    """Place of the prompt among all: "best" and "worst" after the training, "most changed" by it; empty: none."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Samples of one step: some prompts, and the mean reward of all of them."""

    step: int
    mean: float | None
    """Mean over the samples that have a reward; None where none has."""
    groups: tuple[SampleGroup, ...]


def before_and_after(run_dir: Path) -> list[SampledStep]:
    """Return the first and last samples of a run for the same prompts: held-out ones, else those of rollouts."""
    folder = run_dir / "samples"
    files = sorted(folder.glob("eval_*.jsonl")) or sorted(folder.glob("step_*.jsonl"))
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    read = [table for path in chosen if (table := _read(path))]
    if not read:
        return []
    common = [problem for problem in read[0] if all(problem in table for table in read)]
    if len(read) < 2 or not common:
        return [_sampled(table, dict.fromkeys(table, "")) for table in read]
    kinds = _kinds(read[0], read[1], common)
    before, after = (_sampled(table, kinds) for table in read)
    both: tuple[list[SampleGroup], list[SampleGroup]] = ([], [])
    for old, new in zip(before.groups, after.groups, strict=True):
        pairs = [word_diff(a.text, b.text) for a, b in zip(old.completions, new.completions, strict=False)]
        for side, (groups, group) in enumerate(zip(both, (old, new), strict=True)):
            marked = [replace(one, parts=parts[side]) for one, parts in zip(group.completions, pairs, strict=False)]
            rest = group.completions[len(marked) :]
            groups.append(replace(group, completions=(*marked, *rest)))
    return [replace(before, groups=tuple(both[0])), replace(after, groups=tuple(both[1]))]


def _kinds(before: _Table, after: _Table, common: Sequence[str]) -> dict[str, str]:
    """Return the problems of `common` in the order of the page, first those to look at first, with their kind."""

    def reward(table: _Table, problem: str) -> float:
        return fmean([sample.reward or 0.0 for sample in table[problem]])

    def change(problem: str) -> tuple[float, float]:
        old, new = (
            "\n".join(sorted(one.completion for one in table[problem]))[:MAX_CHARACTERS] for table in (before, after)
        )
        likeness = SequenceMatcher(None, old, new, autojunk=False).quick_ratio()
        return abs(reward(after, problem) - reward(before, problem)), -likeness

    kinds: dict[str, str] = {}
    for kind, key in (
        ("best", lambda problem: reward(after, problem)),
        ("worst", lambda problem: -reward(after, problem)),
        ("most changed", change),
    ):
        if left := [problem for problem in common if problem not in kinds]:
            kinds[max(left, key=key)] = kind
    return kinds | {problem: "" for problem in common if problem not in kinds}


def last_traced(run_dir: Path) -> SampledStep | None:
    """Return the newest samples with recorded tokens, groups without them left out; None where there are none."""
    files = sorted((run_dir / "samples").glob("step_*.jsonl"))
    for path in files[:-3:-1]:  # a run adds the tokens to its newest file after the updates
        table = _read(path)
        traced = [problem for problem, samples in table.items() if any(sample.pieces for sample in samples)]
        if traced:
            return _sampled(table, dict.fromkeys(traced, ""))
    return None


def word_diff(before: str, after: str) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return both texts in parts (kind, text): "same" in both, "gone" in `before` alone, "new" in `after` alone."""
    old, new = WORD.findall(before), WORD.findall(after)
    sides: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for tag, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for side, kind, words in zip(sides, ("gone", "new"), (old[i:j], new[k:m]), strict=True):
            if words:
                side.append(("same" if tag == "equal" else kind, "".join(words)))
    return tuple(sides[0]), tuple(sides[1])


def _read(path: Path) -> dict[str, list[_Sample]]:
    groups: dict[str, list[_Sample]] = {}
    for line in path.read_bytes().splitlines():
        with suppress(ValidationError):
            sample = _SAMPLE.validate_json(line)
            groups.setdefault(sample.problem, []).append(sample)
    return groups


def _sampled(table: _Table, kinds: Mapping[str, str]) -> SampledStep:
    every = [sample for samples in table.values() for sample in samples]
    rewards = [sample.reward for sample in every if sample.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return SampledStep(
        every[0].step, mean, tuple(_group(table[problem], kind) for problem, kind in islice(kinds.items(), MAX_GROUPS))
    )


def _group(samples: Sequence[_Sample], kind: str) -> SampleGroup:
    best_first = sorted(samples, key=lambda sample: (sample.reward is None, -(sample.reward or 0.0)))
    completions = tuple(
        SampledCompletion(
            parts=(("same", shortened(sample.completion)),),
            reward=sample.reward,
            reason=shortened("; ".join(sample.reasons.values())),
            tokens=sample.tokens,
            is_truncated=sample.finish == "length",
            advantage=sample.advantage,
            shown=tuple(_token(sample, index) for index in range(len(sample.pieces[:MAX_TOKENS]))),
        )
        for sample in best_first[:MAX_COMPLETIONS]
    )
    first = samples[0]
    return SampleGroup(shortened(first.prompt), shortened(first.answer or ""), completions, kind)


def _token(sample: _Sample, index: int) -> ShownToken:
    log_ratio = sample.log_ratios[index] if index < len(sample.log_ratios) else None
    changed = [name for name, indices in sample.changed_routes.items() if index in indices]
    level = 0 if log_ratio is None else sum(abs(log_ratio) >= least for least in SHADES)
    ratio = "not trained" if log_ratio is None else f"ratio {math.exp(min(log_ratio, 100.0)):.3g}"
    return ShownToken(
        text=escaped(sample.pieces[index]),
        shade=f"{'up' if (log_ratio or 0.0) > 0 else 'down'}{level}" if level else "",
        has_changed_routes=bool(changed),
        title="; ".join([ratio, *(f"changed: {name}" for name in changed)]),
    )


def shortened(text: str) -> str:
    """Return at most MAX_CHARACTERS of a text, control characters escaped, and the number of characters left out."""
    text = escaped(text)
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]} … ({left_out} characters more)"
