"""Failed scores: how they are reported, and when they end a run."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import TrainingError
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.workers.failure import FailedScore, cut

FILE_NAME = "reward_failures.jsonl"
"""File in the run folder that records the first failure of each kind."""
SHOWN = 1000
"""Maximum number of characters of a prompt, completion or answer in a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedPart:
    """A reward part that returned no number for one completion."""

    part: str
    problem_id: str
    failure: FailedScore
    scored: RewardInput
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
        """Create the report.

        Args:
            message: function that logs a message.
            folder: folder of the file FILE_NAME; None: no file is written.
        """
        self._message = message
        self._folder = folder
        self._reported: set[tuple[str, str, str]] = set()

    def add(self, failures: Sequence[FailedPart]) -> None:
        """Report failures of kinds not seen before."""
        for failed in first_of_each_kind(failures):
            if failed.kind in self._reported:
                continue
            self._reported.add(failed.kind)
            if self._folder is not None:
                self._append(failed, self._folder / FILE_NAME)
            self._message(
                f"warning: reward {failed.describe()}\n  (later failures of this kind are only counted)"
            )

    def _append(self, failed: FailedPart, path: Path) -> None:
        failure = failed.failure
        line = {
            "time": time.time(),
            "part": failed.part,
            "kind": failure.kind,
            "error": failure.text,
            "traceback": failure.traceback,
            "problem": failed.problem_id,
            **failed.sample(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def refuse_failing_parts(
    num_failed: Mapping[str, int],
    num_scores: int,
    failures: Sequence[FailedPart],
    max_failed_fraction: float,
) -> None:
    """Raise a TrainingError for the part that fails most often, if it exceeds the allowed fraction of failures.

    Args:
        num_failed: number of failed scores by part, for the parts that training depends on.
        num_scores: number of scores per part.
        failures: at least the first failure of each part.
        max_failed_fraction: `rl.reward.max_failed_fraction`.
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
