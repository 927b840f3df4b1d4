"""Read a frozen config from TOML files and `a.b=c` on the command line, and write it back as TOML."""

import difflib
import importlib
import json
import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType, NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from mcore_rl.config.describe import FieldDoc, describe, describe_sections, sections_of
from mcore_rl.config.recipes import config_file, extended_file
from mcore_rl.config.section import Section, alternatives, kinds_of, variant_of
from mcore_rl.config.toml import parse_value, toml_value
from mcore_rl.errors import ConfigError

S = TypeVar("S", bound=Section)
OVERRIDDEN = {"data.prompt_field": "data.prompt_template", "rl.prompts.prompt_field": "rl.prompts.prompt_template"}
"""Field -> alternative to it, which gets its default if the field is set on top of a file that sets it."""
UNTRANSLATED = "untranslated."
"""Keys of settings of another system that `mcore-rl init --from` leaves to the user: a config with one is refused."""
MISSPELT = 0.93
"""Similarity, by difflib, above which an unknown key is a misspelt field rather than another system's setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as the user wrote it, in the file `path` or, if that is None, on the command line."""

    key: str
    value: Any
    path: Path | None
    rank: int
    """Precedence: a file ranks above the files that it extends, and the command line above all files."""

    @property
    def source(self) -> str:
        """Where the value was written, for messages."""
        return f"in {self.path}" if self.path else "on the command line"


