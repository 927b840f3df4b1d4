"""Names of other systems' settings, and of Megatron-LM's arguments, with the corresponding fields: two TOML tables."""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalent:
    """Our fields for a setting, and its names in other systems."""

    fields: tuple[str, ...]
    """Our keys; keys that a training does not have are left out of an answer about it. Without any the setting is not
    offered, and the note says why.
    """
    verl: tuple[str, ...] = ()
    slime: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    nemo_rl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    megatron: tuple[str, ...] = ()
    note: str = ""
    """A sentence on a difference between the two systems."""

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """All names, each with its system."""
        systems = {"TRL": self.trl, "verl": self.verl, "slime": self.slime, "NeMo-RL": self.nemo_rl}
        systems |= {"OpenRLHF": self.openrlhf, "Megatron-LM": self.megatron}
        return tuple((system, name) for system, names in systems.items() for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An argument of Megatron-LM, or several that belong together."""

    names: tuple[str, ...]
    """Names without leading dashes, as in Megatron's own configs."""
    field: str = ""
    """Field of a run's config; "" if the argument is not offered."""
    on_gpus: str = ""
    """Default on GPUs."""
    on_cpus: str = ""
    """Default on CPUs."""
    note: str
    """Its requirements and the evidence for it; for an argument that is not offered, the reason in whole sentences."""


def _table(name: str) -> dict[str, Any]:
    table = tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for row in (*table.get("equivalent", ()), *table.get("argument", ())):
        row.update({key: tuple(value) for key, value in row.items() if isinstance(value, list)})
    return table


_NAMES = _table("other_names.toml")
EQUIVALENTS = tuple(Equivalent(**row) for row in _NAMES["equivalent"])
VALUE_NOTES: dict[str, dict[str, str]] = {}
"""Key -> item of its value in other systems -> what stands for it here, or why nothing does, and what to do."""
for _row in _NAMES["value_note"]:
    VALUE_NOTES.setdefault(_row["field"], {}).update(dict.fromkeys(_row["items"], _row["note"]))
SIGNS: dict[str, str] = _NAMES["signs"]
"""System -> words that occur only in its configs; the first system that matches decides."""
ARGUMENTS = tuple(Argument(**row) for row in _table("megatron_names.toml")["argument"])


def equivalent_named(key: str, fields: Collection[str]) -> tuple[str, Equivalent, tuple[str, ...]] | None:
    """Return the system that has the setting `key`, its row, and its fields that are in `fields`. The longest match
    decides, then a complete name. A key may end in a name (`rl.temperature`), or be the end of one (`actor.ppo_epochs`)
    unless it is as short as `lr` or `path`.
    """
    found: tuple[tuple[int, bool], str, Equivalent, tuple[str, ...]] | None = None
    wanted = _parts(key)
    for row in EQUIVALENTS:
        ours = tuple(field for field in row.fields if field in fields)
        for system, name in row.named if ours or not row.fields else ():
            parts = _parts(name)
            shared = min(len(parts), len(wanted))
            if len(wanted) < len(parts) and shared == 1 and "_" not in wanted[0]:
                continue
            rank = shared, shared == len(parts)
            if parts[-shared:] == wanted[-shared:] and (found is None or rank > found[0]):
                found = rank, system, row, ours
    return found and found[1:]


def system_of(text: str) -> str | None:
    """Return the system of a config or a command, by words that only its configs have; None if unknown."""
    return next((system for system, sign in SIGNS.items() if re.search(sign, text)), None)


def refuse_foreign_config(path: str, text: str) -> None:
    """Raise a ConfigError if the file is YAML, JSON or a shell script; the message names the system that it is from."""
    forms = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".sh": "a shell script"}
    form = forms.get(Path(path).suffix.lower(), "JSON" if text.lstrip().startswith("{") else None)
    if form is None:
        return
    system = system_of(text)
    whose = f"a config of {system}, in {form}" if system else f"{form}"
    raise ConfigError(
        f"{path} is {whose}; configs here are TOML. `mcore-rl init --from {path}` writes it as TOML, with what remains "
        "to be decided; or begin with a recipe (`mcore-rl recipes`), and set on it what differs: a key of "
        'the other system is answered with ours, and "What others call it" in docs/algorithms.md lists them.'
    )


def _parts(name: str) -> list[str]:
    return name.lstrip("-+").replace("-", "_").split(".")


def argument_named(key: str) -> Argument | None:
    """Return the argument of Megatron-LM that the last part of a dotted key names, with dashes or without."""
    name = key.rpartition(".")[2].lstrip("-").replace("-", "_")
    return next((argument for argument in ARGUMENTS if name in argument.names), None)
