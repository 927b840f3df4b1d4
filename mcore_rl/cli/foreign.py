"""`mcore-rl init --from`: translate a config of verl, TRL, NeMo-RL, OpenRLHF or slime to TOML, as far as possible."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.describe import describe
from mcore_rl.config.load import load_config
from mcore_rl.config.other_names import SAME_VALUE, setting_named, system_of
from mcore_rl.config.section import Section
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
MISSING = "???"
"""Value in YAML of OmegaConf (verl, NeMo-RL) that the command line must give; `${...}` refers to other settings."""
SHOWN = 60
"""Maximum length of a value in the list of settings that are not translated, in characters."""


def translated(path: Path, program: str | None, folder: str | None) -> str:
    """Return the text of a config that corresponds to a config of another system.

    It sets a field for each setting that has a field of the same value. The other settings are comments, with the
    corresponding fields.

    Args:
        path: The config of the other system, YAML or JSON.
        program: The training program; None is "rl", if the system has no other or the config samples completions.
        folder: The model to use instead of the config's; None keeps the config's.

    Raises:
        ConfigError: If the file cannot be read, is not a table, or does not say which training it is of.
    """
    settings, system = _read(path)
    program = program or _program(settings, system, path)
    cls: type[Section] = PROGRAMS[program].config
    fields = {doc.key for doc in describe(cls)}
    values: dict[str, tuple[Any, str]] = {}
    known, unknown = [], []
    rows = [(key, value, setting_named(key, fields, system)) for key, value in settings.items()]
    # A setting for one field takes precedence over a setting for several, such as verl's clip_ratio.
    for key, value, row in sorted(rows, key=lambda entry: -len(entry[2].fields) if entry[2] else 0):
        said = f"#   {key} = {_short(value)}"
        if row is None:
            unknown.append(said)
            continue
        ours = [field for field in row.fields if field in fields]
        if not (row.is_same and SAME_VALUE.issuperset(ours)):
            known.append(f"{said}: here {' and '.join(ours)}{row.note and '. '}{row.note}")
        elif refusal := _refused(cls, ours, value):
            known.append(f"{said}: {refusal}")
        else:
            values |= dict.fromkeys(ours, (value, key))
    if folder is not None:
        values["model.path"] = folder, "FOLDER"
    whose = f"a config of {system}" if system else "which is of no system that is known"
    lines = [
        f"# {program}, from {path}, {whose}. Complete it, and look at it with `mcore-rl config THIS_FILE`."
    ]
    lines += [f"{key} = {toml_value(value)}  # {origin}" for key, (value, origin) in sorted(values.items())]
    if known:
        lines += ["# Not of the same value here:", *known]
    if unknown:
        lines += ["# No field is known to stand for:", *unknown]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the settings of a file that are not null, by dotted key, and their system."""
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--from {path} cannot be read: {error.strerror}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--from {path} is neither YAML nor JSON: {' '.join(str(error).split())}."
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(f"--from {path} is a {type(table).__name__}, wanted settings by name.")
    return dict(_leaves(table, "")), system_of(text)


def _leaves(table: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            # YAML reads 1e-6, which has no dot, as text.
            is_number = isinstance(value, str) and NUMBER.fullmatch(value)
            yield f"{prefix}{name}", float(value) if is_number else value


def _program(settings: Mapping[str, Any], system: str | None, path: Path) -> str:
    if system not in (None, "TRL") or "num_generations" in settings:
        return "rl"
    raise ConfigError(f"{path} does not say which training it is of. Give --program sft, rm, dpo or rl.")


def _refused(cls: type[Section], ours: list[str], value: Any) -> str:
    """Return why our fields do not accept the value; "" if they do."""
    if isinstance(value, str) and ("${" in value or value == MISSING):
        return "to be written out: it stands for a value of another place"
    if not isinstance(value, bool | int | float | str | list):
        return f"a {type(value).__name__}"
    try:
        load_config(cls, None, [f"{field}={toml_value(value)}" for field in ours])
    except ConfigError as error:
        return " ".join(str(error).replace(" on the command line", "").split())
    return ""


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
