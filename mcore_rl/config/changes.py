"""Differences between the config of a checkpoint and that of the run that resumes from it."""

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
"""Fields and sections that decide which data a step reads, the random numbers, or what adapters add to a model: a
resumed run with others reads samples twice or never, or is of another model. `numerics` is no field: the code decides
it."""
EVALUATED = ("data.valid", "data.test")
"""Fields in a section of EXACT that no training step reads."""
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
"""Fields and sections that change no number of a training."""
BEFORE_FIELDS = {"data.shuffle": "whole"}
"""Fields for which earlier versions, which did not have them, did something else than the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """A field that a checkpoint and the run that resumes from it have with different values."""

    key: str
    before: Any
    now: Any

    @property
    def breaks_exactness(self) -> bool:
        """Whether the run cannot be resumed exactly with it."""
        return _is_in(self.key, EXACT) and not _is_in(self.key, EVALUATED)

    def is_allowed(self, allowed: tuple[str, ...]) -> bool:
        """Return whether `allowed` names the field or a section that it is in."""
        return _is_in(self.key, allowed)

    def __str__(self) -> str:
        """Return the field with both values as TOML."""
        return f"{self.key} is {toml_value(self.before)} there, {toml_value(self.now)} here"


def listing(changes: Sequence[ConfigChange]) -> tuple[str, str]:
    """Return changes as lines of an error, and their keys as a value for `checkpoint.allow_changes`."""
    keys = dict.fromkeys(change.key for change in changes)  # files of one field may have changed
    return "\n".join(f"- {change}" for change in changes), toml_value([*keys])


def kind_of_config(config: Section) -> str:
    """Return the name in KINDS of a config, such as "pretrain"."""
    return next(kind for kind, cls in KINDS.items() if type(config) is cls)


def config_changes(before: Mapping[str, Any], now: Section, prefix: str = "") -> list[ConfigChange]:
    """Return the fields in which a recorded config differs from `now`, but for those of NOT_COMPARED.

    Args:
        before: A config of the same kind as `now`, as `model_dump(mode="json")` returns it; an earlier version may
            have written it.
        now: The config of the run that resumes.
        prefix: Beginning of the keys where both are a section, such as "model.".
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
    """Return the fields that name a file of another content than was recorded; both are field -> path -> content."""
    return [
        ConfigChange(key=key, before=f"{path} with {there[path]}", now=f"{path} with {content}")
        for key, there in before.items()
        for path, content in now.get(key, {}).items()
        if there.get(path, content) != content
    ]


def as_recorded(before: Mapping[str, Any], kind: type[AnySection]) -> AnySection | Mapping[str, Any]:
    """Return a recorded section as one of today, in which fields that are newer have their defaults.

    Where it has what today's has not, as one of a later version, it is returned as the table that it is.
    """
    try:
        return kind.model_validate_json(json.dumps(before))
    except ValidationError:
        return before


def leaves(table: Section | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and value, as JSON has it, of each field of a section and of those inside it."""
    entries = table.model_dump(mode="json") if isinstance(table, Section) else table
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    """Return whether a field is one of `names`, or in a section of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
