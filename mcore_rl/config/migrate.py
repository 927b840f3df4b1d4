"""Fields of earlier versions: their names and values today, in memory and in config files.

A config file with an old name or value is refused with all changes at once, and `mcore-rl config --migrate FILE`
rewrites it. What a run wrote about itself (its config.toml, its checkpoints) is translated when it is read.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_rl.config.toml import parse_value, toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.files import disk_errors_explained, with_ending, write_atomically

RENAMED_FIELDS: dict[str, str] = {
    "checkpoint.check_bytes": "checkpoint.verify_checksums",
    "data.row_length": "data.seq_length",
    "rl.loss.mismatch": "rl.loss.importance_sampling",
    "rl.loss.mismatch_high": "rl.loss.importance_sampling_high",
    "rl.loss.mismatch_low": "rl.loss.importance_sampling_low",
    "rl.update.row_tokens": "rl.update.max_tokens_per_microbatch",
}
"""Old dotted name of a field -> its name today, in the same section."""

CHANGED_VALUES: dict[str, tuple[Any, Any]] = {
    "base": ("", "none"),
    "checkpoint.interval": (0, "none"),
    "checkpoint.keep": (0, "all"),
    "checkpoint.load": ("", "none"),
    "checks.min_bandwidth_gbps": (0, "none"),
    "container.image": ("", "none"),
    "data.cache_dir": ("", "auto"),
    "data.span_multiple": (0, "auto"),
    "data.tokenizer.path": ("", "none"),
    "log.matrix_interval": (0, "none"),
    "log.peak_tflops": (0, "auto"),
    "log.wandb_project": ("", "none"),
    "mesh.dp": (0, "auto"),
    "mesh.first_stage_layers": (0, "none"),
    "mesh.last_stage_layers": (0, "none"),
    "model.mla.q_lora_rank": (0, "none"),
    "model.moe.capacity_factor": (0, "none"),
    "model.moe.num_groups": (0, "none"),
    "model.moe.shared_ffn_hidden_size": (0, "auto"),
    "model.moe.top_groups": (0, "none"),
    "model.sliding_window": (0, "none"),
    "node.cores": (0, "none"),
    "node.memory_gib": (0, "all"),
    "node.ranks": (0, "none"),
    "optim.clip_grad": (0, "none"),
    "optim.decay_steps": (0, "auto"),
    "optim.wsd_decay_steps": (0, "auto"),
    "paths.cache": ("", "none"),
    "paths.scratch": ("", "none"),
    "pretrain.config": ("", "none"),
    "pretrain.time": ("", "none"),
    "rl.config": ("", "none"),
    "rl.loss.aggregation": ("paper", "auto"),
    "rl.loss.aggregation_norm_tokens": (0, "auto"),
    "rl.loss.clip_high": (0, "auto"),
    "rl.loss.clip_low": (0, "auto"),
    "rl.loss.dual_clip": (0, "none"),
    "rl.loss.kl_gradient": ("own", "estimator"),
    "rl.loss.reference_refresh_rollouts": (0, "none"),
    "rl.loss.tau": (0, "auto"),
    "rl.reward.answer_pattern": ("", "none"),
    "rl.reward.format_pattern": ("", "none"),
    "rl.reward.length_max_tokens": (0, "none"),
    "rl.reward.overlong_buffer_tokens": (0, "none"),
    "rl.reward.regex_pattern": ("", "none"),
    "rl.rollout.top_k": (0, "none"),
    "rl.samples.interval": (0, "none"),
    "rl.time": ("", "none"),
    "rl.update.max_tokens_per_microbatch": (0, "auto"),
    "rl.update.old_logprobs": ("engine", "rollout"),
    "sft.config": ("", "none"),
    "sft.time": ("", "none"),
    "slurm.account": ("", "none"),
    "slurm.constraint": ("", "none"),
    "slurm.gpu_type": ("", "none"),
    "slurm.partition": ("", "none"),
    "slurm.qos": ("", "none"),
    "train.eval_batches": (0, "none"),
    "train.eval_interval": (0, "none"),
    "train.hang_s": (0, "none"),
    "train.ramp_increment": (0, "none"),
    "train.ramp_samples": (0, "none"),
    "train.ramp_start": (0, "none"),
}
"""Dotted name of a field, as it is today -> a value that it had in earlier versions, and that value today."""

BACKUP = ".bak"
HEADER = re.compile(r"\s*\[([\w.-]+)\]\s*(?:#.*)?$")
SCALAR = r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,#{}\[\]"']+)"""
ASSIGNMENT = re.compile(rf"(?P<before>(?:^|(?<=[{{,]))\s*)(?P<key>[\w.-]+)(?P<equals>\s*=\s*)(?:{SCALAR})?")
INLINE_TABLE = re.compile(r"^\s*(?P<key>[\w.-]+)\s*=\s*\{")
QUOTED_OVERRIDE = re.compile(
    r"""(?P<quote>["'])(?P<override>[a-z_]+(?:\.[a-z_0-9]+)+\s*=[^"'\n]*)(?P=quote)"""
)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A setting of an earlier version, and the same setting today."""

    old_key: str
    old_value: Any
    key: str
    value: Any

    def __str__(self) -> str:
        if self.old_value == self.value:
            return f"{self.old_key} is now {self.key}"
        return f"{self.old_key} = {toml_value(self.old_value)} is now {self.key} = {toml_value(self.value)}"


def field_changes(key: str, value: Any) -> Iterator[FieldChange]:
    """Yield the change of a setting that has an old name or an old value, or the changes inside of a table."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from field_changes(f"{key}.{name}".lstrip("."), item)
    elif change := _field_change(key, value):
        yield change


