"""`mcore-rl init --from FILE`: the config of a training with verl, slime, TRL, NeMo-RL or OpenRLHF as a config here.

FILE is YAML, JSON, or a shell script that starts the training, which is read and not run (config/shell.py). What each
setting becomes, and the other system's own defaults, are in config/translations.toml.
"""

import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.describe import FieldDoc
from mcore_rl.config.load import UNTRANSLATED, Setting, fields_of, load_config
from mcore_rl.config.other_names import UNKNOWN, Script, equivalent_named, shown, system_of
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
NAME = re.compile(r"\{([\w.]+)\}")
"""A setting or a term in an expression of the table."""
TRAINER = re.compile(r"(.*\.py|openrlhf\.cli\.\w+|(\w+\.)+(main_\w+|train_\w+|\w*trainer))")
"""The word of a command that names the training's script or module; its arguments follow."""
PROGRAM_WORDS = {"rl": r"grpo|gspo|ppo|train_async|\btrain\.py", "dpo": r"dpo", "rm": r"_rm\b|reward", "sft": r"sft"}
"""Program -> words of the script, module, or file that trains so."""
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.]+)(?:, *([^{}]*))?\}")
"""A setting's value that is another setting's, with the value without that setting; `.name` is beside the setting."""
MISSING = "???"
"""Value in OmegaConf's YAML (verl, NeMo-RL) that the command line must give; `${...}` refers to other settings."""
SHOWN = 60
"""Maximum length of a value in a comment, in characters."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (bool, int, len, max, round, str)
}
NO_EFFECT = ("log.", "run_dir", "rl.eval.", "checkpoint.", "train.eval", "platform.timeout")
"""Fields without an effect on what is learned: if a value is not known, a comment says so."""


class _OpenError(Exception):
    """A value that the table cannot give, with the reason: the user has to decide on it."""


class _Translation:
    """A config of another system: its settings, the defaults of its system, and the fields that follow from them."""

    def __init__(self, table: Mapping[str, Any], settings: Mapping[str, Any], program: str) -> None:
        """Evaluate the table's expressions with the settings of a file."""
        defaults = table["defaults"]
        self.table, self.cls = table, PROGRAMS[program].config
        self.given = {self._name(name): value for name, value in settings.items()}
        self.known = {**defaults.get("all", {}), **defaults.get(program, {}), "program": program, **self.given}
        self.used: dict[str, Any] = {}
        """The settings that the last expression has read, with their values."""
        self.read: set[str] = set()
        """The settings that any expression has read."""
        self.values: dict[str, tuple[Any, str]] = {}
        """Fields with their values and origins."""
        self.open: dict[str, str] = {}
        """Fields, or settings without any, that the user has to decide on, with the reasons."""
        self.unset: dict[str, str] = {}
        """The same, without an effect on what is learned."""
        self._set_fields()
        for expression, reason in table["refused"].items():
            try:
                is_refused = self._value(expression)
            except _OpenError:
                is_refused = bool(self.used.keys() & self.given.keys())
            if is_refused:
                culprit = self._culprit()
                self.open[culprit] = reason if self.used[culprit] is None else f"{_text(self.used[culprit])}: {reason}"

    def _name(self, name: str) -> str:
        key = name.removeprefix(self.table.get("prefix", ""))
        return str(self.table.get("renamed", {}).get(key, key))

    def _set_fields(self) -> None:
        expressions: dict[str, str] = self.table["fields"]
        kinds: dict[str, Any] = {}
        found: dict[str, tuple[Any, str, bool]] = {}
        # Kinds first: which fields a section has depends on its kind.
        for field in sorted(expressions, key=lambda field: not field.endswith(".kind")):
            doc = self._fields(kinds).get(field)
            if doc is None:
                continue
            try:
                value = self._value(expressions[field])
            except _OpenError as reason:
                used = self.used.get(culprit := self._culprit())
                self._leave(field, f"{culprit} = {_text(used)}: {reason}" if used is not None else str(reason))
                continue
            if value is None:
                continue
            if field.endswith(".kind"):
                kinds[field] = value
            read = [(key, _text(value), key in self.given) for key, value in self.used.items() if value is not None]
            origin = [f"{key} = {text}" for key, text, is_given in read if is_given]
            # A default that was read last is the value, and what was read before it a condition.
            origin += [f"{key} = {text} (default)" for key, text, is_given in read[-1:] if not is_given]
            value = [value] if isinstance(value, str) and doc.type.startswith("a list") else value
            found[field] = value, ", ".join(origin), any(is_given for _, _, is_given in read)
        if self._refusal({field: value for field, (value, _, _) in found.items()}):
            for field, (value, said, _) in list(found.items()):
                if refusal := self._refusal({**kinds, field: value}):
                    self._leave(field, f"{said}: {refusal}")
                    del found[field]
        docs = self._fields(kinds)
        for field in expressions:
            if field in found and field in docs:
                value, said, is_given = found[field]
                # A default of the other system that is ours too is not written.
                if is_given or not docs[field].default or tomllib.loads(f"a = {docs[field].default}")["a"] != value:
                    self.values[field] = value, said

    def _leave(self, field: str, reason: str) -> None:
        (self.unset if field.startswith(NO_EFFECT) else self.open)[field] = reason

    def _fields(self, kinds: Mapping[str, Any]) -> dict[str, FieldDoc]:
        return fields_of(self.cls, {key: Setting(key, value, None, 0) for key, value in kinds.items()})

    def _refusal(self, values: Mapping[str, Any]) -> str:
        """Return why one of these fields does not accept its value; "" if all do."""
        try:
            load_config(self.cls, None, [f"{field}={toml_value(value)}" for field, value in values.items()])
        except ConfigError as error:
            return " ".join(shown(str(error)).replace(" on the command line", "").split())
        return ""

    def _value(self, expression: str) -> Any:
        """Return the value of an expression of the table; _OpenError if it has none."""
        self.used = {}
        try:
            return self._evaluated(expression)
        except KeyError:
            raise _OpenError("no value here stands for it") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError):
            absent = [key for key, value in self.used.items() if value is None]
            raise _OpenError(f"it depends on {', '.join(absent) or 'this'}, which is not in the file") from None
        finally:
            self.read |= self.used.keys()

    def _evaluated(self, expression: str) -> Any:
        code = NAME.sub(lambda name: f"setting({name[1]!r})", expression)
        # The expression is from the table of this package; settings are only values in it.
        return eval(code, {"__builtins__": {}, "setting": self._setting, "ask": self._ask, **FUNCTIONS})

    def _setting(self, key: str) -> Any:
        """Return a setting, a default of its system, or a term; None if there is none of this name."""
        if key in self.table.get("terms", {}):
            return self._evaluated(self.table["terms"][key])
        value = self.known.get(key)
        if key != "program":
            self.used.pop(key, None)
            self.used[key] = value
        if isinstance(value, str) and (found := REFERENCE.fullmatch(value)):
            name = self._name(f"{key.rpartition('.')[0]}{found[1]}" if found[1].startswith(".") else found[1])
            return _parsed(found[2]) if found[2] is not None and name not in self.known else self._setting(name)
        if UNKNOWN in str(value) or (isinstance(value, str) and ("${" in value or value == MISSING)):
            raise _OpenError("it stands for a value that is not in the file")
        return value

    @staticmethod
    def _ask(value: Any, reason: str) -> Any:
        raise _OpenError(reason)

    def _culprit(self) -> str:
        """Return the setting that decided last: of those that the file sets, or else of the defaults."""
        read = [key for key in reversed(self.used) if self.used[key] is not None]
        return next((key for key in read if key in self.given), next(iter(read or self.used), ""))

    def left_out(self, system: str) -> Iterator[str]:
        """Yield comments on the settings of the file that set no field."""
        parts = (*self.table["fields"].values(), *self.table["refused"], *self.table.get("terms", {}).values())
        names = set(NAME.findall(" ".join(parts)))
        groups: dict[str, list[str]] = {"Without an effect there, as the rest is set:": []}
        aside: list[str] = groups.setdefault("Of the machine, memory, speed, logs and the model's shape, left out:", [])
        lines: list[str] = []
        fields = list(self._fields({}))
        for key in [key for key in self.given if key not in self.read]:
            match = equivalent_named(key, fields)
            if key in names:
                groups["Without an effect there, as the rest is set:"].append(key)
            elif re.search(self.table["aside"], key):
                aside.append(key)
            elif match and match[0] == system and match[2]:
                self.unset[" and ".join(match[2])] = f"{key} = {_text(self.given[key])}"
            else:
                lines.append(f"#   {key} = {_text(self.given[key])}")
        for title, keys in groups.items():
            yield from textwrap.wrap(f"# {title} {', '.join(keys)}", 110, subsequent_indent="#   ") if keys else ()
        yield from ["# Not set, and yours to set:"] if self.unset else ()
        yield from (f"#   {field}: {reason}" for field, reason in self.unset.items())
        yield from ["# No field is known to stand for:", *lines] if lines else ()


