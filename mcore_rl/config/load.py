"""From TOML files and `a.b=c` on the command line to a frozen, checked config, and back to TOML."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mcore_rl.config.describe import FieldDoc, describe, describe_sections, section_of, toml_value
from mcore_rl.config.section import Section
from mcore_rl.errors import ConfigError

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as the user wrote it, and where."""

    value: Any
    source: str


def load_config(cls: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """The config of `path` with `overrides` (`mesh.tp=2`) on top; one ConfigError says all that is wrong.

    A file may start from others: `extends = "base.toml"`, or a list of which later ones win; their paths are
    relative to the file. Any other path is kept as it is written.
    """
    fields = {doc.key: doc for doc in describe(cls)}
    settings: dict[str, Setting] = {}
    for source, table in [*_tables(path, ()), *_override_tables(fields, overrides)]:
        settings |= {key: Setting(value, source) for key, value in _leaves(cls, table)}
    mistakes = [_not_a_field(cls, key, settings[key]) for key in settings if key not in fields]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    try:
        # JSON has TOML's values, and from JSON pydantic's strict mode reads lists as tuples and 1 as 1.0.
        return cls.model_validate_json(json.dumps(_nested(settings), default=str))
    except ValidationError as error:
        raise ConfigError("\n".join(_wrong_values(error, fields, settings))) from None


def dump_config(config: Section) -> str:
    """TOML that `load_config` reads back to an equal config."""
    return "\n".join(_dump_lines(config, "")).strip() + "\n"


def _tables(path: Path | None, chain: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables that make up the file, with their names, the weakest first."""
    if path is None:
        return
    resolved = path.resolve()
    if resolved in chain:
        circle = " extends ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"Config files go in a circle: {circle}. Take one `extends` out.")
    table = _read(path, chain)
    bases = table.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(
            f"extends = {_shown(bases)} in {path}: expected a file name or a list of file names."
        )
    for base in bases:
        yield from _tables(path.parent / base, (*chain, resolved))
    yield f"in {path}", table


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    origin = f" (extended by {chain[-1]})" if chain else ""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Config file {path}{origin} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path}{origin} is not valid TOML: {error}.") from None


def _override_tables(
    fields: dict[str, FieldDoc], overrides: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise ConfigError(f"{override!r} is not of the form key=value, as in mesh.tp=2.")
        value = parse_value(text)
        if key in fields and fields[key].annotation is str and not isinstance(value, str):
            value = text  # run_dir=2024 means the folder of that name
        *parents, name = key.split(".")
        table = {name: value}
        for parent in reversed(parents):
            table = {parent: table}
        yield "on the command line", table


def parse_value(text: str) -> Any:
    """The TOML value `text`; a bare word is a string, also in a list, because shells take quotes away."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return text
    return table["value"] if table.keys() == {"value"} else text


def _leaves(cls: type[Section] | None, table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values: `table` without the nesting that is `cls`'s own, or nobody's (None)."""
    for name, value in table.items():
        field = cls.model_fields.get(name) if cls else None
        section = section_of(field.annotation) if field else None
        if isinstance(value, dict) and (section or (value and not field)):
            yield from _leaves(section, value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _not_a_field(cls: type[Section], key: str, setting: Setting) -> str:
    """What to say of a key that no field has: it names a section, or the nearest field is offered."""
    sections = {doc.key: doc.fields for doc in describe_sections(cls)}
    if key in sections:
        example = sections[key][0].key if sections[key] else f"{key}.<field>"
        shown = f"{key} = {_shown(setting.value)} {setting.source}"
        return f"{shown}: {key} is a section; set its fields, as {example}."
    near = _nearest(key, [doc.key for doc in describe(cls)] + list(sections))
    remedy = f"Did you mean {near}?" if near else "`mcore-rl <command> --help` lists all keys."
    return f"Unknown key {key} {setting.source}. {remedy}"


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key like `key`: by its whole dotted name, or else by its last part alone."""
    last = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, same_name or known, n=1, cutoff=0.0 if same_name else 0.75)
    if not near:
        lasts = {other.rpartition(".")[2]: other for other in known}
        near = [lasts[name] for name in difflib.get_close_matches(last, lasts, n=1, cutoff=0.7)]
    return near[0] if near else None


def _nested(settings: dict[str, Setting]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, setting in settings.items():
        *parents, name = key.split(".")
        table = root
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = setting.value
    return root


def _wrong_values(
    error: ValidationError, fields: dict[str, FieldDoc], settings: dict[str, Setting]
) -> Iterator[str]:
    """One line a field that pydantic refused: a list with two wrong items is said once."""
    told = set()
    for detail in error.errors():
        key = ".".join(map(str, detail["loc"]))
        while key not in fields and "." in key:
            key = key.rpartition(".")[0]
        if key in told:
            continue
        told.add(key)
        if key in settings:
            setting = settings[key]
            yield f"{key} = {_shown(setting.value)} {setting.source}: expected {fields[key].type}."
        else:
            yield f"{key} is not set; it has no default ({detail['msg']})."


def _shown(value: Any) -> str:
    """A value from a TOML file, as it would be written there."""
    return toml_value(value) if isinstance(value, str | int | float | list | dict) else str(value)


def _dump_lines(config: Section, key: str) -> Iterator[str]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    own = {name: value for name, value in values.items() if not isinstance(value, Section)}
    if own and key:
        yield f"\n[{key}]"
    for name, value in own.items():
        if value is not None:
            yield f"{name} = {toml_value(value)}"
    for name, value in values.items():
        if isinstance(value, Section):
            yield from _dump_lines(value, f"{key}.{name}".lstrip("."))
