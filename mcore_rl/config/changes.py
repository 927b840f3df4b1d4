"""Differences between the config of a checkpoint and the config of the run that resumes from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from mcore_rl.config.kinds import KINDS
from mcore_rl.config.section import Section
from mcore_rl.config.toml import toml_value

AnySection = TypeVar("AnySection", bound=Section)
EXACT = (
    *("train.seed", "train.global_batch", "train.ramp_start", "train.ramp_increment", "train.ramp_samples"),
    "data",
    *("rl.prompts", "rl.rollout.prompts_per_step", "rl.rollout.group_size", "rl.eval.num_prompts"),
    *("rl.ptx.files", "rl.ptx.tokens", "rl.ptx.sequences"),
    "lora",
    "numerics",
)
"""Fields and sections that decide which data a step reads, its random numbers, or the contribution of adapters to the
model. A run that resumes with different values reads samples twice or never, or trains a different model. `numerics` is
not a config field: it is a version in the code."""
EVALUATED = ("data.valid", "data.test")
"""Fields within a section of EXACT that no training step reads."""
NOT_COMPARED = (
    *(
        "run_dir",
        "model.path",
        "checkpoint",
        "log",
        "train.hang_s",
        "train.gc_interval",
        "platform.timeout_s",
        "data.cache_dir",
    ),
    "rl.engine.urls",
    "lora.load",
    *(
        "rl.update.store",
        "rl.advantage.critic.store",
        "rl.loss.reference_store",
        "rl.reward.model_store",
        "rl.distill.store",
    ),
)
"""Fields and sections that do not affect the results of a training."""
BEFORE_FIELDS = {"data.shuffle": "whole"}
"""Values that stand in for fields missing from a recorded config, where earlier versions behaved differently from
today's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """A field that has different values in a checkpoint and in the run that resumes from it."""

    key: str
    before: Any
    now: Any

    @property
    def breaks_exactness(self) -> bool:
        """Whether the change prevents an exact resume."""
        return _is_in(self.key, EXACT) and not _is_in(self.key, EVALUATED)

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


def kind_of_config(config: Section) -> str:
    """Return the name in KINDS of a config, such as "pretrain"."""
    return next(kind for kind, cls in KINDS.items() if type(config) is cls)


def config_changes(before: Mapping[str, Any], now: Section, prefix: str = "") -> list[ConfigChange]:
    """Return the fields in which a recorded config differs from `now`, except the fields of NOT_COMPARED.

    Args:
        before: A config of the same kind as `now`, in the form that `model_dump(mode="json")` returns; an earlier
            version may have written it.
        now: The config of the run that resumes.
        prefix: Prefix of the keys if both are a section, such as "model.".
    """
    recorded = dict(leaves(before, prefix))
    there = dict(leaves(as_recorded(before, type(now)), prefix))
    there |= {key: value for key, value in BEFORE_FIELDS.items() if key not in recorded}
    here = dict(leaves(now, prefix))
    return [
        ConfigChange(key=key, before=there[key], now=value)
        for key, value in here.items()
        if key in there and there[key] != value and not _is_in(key, NOT_COMPARED)
    ]


def content_changes(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> list[ConfigChange]:
    """Return the fields that name a file with different content than recorded; both map field -> path -> content."""
    return [
        ConfigChange(key=key, before=f"{path} with {there[path]}", now=f"{path} with {content}")
        for key, there in before.items()
        for path, content in now.get(key, {}).items()
        if there.get(path, content) != content
    ]


def as_recorded(before: Mapping[str, Any], kind: type[AnySection]) -> AnySection | Mapping[str, Any]:
    """Parse a recorded section with today's class; fields that are newer than the record get their defaults.

    A table with fields that the class lacks, written by a later version, is returned unchanged.
    """
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
    """Return whether `names` contains a field or a section that the field is in."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