def translated(path: Path, program: str | None, folder: str | None) -> str:
    """Return the text of a config that corresponds to a config of another system.

    It sets each field that the file decides, or a default of the system that differs from the field's. What changes the
    training and has no counterpart is a line with which the config does not load until it is deleted.

    Args:
        path: The config of the other system: YAML, JSON, or a shell script that starts the training.
        program: The training program; None is what the script, or the file's name or folder, names, or else "rl", if
            the system has no other or the config samples completions.
        folder: The model to use instead of the config's; None keeps the config's.

    Raises:
        ConfigError: If the file cannot be read, is of no system in the table, trains by a method that is not offered,
            or does not say which training it is of.
    """
    settings, system, trainer, notes = _read(path)
    tables = tomllib.loads(files("mcore_rl.config").joinpath("translations.toml").read_text(encoding="utf-8"))
    if system is None or system not in tables:
        raise ConfigError(f"--from {path} has no setting of {', '.join(tables)}. Begin with `mcore-rl init FOLDER`.")
    table = tables[system]
    if program is None and (other := re.search(rf"(?<![a-z])({table.get('others', '.^')})(?![a-z])", trainer)):
        raise ConfigError(
            f"--from {path} trains by {other[1]}, which is not read. If it does not, give --program sft, rm, dpo or rl."
        )
    named = next((name for name, word in PROGRAM_WORDS.items() if re.search(word, trainer)), None)
    program = program or named or (None if system == "TRL" and "num_generations" not in settings else "rl")
    if program is None:
        raise ConfigError(f"{path} does not say which training it is of. Give --program sft, rm, dpo or rl.")
    if program not in table["defaults"] and program != "rl":
        raise ConfigError(f"--from {path}: of {system} only reinforcement learning is read, not {program}.")
    found = _Translation(table, settings, program)
    if folder is not None:
        found.values["model.path"] = folder, "FOLDER"
        found.open.pop("model.path", None)
    lines = [
        f"# {program}, from {path}, of {table['version']}.",
        "# Complete it, and look at it: `mcore-rl config THIS_FILE`. (default): of that system, not in the file.",
        *(f"# {note}" for note in notes),
    ]
    for key, (value, origin) in found.values.items():
        lines.append(f"{key} = {toml_value(value)}" + (f"  # {origin}" if origin else ""))
    if found.open:
        lines.append("# To decide: the file does not start before these lines are deleted.")
        lines += [f"{UNTRANSLATED}{toml_value(key)} = {toml_value(text)}" for key, text in found.open.items()]
    return "\n".join([*lines, *found.left_out(system)]) + "\n"


