"""Settings of other programs: their names for ours, and the command lines and shell scripts that give them."""

import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.errors import ConfigError

INNER = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
"""A command or an arithmetic expression in `$(...)`, or a variable in `${...}`."""
TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\r?\n)+)|(?P<comment>\#[^\n]*)|(?P<operator>\n|;;?|&&|\|\|?|&>?>?|[<>]+&?|[()])
    |(?P<word>(?:'[^']*'|"(?:\\.|{INNER}|[^"\\])*"|{INNER}|`[^`]*`|\\.|[^\s;&|()<>'"`\\])+)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
PART = re.compile(rf"""'([^']*)'|("(?:\\.|{INNER}|[^"\\])*")|({INNER}|`[^`]*`|\$\w+|\$[@*#?])|\\(.)|(.)""", re.DOTALL)
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
OPENING, CLOSING = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
KEYWORDS = {"then", "do", "else", "elif", "!", "export", "local", "readonly", "declare", "exec", *OPENING, *CLOSING}
UNKNOWN = "\0"
"""Stands in a word before a part that only a run of the script would know, such as `$(date)`."""


@dataclass(slots=True)
class Script:
    """A script that is read: its variables so far, and its commands as words."""

    folder: Path
    """Folder of the script, in which the files that it sources are looked for."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that the script sources and that are not there."""
    depth: int = 0
    """Number of conditions, loops and functions around the place that is read: what they assign is not known."""

    def read(self, text: str) -> None:
        """Read a script's text: its commands are added in their order, and those in here-documents after them."""
        bodies: list[str] = []
        is_literal: list[bool] = []

        def taken(match: re.Match[str]) -> str:
            bodies.append(match[4])
            is_literal.append(bool(match[1]))
            return f"<<{len(bodies) - 1} {match[3]}\n"

        tokens = [
            (match.lastgroup, match.group()) for match in TOKEN.finditer(HEREDOC.sub(taken, text.replace("\r\n", "\n")))
        ]
        words: list[str] = []
        i = 0
        while i < len(tokens):
            kind, token = tokens[i]
            i += 1
            if kind == "word" and token.endswith("=") and tokens[i : i + 1] == [("operator", "(")]:
                end = next((k for k in range(i, len(tokens)) if tokens[k][1] == ")"), len(tokens))
                items = [word for of, text in tokens[i + 1 : end] if of == "word" for word in self.expanded(text)]
                self._assign(token.rstrip("+="), items, token.endswith("+="))
                i = end + 1
            elif kind == "word":
                words.append(token)
            elif kind == "operator" and token.startswith(("<", ">", "&>")):
                while i < len(tokens) and tokens[i][0] == "space":
                    i += 1
                target = tokens[i][1] if i < len(tokens) else ""
                i += 1
                if token == "<<" and target.isdigit() and words[:1] == ["read"]:
                    body = bodies[int(target)]
                    if not is_literal[int(target)]:
                        body = "".join(self._parts('"' + body.replace('"', '\\"') + '"'))
                    self._assign(words[-1], [body])
                    words, bodies[int(target)] = [], ""
            elif kind == "operator":
                self._command(words)
                words = []
        self._command(words)
        for body in bodies:
            Script(self.folder, self.variables, self.commands, self.missing, 1).read(body)

    def _command(self, words: list[str]) -> None:
        """Take a command: an assignment, a file that is sourced, or words to keep."""
        while words and (words[0] in KEYWORDS or words[0].endswith("()")):
            self.depth += (words[0] in OPENING) - (words[0] in CLOSING)
            words = words[1:]
        while words and (found := ASSIGNMENT.fullmatch(words[0])):
            self._assign(found[1], self.expanded(found[3], split=False), bool(found[2]))
            words = words[1:]
        if words[:1] and words[0] in ("source", ".") and len(words) > 1:
            name = "".join(self.expanded(words[1], split=False))
            # A folder that is not known is taken for the script's own.
            known = name.rpartition("\1")[2].lstrip("/") if UNKNOWN in name else name
            path = self.folder / known
            if path.is_file():
                self.read(path.read_text(encoding="utf-8", errors="replace"))
            else:
                self.missing.append(known)
        elif words:
            command = [part for word in words for part in self.expanded(word)]
            self.commands.append(command)
            if "-c" in command[:-1] and any(re.fullmatch(r"(.*/)?(ba)?sh", word) for word in command):
                self.read(command[command.index("-c") + 1])

    def _assign(self, name: str, values: list[str], is_added: bool = False) -> None:
        if self.depth > 0:
            values = [_unknown(f"${name}")]
        self.variables[name] = (self.variables.get(name, []) if is_added else []) + values

    def expanded(self, word: str, split: bool = True) -> list[str]:
        """Return the words that a word becomes; what is not known is marked by UNKNOWN."""
        bare = word[1:-1] if word[:1] == word[-1:] == '"' else word
        if found := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$(\w+)|\$\{(\w+)\}", bare):
            values = self.variables.get(found[1] or found[2] or found[3])
            if found[1] or (split and bare == word and values is not None and UNKNOWN not in "".join(values)):
                # An array that nothing has set is empty in a shell too; a variable may come from its environment.
                return list(values or ()) if found[1] else " ".join(values or ()).replace("\\\n", " ").split()
        if split and bare in ("$@", "$*", "${@}", "${@:1}", "${@:2}"):
            return []
        return ["".join(self._parts(word))]

    def _parts(self, word: str) -> Iterator[str]:
        for single, double, inner, escaped, plain in PART.findall(word):
            if double:
                yield from self._parts(double[1:-1].replace("'", "\\'").replace("\\\n", ""))
            elif inner:
                yield self._value(inner)
            else:
                yield single or escaped or plain

    def _value(self, inner: str) -> str:
        """Return what a `$...` stands for."""
        if inner in ("$(pwd)", "`pwd`"):
            return "."
        if inner.startswith("$((") and inner.endswith("))"):
            shown = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: self._value(f"${name[1]}"), inner[3:-2])
            if re.fullmatch(r"(?:\d{1,18}|[-+/%()\s]|\*(?!\*))+", shown):
                try:
                    # Digits, brackets and the four operations only, so that nothing else can be evaluated.
                    return str(eval(shown.replace("/", "//")))
                except (SyntaxError, ArithmeticError, TypeError):
                    pass
            return _unknown(inner)
        found = re.fullmatch(r"\$\{?(\w+)(?::?([-=+?])(.*))?\}?", inner.removesuffix("}"), re.DOTALL)
        if found is None:
            return _unknown(inner)
        name, operator, default = found[1], found[2], found[3]
        values = self.variables.get(name)
        if not values and operator in ("-", "="):
            values = self.expanded(default, split=False)
        elif values is None:
            values = {"HOME": [str(Path.home())], "PWD": ["."]}.get(name)
        return _unknown(inner) if values is None else " ".join(values)


def _unknown(text: str) -> str:
    return f"{UNKNOWN}{text}\1"


def shown(text: str) -> str:
    """Return a text without the marks of parts that are not known."""
    return text.replace(UNKNOWN, "").replace("\1", "")


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
