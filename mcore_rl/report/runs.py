"""Reading of a run from its folder, for the report; nothing is written there."""

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mcore_rl.errors import DataError
from mcore_rl.metrics.attempts_file import RunAttempt, read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.storage.files import run_errors_explained

Stage = Literal["pretrain", "sft", "rm", "dpo", "rl"]
STAGES: dict[Stage, str] = {
    "pretrain": "Pretraining",
    "sft": "Fine-tuning",
    "rm": "Reward model",
    "dpo": "Preference optimisation",
    "rl": "Reinforcement learning",
}
EVALUATION = "evaluation.json"
"""File in a run's folder for the output of `mcore-rl eval`, which a user may put there."""
JOB_ATTEMPTS = "attempts.jsonl"
"""File in which a Slurm job records the starts and ends of its attempts."""
MOST_STEPS = 2**53
"""A step that a float does not have is of a damaged line."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A message in the log of a run."""

    step: int
    text: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Series:
    """Finite values of one metric over a run, with their steps and seconds since the run's first record."""

    steps: list[int]
    seconds: list[float]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that the report needs to know about a run."""

    path: Path
    name: str
    stage: Stage
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    """Records of metrics.jsonl without events."""
    events: Sequence[RunEvent]
    attempts: Sequence[RunAttempt]
    done: str
    """Text of DONE; empty while steps remain."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """Last step that has a record."""
        return max((int(record["step"]) for record in self.records), default=0)

    @property
    def seconds(self) -> float:
        """Seconds from the first record to the last, without the pauses between attempts."""
        times = [float(record["time"]) for record in self.records]
        later_starts = [attempt.started_s for attempt in self.attempts[1:]]
        firsts = {next((i for i, time in enumerate(times) if time >= start), len(times)) for start in later_starts}
        return sum(later - sooner for at, (sooner, later) in enumerate(pairwise(times), 1) if at not in firsts)

    @property
    def label(self) -> str:
        """Name of the stage; for reinforcement learning, its objective and replay."""
        if self.stage != "rl":
            return STAGES[self.stage]
        kind = self.config["rl"].get("loss", {}).get("kind", "")
        replay = self.config.get("replay", {}).get("kind", "none")
        return " ".join([kind.upper().replace("_", " "), *([f"+ {replay.upper()}"] if replay != "none" else [])])

    def series(self, name: str) -> Series:
        """Return the series of a scalar metric, empty when the run does not have it."""
        return self._all_series.get(name) or Series([], [], [])

    @cached_property
    def _all_series(self) -> dict[str, Series]:
        found: dict[str, Series] = defaultdict(lambda: Series([], [], []))
        start = float(self.records[0]["time"]) if self.records else 0.0
        for record in self.records:
            step, seconds = int(record["step"]), float(record["time"]) - start
            for name in record.keys() - {"step", "time"}:
                if math.isfinite(value := _number(record[name])):
                    series = found[name]
                    series.steps.append(step)
                    series.seconds.append(seconds)
                    series.values.append(value)
        return found

    def names(self) -> list[str]:
        """Return the names of all metrics of the run, sorted."""
        return sorted({name for record in self.records for name in record} - {"step", "time"})


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Return the runs in the order of their stages; DataError for a folder that is not a run."""
    names = short_names(paths)
    runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
    return sorted(runs, key=lambda run: list(STAGES).index(run.stage))


def read_run(path: Path, name: str) -> RunRecord:
    """Return the run in a folder; DataError where it is none, is damaged or may not be read."""
    with run_errors_explained(path):
        return _read_run(path, name)


def _read_run(path: Path, name: str) -> RunRecord:
    config_path = path / "config.toml"
    if not config_path.exists():
        if cause := _cause_of_the_last_end(path / JOB_ATTEMPTS):
            raise DataError(f"{path} has trained nothing: its job ended before the program began: {cause}")
        raise DataError(f"{config_path} is not there: give the run_dir of a training (mcore-rl pretrain, sft, rl)")
    try:
        config = tomllib.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise DataError(
            f"{config_path} is damaged: {error}. Copy it again; a start of the run writes it anew"
        ) from None
    # Every record has a time and a step that a run can reach; a line that something has damaged may not.
    records: list[Mapping[str, Any]] = [
        record
        for record in read_records(path / FILE_NAME)
        if math.isfinite(_number(record.get("time"))) and abs(_number(record["step"])) < MOST_STEPS
    ]
    done, chats = path / "DONE", "chat_template" in config.get("data", {})
    return RunRecord(
        path=path,
        name=name,
        stage=next((stage for stage in ("rl", "rm", "dpo") if stage in config), "sft" if chats else "pretrain"),
        config=config,
        records=[record for record in records if "event" not in record],
        events=[
            RunEvent(
                int(record["step"]),
                str(record["event"]),
                {key: value for key, value in record.items() if key not in ("step", "time", "event")},
            )
            for record in records
            if "event" in record
        ],
        attempts=read_attempts(path),
        done=done.read_text(encoding="utf-8", errors="replace").strip() if done.exists() else "",
        evaluation=_evaluation(path / EVALUATION),
    )


def _cause_of_the_last_end(path: Path) -> str:
    """Return why the last attempt of a run's job ended; empty where it recorded no cause, or there was no job."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        with suppress(ValueError, AttributeError):  # torn: the job is writing it
            if (record := json.loads(line)).get("event") == "end":
                return str(record.get("cause", ""))
    return ""


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as make it unique; DataError for a path given twice."""
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise DataError(f"{twice} was given twice; give each run once")
    for length in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return names


def _evaluation(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
        except ValueError:
            raise DataError(
                f"{path} is not what mcore-rl eval prints. Write its output there again, or delete it."
            ) from None
    return found


def _number(value: object) -> float:
    """Return a metric's value; nan without a number: absent, a table, or a text that a damaged line has."""
    try:
        return float(value)  # type: ignore[arg-type]  # metrics that are not finite are written as texts
    except (TypeError, ValueError, OverflowError):
        return math.nan
