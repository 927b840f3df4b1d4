"""Shell scripts that start a training of another system: the words of their commands, read without running anything."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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

        def taken(match: re.Match[str]) -> str:
            bodies.append(match[4])
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
                    self._assign(words[-1], [bodies[int(target)]])
                    words = []
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
                return list(values or ()) if found[1] else list(_split(" ".join(values or ())))
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


def _split(text: str) -> Iterator[str]:
    """Yield the words of a variable's value, whose quotes are already gone."""
    yield from text.replace("\\\n", " ").split()


def shown(text: str) -> str:
    """Return a text without the marks of parts that are not known."""
    return text.replace(UNKNOWN, "").replace("\1", "")
