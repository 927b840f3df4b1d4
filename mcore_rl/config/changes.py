"""Differences between the config of a checkpoint and the config of the run that resumes from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mcore_rl.config.section import Section
from mcore_rl.config.toml import toml_value

AnySection = TypeVar("AnySection", bound=Section)
EXACT = (
    *("train.seed", "train.global_batch", "train.ramp_start", "train.ramp_increment", "train.ramp_samples"),
    "data",
    *("rl.prompts", "rl.rollout.prompts_per_step", "rl.rollout.group_size", "rl.eval.num_prompts"),
    *("rl.ptx.files", "rl.ptx.tokens", "rl.ptx.sequences", "rl.distill.server"),
    "lora",
    "numerics",
)
"""Fields and sections that decide which data a step reads, its random numbers, or the contribution of adapters to the
model. A run that resumes with different values reads samples twice or never, or trains a different model. `numerics` is
not a config field: it is a version in the code. Of `rl.distill.server` the names of the servers' models count alone."""
EVALUATED = ("data.valid", "data.test")
"""Fields within a section of EXACT that no training step reads."""
NOT_COMPARED = (
    *("run_dir", "model.path", "checkpoint", "log", "train.hang_s", "train.hang_start_s", "train.hang_save_s"),
    *("train.gc_interval", "platform.timeout_s", "data.cache_dir"),
    "rl.engine.urls",
    "lora.load",
    *("rl.update.store", "rl.advantage.critic.store", "rl.loss.reference_store", "rl.reward.model_store"),
    *("rl.distill.store", "rl.distill.tokenizer", "rl.distill.server"),
)
"""Fields and sections that do not affect the results of a training."""
Contents = Mapping[str, Mapping[str, str]]
"""Field -> path -> content of each file that the field names (checks/inputs.py)."""
NO_FILE = "no file"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """A field that has different values in a checkpoint and in the run that resumes from it."""

    key: str
    before: Any
    now: Any
    is_moved: bool = False
    """Whether both are paths of the same contents."""

    @property
    def breaks_exactness(self) -> bool:
        """Whether the change prevents an exact resume."""
        return not self.is_moved and _is_in(self.key, EXACT) and not _is_in(self.key, EVALUATED)

    def is_allowed(self, allowed: tuple[str, ...]) -> bool:
        """Return whether `allowed` names the field or a section that contains it."""
        return _is_in(self.key, allowed)

    def __str__(self) -> str:
        """Return the field with both values in TOML syntax."""
        return f"{self.key} is {toml_value(self.before)} there, {toml_value(self.now)} here"


def listing(changes: Sequence[ConfigChange]) -> tuple[str, str]:
    """Return the changes as lines of an error message, and their keys as a value for `checkpoint.allow_changes`."""
    keys = dict.fromkeys(change.key for change in changes)  # files of one field may have changed
    return "\n".join(f"- {change}" for change in changes), toml_value([*keys])


def config_changes(before: Mapping[str, Any], now: Section, prefix: str = "") -> list[ConfigChange]:
    """Return the fields in which a recorded config (JSON) differs from `now`, but for NOT_COMPARED."""
    there = dict(leaves(as_recorded(before, type(now)), prefix))
    return [
        ConfigChange(key=key, before=there[key], now=value)
        for key, value in leaves(now, prefix)
        if key in there and there[key] != value and not _is_in(key, NOT_COMPARED)
    ]


def with_contents(changes: Sequence[ConfigChange], before: Contents, now: Contents) -> list[ConfigChange]:
    """Return the changes, without files moved with equal contents, and the fields whose files changed."""
    changed = {change.key for change in changes}
    return [replace(change, is_moved=_is_moved(change, before, now)) for change in changes] + [
        ConfigChange(key=key, before=f"{path} with {there}", now=f"{path} with {here}")
        for key in sorted(before.keys() & now.keys())
        for path in sorted({*before[key], *now[key]})
        for there, here in [(before[key].get(path, NO_FILE), now[key].get(path, NO_FILE))]
        # An earlier version recorded less of a content: its beginning. Other paths are a change of the config already.
        if not here.startswith(there) and not (key in changed and NO_FILE in (there, here))
    ]


def _is_moved(change: ConfigChange, before: Contents, now: Contents) -> bool:
    def files(named: str | Sequence[str], recorded: Mapping[str, str]) -> list[list[tuple[str, str]]]:
        # Of a folder those within it, of a prefix of data PREFIX.bin and PREFIX.idx.
        return [
            [
                (file[len(path) :], content)
                for file, content in recorded.items()
                if file.startswith(path) and file[len(path) :][:1] in ("", "/", ".")
            ]
            for path in (str(Path(name)) for name in ([named] if isinstance(named, str) else named))
        ]

    if not before.get(change.key) or not now.get(change.key):
        return False
    found = files(change.before, before[change.key])
    is_known = all(parts and all("CRC-32" in content for _, content in parts) for parts in found)
    return is_known and found == files(change.now, now[change.key])


def as_recorded(before: Mapping[str, Any], kind: type[AnySection]) -> AnySection | Mapping[str, Any]:
    """Parse a recorded section with today's class; a table with fields that it lacks stays unchanged."""
    try:
        return kind.model_validate_json(json.dumps(before))
    except ValidationError:
        return before


def leaves(table: Section | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and JSON value of each field of a section and of its subsections."""
    entries = table.model_dump(mode="json") if isinstance(table, Section) else table
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