def load_config(cls: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """Read the config of `path`, a file or recipe, with `overrides` (`mesh.tp=2`) on top. A file may have `extends =
    "base.toml"`, or a list in which later files win, relative to it or by recipe. Raises ConfigError with all unknown
    keys and wrong types.
    """
    return config_of(cls, read_settings(cls, path, overrides))


def read_settings(
    cls: type[Section], path: Path | None, overrides: Sequence[str] = (), without: Collection[str] = ()
) -> dict[str, Setting]:
    """Return the settings of files and overrides by key, except `without`, as `load_config` uses them; ConfigError
    for keys that `cls` lacks. `without` may also have a whole override, or `extends=FILE`.
    """
    fields = {doc.key: doc for doc in describe(cls)}
    tables = [] if path is None else list(_tables(config_file(path), (), without))
    written = [
        Setting(key, value, source, rank)
        for rank, (source, table) in enumerate(tables)
        for key, value in _leaves(cls, table)
    ]
    written += [
        Setting(key, value, None, len(tables))
        for _, table in _override_tables(fields, [override for override in overrides if override not in without])
        for key, value in _leaves(cls, table)
    ]
    settings: dict[str, Setting] = {}
    for setting in written:
        if setting.key in without:
            continue
        settings[setting.key] = _on_top(settings.get(setting.key), setting, fields)
    chosen = fields_of(cls, settings)
    mistakes = {key: _not_a_field(cls, setting, chosen) for key, setting in settings.items() if key not in fields}
    others = {key for key in settings.keys() & fields.keys() - chosen.keys() if _is_kind(fields[key], settings)}
    # "none", on the command line for a list too, clears a field that was set with lower precedence.
    wrong = [key for key in settings if key in others and settings[key].value not in ("none", ["none"])]
    mistakes |= {key: _of_other_kind(cls, settings, key) for key in wrong}
    mistakes |= {
        key: f"{key} = {_shown(setting.value)[:40]} {setting.source}: an integer has 64 bits at most. Lower it."
        for key, setting in settings.items()
        if _is_too_large(setting.value)
    }
    if mistakes and path is not None and any(setting.path for setting in settings.values()):
        _refuse_other_kind(cls, path, [table for _, table in tables])
    if mistakes:
        raise refusal(mistakes.values(), mistakes)
    for field, template in OVERRIDDEN.items():
        if field in settings and template in settings and settings[field].rank > settings[template].rank:
            del settings[template]
    return {key: setting for key, setting in settings.items() if key not in others}


def fields_of(cls: type[Section], settings: Mapping[str, Setting]) -> dict[str, FieldDoc]:
    """Return by key the fields of `cls` for the kinds of sections that `settings` choose."""
    values = {key: setting.value for key, setting in settings.items()}
    return {doc.key: doc for doc in describe(cls) if doc.is_of(values)}


def config_of(cls: type[S], settings: Mapping[str, Setting]) -> S:
    """Return the config with these settings; ConfigError lists the values that do not have their field's type."""
    fields = fields_of(cls, settings)
    try:
        return _validated(cls, fields, {key: setting.value for key, setting in settings.items()})
    except ValidationError as error:
        wrong = dict(_wrong_values(error, fields, settings))
        raise refusal(wrong.values(), wrong.keys() & settings.keys()) from None


def refusal(messages: Iterable[str], keys: Collection[str]) -> ConfigError:
    """Return an error of several messages about the settings `keys`."""
    error = ConfigError("\n".join(messages))
    error.keys = keys
    return error


def files_of(path: Path) -> list[Path]:
    """Return the files that `load_config(..., path)` reads: the file itself and all that it extends."""
    return [file for file, _ in _tables(config_file(path), ())]


def kind_of(path: Path, overrides: Sequence[str] = (), among: Sequence[str] = ()) -> str:
    """Return the kind, as in KINDS, of a file or recipe: the one with all fields (or most, if one is misspelt), then
    the one that the first word of the file's name has (sft.toml, grpo.toml), then the first of `among`. Raises
    ConfigError if undecided.
    """
    kinds = _late("kinds")
    tables = [table for _, table in (*_tables(config_file(path), ()), *_override_tables({}, overrides))]
    num_unknown = {
        kind: len(_unknown_keys(cls, tables)) for kind, cls in kinds.KINDS.items() if kind in (among or kinds.KINDS)
    }
    fitting = [kind for kind, count in num_unknown.items() if count == min(num_unknown.values())]
    named = kinds.kind_of_name(path.name)
    if len(fitting) == 1 or named in fitting:
        return fitting[0] if len(fitting) == 1 else str(named)
    if among:
        return next(kind for kind in among if kind in fitting)
    raise ConfigError(
        f"{path} could be a config of {', '.join(fitting[:-1])} or {fitting[-1]}: its fields are those of each, and "
        f"its name begins with none of these words. Choose one: --program {fitting[0]}."
    )


def section_of_run(cls: type[S], table: dict[str, Any]) -> S:
    """Parse a section of the config.toml that a run wrote; fields missing from `table` have their defaults."""
    values = dict(_leaves(cls, table))
    return _validated(cls, {doc.key: doc for doc in describe(cls) if doc.is_of(values)}, values)


def dump_config(config: Section, origins: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return TOML that `load_config` reads back to an equal config; `origins` are comments behind values, by key."""
    return "\n".join(_dump_lines(config, "", origins)).strip() + "\n"


def _tables(
    path: Path, chain: tuple[Path, ...], without: Collection[str] = ()
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the tables that make up the config, with their files, in order of increasing precedence."""
    table = _read(path, chain)  # first, because it explains errors of the path itself, such as a link to itself
    resolved = path.resolve()
    if resolved in chain:
        circle = " extends ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"Config files go in a circle: {circle}. Take one `extends` out.")
    bases = table.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(f"extends = {_shown(bases)} in {path}: expected a file name or a list of file names.")
    for base in bases:
        if (key := f"extends={base}") not in without:
            try:
                yield from _tables(extended_file(base, path), (*chain, resolved), without)
            except ConfigError as error:
                error.keys = error.keys or {key}
                raise
    yield path, table


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    origin = f" (extended by {chain[-1]})" if chain else ""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Config file {path}{origin} cannot be read: {error.strerror}. Correct its name.") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, an integer of more digits than Python reads
        _late("other_names").refuse_foreign_config(str(path), text)
        raise ConfigError(f"Config file {path}{origin} is not valid TOML: {error}.") from None


def _late(name: str) -> ModuleType:
    """Import a module of this room that only errors and files of unknown kind need, and takes time."""
    return importlib.import_module(f"mcore_rl.config.{name}")


def _unknown_keys(cls: type[Section], tables: Sequence[dict[str, Any]]) -> list[str]:
    fields = {doc.key for doc in describe(cls)}
    keys = dict.fromkeys(key for table in tables for key, _ in _leaves(cls, table))
    return [key for key in keys if key not in fields]


def _refuse_other_kind(cls: type[Section], path: Path, tables: Sequence[dict[str, Any]]) -> None:
    unknown = _unknown_keys(cls, tables)
    if not unknown:
        return
    kinds = _late("kinds")
    own = next((kind for kind, other in kinds.KINDS.items() if other is cls), None)
    fitting = [kind for kind, other in kinds.KINDS.items() if not _unknown_keys(other, tables)]
    if own and fitting:
        shown = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise ConfigError(
            f"{path} is a config of {fitting[0]}, not of {own}: it sets {shown}. Give it to "
            f"{kinds.READERS[fitting[0]]}."
        )


def _override_tables(fields: dict[str, FieldDoc], overrides: Sequence[str]) -> Iterator[tuple[None, dict[str, Any]]]:
    for override in overrides:
        key, equals, text = (part.strip() for part in override.removeprefix("--").partition("="))
        if not equals or not key:
            raise refusal([f"{override!r} is not of the form key=value, as in mesh.tp=2."], {override})
        try:
            override.encode()
        except UnicodeEncodeError:  # Python has such bytes of a command line as surrogates
            raise ConfigError(
                f"{override!r} has bytes that are not UTF-8, which a config cannot hold. Rename what it names."
            ) from None
        value = parse_value(text)
        if key in fields:
            value = _meant(fields[key].annotation, text, value)
        *parents, name = key.split(".")
        table = {name: value}
        for parent in reversed(parents):
            table = {parent: table}
        yield None, table


def _on_top(before: Setting | None, setting: Setting, fields: Mapping[str, FieldDoc]) -> Setting:
    """Return `setting`; what it leaves unset in a section that may be "none" stays as in `before`."""
    if before is None or not (isinstance(before.value, dict) and isinstance(setting.value, dict)):
        return setting
    members = alternatives(fields[setting.key].annotation) if setting.key in fields else ()
    if not any(sections_of(member) for member in members):
        return setting
    return replace(setting, value=before.value | setting.value)


def _meant(annotation: Any, text: str, value: Any) -> Any:
    members = alternatives(annotation)
    plain = [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]
    if str in plain and not isinstance(value, str):
        return text  # run_dir=2024 means the folder of that name
    words = {word for member in members if get_origin(member) is Literal for word in get_args(member)}
    if isinstance(value, str) and value in words | ({"none"} if NoneType in members else set()):
        return value
    items = next((get_args(member) for member in members if get_origin(member) is tuple), ())
    if len(items) == 2 and items[1] is Ellipsis and text and not isinstance(value, list):
        return [_meant(items[0], text, value)]  # data.train=foo is a list with a single item
    return value


def _leaves(cls: type[Section], table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return _leaves_of((cls,), table, "")


def _leaves_of(variants: Sequence[type[Section]], table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        field = next((cls.model_fields[name] for cls in variants if name in cls.model_fields), None)
        sections = sections_of(field.annotation) if field else ()
        if isinstance(value, dict) and (sections or (value and not field)):
            yield from _leaves_of(sections, value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_kind(doc: FieldDoc, settings: Mapping[str, Setting]) -> bool:
    """Return whether the kind of this field's section is valid; if not, only the kind is reported."""
    assert doc.choice is not None
    kind = settings.get(doc.choice.key)
    return kind is None or variant_of(doc.choice.variants, kind.value) is not None


def _of_other_kind(cls: type[Section], settings: Mapping[str, Setting], key: str) -> str:
    setting, docs = settings[key], [doc for doc in describe(cls) if doc.key == key]
    choice = docs[0].choice
    assert choice is not None
    kinds = ", ".join(toml_value(kind) for doc in docs if doc.choice for kind in doc.choice.kinds)
    kind = settings[choice.key].value if choice.key in settings else kinds_of(choice.variants[0])[0]
    return (
        f"{key} = {_shown(setting.value)} {setting.source}: {choice.key}={_shown(kind)} has no such field, which is of "
        f'{kinds}. Leave it out, or set it to "none" where a file that is extended has it.'
    )


def _not_a_field(cls: type[Section], setting: Setting, chosen: Collection[str]) -> str:
    """Return the message about a key that is not a field: a section, another system's name, or a misspelling of one of
    the `chosen` fields, which the kinds of the sections have.
    """
    key = setting.key
    if key.startswith(UNTRANSLATED):
        what = key.removeprefix(UNTRANSLATED)
        return f"{what} is to be decided: {setting.value}. Then delete the line {setting.source} that begins {key}."
    sections = {doc.key: doc.fields for doc in describe_sections(cls)}
    if key in sections:
        example = sections[key][0].key if sections[key] else f"{key}.<field>"
        shown = f"{key} = {_shown(setting.value)} {setting.source}"
        return f"{shown}: {key} is a section; set its fields, as {example}."
    kinds = _late("kinds")
    own = next((kind for kind, other in kinds.KINDS.items() if other is cls), "")
    if key.partition(".")[0] == "replay" and own in kinds.NO_REPLAY:
        return (
            f"{key} = {_shown(setting.value)} {setting.source}: routing replay is of {kinds.READERS['rl']}. "
            f"{kinds.READERS[own]} has none: {kinds.NO_REPLAY[own]} Leave it out."
        )
    fields = list(chosen)
    other_names = _late("other_names")
    argument = other_names.argument_named(key)
    if argument is not None and argument.field in ("", *fields):
        named = f"Unknown key {key} {setting.source}. It is an argument of Megatron-LM"
        if argument.field:
            return f"{named}: here {argument.field} stands for it."
        return f"{named} that is not offered here. {argument.note}"
    misspelt = difflib.get_close_matches(key, fields, n=1, cutoff=MISSPELT)
    foreign = None if misspelt else other_names.equivalent_named(key, {doc.key for doc in describe(cls)})
    if foreign is not None:
        system, row, ours = foreign
        stands = "stands" if len(ours) == 1 else "stand"
        answer = f": here {' and '.join(ours)} {stands} for it." if ours else ", which is not offered here."
        return f"Unknown key {key} {setting.source}. It is a setting of {system}{answer} {row.note}".rstrip()
    near = _nearest(key, fields + list(sections))
    remedy = f"Did you mean {near}?" if near else "`mcore-rl fields` lists all sections."
    return f"Unknown key {key} {setting.source}. {remedy}"


def _is_too_large(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_too_large, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the known key most similar to `key`: by the whole dotted name, or else by its last part."""
    last = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, same_name or known, n=1, cutoff=0.0 if same_name else 0.75)
    if not near:
        lasts = {other.rpartition(".")[2]: other for other in known}
        near = [lasts[name] for name in difflib.get_close_matches(last, lasts, n=1, cutoff=0.7)]
    return near[0] if near else None


def _validated(cls: type[S], fields: dict[str, FieldDoc], values: dict[str, Any]) -> S:
    root: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        table = root
        for parent in parents:
            table = table.setdefault(parent, {})
        doc = fields.get(key)
        # A field without a default is refused like an unset field.
        may_unset = doc is not None and (NoneType in alternatives(doc.annotation) or not doc.default)
        table[name] = None if value == "none" and may_unset else value
    # JSON can hold TOML's values, and pydantic's strict mode accepts lists as tuples and 1 as 1.0 only from JSON.
    return cls.model_validate_json(json.dumps(root, default=str))


def _wrong_values(
    error: ValidationError, fields: dict[str, FieldDoc], settings: Mapping[str, Setting]
) -> Iterator[tuple[str, str]]:
    """Yield key and message for each field that pydantic refused; a list with two wrong items gets a single message."""
    reported = set()
    for detail in error.errors():
        key = ".".join(part for part in map(str, detail["loc"]) if not part.startswith("<"))
        key = f"{key}.kind" if f"{key}.kind" in fields else key
        while key not in fields and "." in key:
            key = key.rpartition(".")[0]
        if key in reported:
            continue
        reported.add(key)
        if key in settings:
            setting = settings[key]
            expected = fields[key].type
            if not _is_finite(setting.value):
                expected = expected.replace("a number", "a finite number")
            items = setting.value if isinstance(setting.value, list) else [setting.value]
            known = _late("other_names").VALUE_NOTES.get(key, {})
            notes = dict.fromkeys(known[item] for item in items if isinstance(item, str) and item in known)
            line = f"{key} = {_shown(setting.value)} {setting.source}: expected {expected}."
            yield key, " ".join([line, *notes])
        else:
            yield key, f"{key} is not set; it has no default ({detail['msg']})."


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _shown(value: Any) -> str:
    """Return a value of a TOML file, possibly a date, in TOML syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return toml_value(value) if isinstance(value, str | int | float | dict) else str(value)


def _dump_lines(config: Section, key: str, origins: Mapping[str, str]) -> Iterator[str]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    fields = {name: value for name, value in values.items() if not isinstance(value, Section)}
    if fields and key:
        yield f"\n[{key}]"
    for name, value in fields.items():
        origin = origins.get(f"{key}.{name}".lstrip("."))
        yield f"{name} = {toml_value(value)}" + (f"  # {origin}" if origin else "")
    for name, value in values.items():
        if isinstance(value, Section):
            yield from _dump_lines(value, f"{key}.{name}".lstrip("."), origins)