def _text(value: Any) -> str:
    text = " ".join(shown(str(value)).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _read(path: Path) -> tuple[dict[str, Any], str | None, str, list[str]]:
    """Return the settings of a file that are not null, by dotted key; its system; the words that name its training;
    and notes on what was not read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--from {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"--from {path} is not a text: {error}.") from None
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if not (is_yaml or path.suffix.lower() == ".json" or text.lstrip().startswith("{")):
        return _of_script(path, text)
    try:
        table = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--from {path} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"--from {path} is a {type(table).__name__}, wanted settings by name.")
    settings: dict[str, Any] = {}
    notes: list[str] = []
    bases = table.pop("defaults", None)
    for base in bases if isinstance(bases, list) else [bases]:
        if not (isinstance(base, str) and base.endswith((".yaml", ".yml"))):
            continue  # verl's own defaults
        if (path.parent / base).is_file():
            settings, _, _, notes = _read(path.parent / base)
        else:
            notes.append(f"It builds on {base}, which is not there: the defaults below stand for it.")
    for key, value in _leaves(table, ""):
        # A value, or null, is in the place of all that the base has there.
        settings = {of: known for of, known in settings.items() if of != key and not of.startswith(f"{key}.")}
        settings |= {} if value is None else {key: value}
    system = system_of(text) or system_of("\n".join(settings))
    return settings, system, f"{path.parent.name}/{path.stem}" if system == "TRL" else "", notes


def _of_script(path: Path, text: str) -> tuple[dict[str, Any], str | None, str, list[str]]:
    """Return what `_read` does, of a shell script that starts a training: of its command with the most settings."""
    script = Script(path.parent)
    script.read(text)
    trainings = [words for words in script.commands if not any(word.endswith("_inference") for word in words)]
    words = max(trainings, key=lambda words: sum(map(_is_setting, words)), default=[])
    if not any(map(_is_setting, words)):
        raise ConfigError(f"--from {path} is neither YAML nor JSON, nor a shell script with a command of a training.")
    start = next((i for i, word in enumerate(words) if TRAINER.fullmatch(word) or word == "trl"), 0)
    settings = {key: value for key, value in _arguments(words[:start]) if key == "num_processes"}
    given = dict(_arguments(words[start + 1 :]))
    notes = [f"{file}, which the script reads, is not there." for file in script.missing]
    config = given.pop("config", None)
    if isinstance(config, str):
        if (path.parent / config).is_file():
            settings |= _read(path.parent / config)[0]
        else:
            notes.append(f"{shown(config)}, its config, is not there: give that file to --from.")
    settings |= given
    return settings, system_of("\n".join([*words[start:], *settings])), " ".join(words[start : start + 2]), notes


def _is_setting(word: str) -> bool:
    return word.startswith("--") or re.match(r"[+~]*[a-z]\w*(\.\w+)+=", word) is not None


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a command: `--flag value ...`, `--flag=value`, `--flag` and `a.b=c`; a table's by key."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        name, equals, text = word.partition("=")
        if word.startswith("--") and not equals:
            values = []
            while i < len(words) and not (_is_setting(words[i]) or re.match(r"-[a-zA-Z]", words[i])):
                values.append(_parsed(words[i]))
                i += 1
            name, value = name[2:], True if not values else values[0] if len(values) == 1 else values
        elif _is_setting(word) and not word.startswith("~") and (value := _parsed(text)) is not None:
            name = name.lstrip("+-")
        else:
            continue
        name = name.replace("-", "_")
        yield from _leaves(value, f"{name}.") if isinstance(value, dict) else ((name, value),)


def _parsed(text: str) -> Any:
    """Return the value of a word of a command: a number, a list, a table, true, or text."""
    if UNKNOWN in text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        return None if value == "None" else float(value) if NUMBER.fullmatch(value) else value
    is_table = isinstance(value, dict) and None not in value.values()
    return value if is_table or isinstance(value, bool | int | float | list | None) else text


def _leaves(table: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            # YAML reads 1e-6, which has no dot, as text.
            is_number = isinstance(value, str) and NUMBER.fullmatch(value)
            yield f"{prefix}{name}", float(value) if is_number else value