def translated(
    table: Mapping[str, Any], prefix: str = "", *, none: Literal["none"] | None = "none"
) -> dict[str, Any]:
    """Return the tables of a config, or of its section `prefix` ("model."), with the names and values of today.

    `none` is written for an unset field: "none" in TOML, which has no null, None in JSON.
    """
    new: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping):
            new[name] = translated(value, f"{key}.", none=none)
        elif change := _field_change(key, value):
            is_unset = change.value == "none" and change.value != change.old_value
            new[change.key.rpartition(".")[2]] = none if is_unset else change.value
        else:
            new[name] = value
    return new


def migrate_file(path: Path) -> list[FieldChange]:
    """Rewrite a config file with the names and values of today; comments stay, the old file becomes FILE.bak.

    Returns:
        All changes in their order; none when the file is left alone.

    Raises:
        ConfigError: The file cannot be read, or holds a change in a form that a rewrite by lines does not find. The
            file is left alone.
        DataError: The folder cannot be written to.
    """
    try:
        text = path.read_text(encoding="utf-8")
        old = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Config file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} is not valid TOML: {error}.") from None
    changes = list(field_changes("", old))
    if not changes:
        return []
    new_text = _rewritten(text)
    if tomllib.loads(new_text) != translated(old):
        raise ConfigError(
            f"{path} is not written in a way that --migrate can rewrite line by line. Change by hand:\n"
            + "\n".join(f"- {change}" for change in changes)
        )
    with disk_errors_explained(path.parent, "The file is left alone."):
        write_atomically(with_ending(path, BACKUP), text)
        write_atomically(path, new_text)
    return changes


def _field_change(key: str, value: Any) -> FieldChange | None:
    new_key = RENAMED_FIELDS.get(key, key)
    new_value = _value_today(new_key, value)
    if new_key == key and new_value is value:
        return None
    return FieldChange(key, value, new_key, new_value)


def _value_today(key: str, value: Any) -> Any:
    """Return the value of field `key` today: `value` itself, the same object, where nothing has changed."""
    if isinstance(value, list):
        # Studies and pipelines hold overrides as texts.
        items = [_override_today(item) if isinstance(item, str) else item for item in value]
        return value if items == value else items
    old, new = CHANGED_VALUES.get(key, (value, value))
    is_old = value == old and isinstance(value, bool) == isinstance(old, bool)  # False == 0 in Python
    return new if is_old else value


def _override_today(text: str) -> str:
    """Return `key=value` with the name and the value of today."""
    key, equals, value = text.partition("=")
    change = _field_change(key.strip(), parse_value(value.strip())) if equals else None
    if change is None:
        return text
    shown = value if change.value == change.old_value else toml_value(change.value).strip('"')
    return f"{change.key}={shown.strip()}"


def _rewritten(text: str) -> str:
    """Return the text of a TOML file with its assignments changed, line by line; all else stays as it is."""
    section = ""
    lines = []
    for line in text.splitlines(keepends=True):
        if header := HEADER.match(line):
            section = f"{header[1]}."
            lines.append(line)
        elif inline := INLINE_TABLE.match(line):
            rest = _assignments_today(line[inline.end() :], f"{section}{inline['key']}.", count=0)
            lines.append(inline[0] + rest)
        else:
            changed = _assignments_today(line, section, count=1)
            lines.append(QUOTED_OVERRIDE.sub(_quoted_override_today, changed))
    return "".join(lines)


def _assignments_today(text: str, section: str, *, count: int) -> str:
    """Return `text` with the first `count` (0: all) `key = value` in it as they are in `section` ("mesh.") today."""

    def changed(match: re.Match[str]) -> str:
        old = match["value"]
        change = _field_change(section + match["key"], None if old is None else parse_value(old))
        if change is None:
            return match[0]
        parent, dot, _ = match["key"].rpartition(".")
        value = old if change.value == change.old_value else toml_value(change.value)
        return f"{match['before']}{parent}{dot}{change.key.rpartition('.')[2]}{match['equals']}{value or ''}"

    return ASSIGNMENT.sub(changed, text, count=count)


def _quoted_override_today(match: re.Match[str]) -> str:
    return f"{match['quote']}{_override_today(match['override'])}{match['quote']}"
