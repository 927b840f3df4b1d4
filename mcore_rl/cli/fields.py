"""`mcore-rl fields` and `--help-all` explain the fields of configs; `mcore-rl completion` completes them in a shell."""

import argparse
import difflib
import functools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from mcore_rl.cli.cli import parser_of
from mcore_rl.cli.commands import COMMANDS
from mcore_rl.config import TRAININGS
from mcore_rl.config.describe import SectionDoc, describe, describe_sections
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.recipes import CLUSTERS, recipe_files, recipes
from mcore_rl.errors import ConfigError

KEY_WIDTH = 26
"""Width of the section names in the list of sections, in columns."""
SCRIPT = """\
# Completion of mcore-rl for bash: source it, or put it where bash-completion looks.
_mcore_rl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} name=${{COMP_WORDS[1]}} words
    case $COMP_CWORD,$name in
        1,*) words="{commands}" ;;
{groups}
        *)
            case $name in {prefixes}) name+=" ${{COMP_WORDS[2]}}" ;; esac
            case $name in
{cases}
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    # A field goes on behind its sign; files complete what no word does.
    [[ ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o default -F _mcore_rl mcore-rl
"""
ZSH = """\
# Completion of mcore-rl for zsh: source it. zsh runs the functions of bash.
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
autoload -U +X bashcompinit && bashcompinit
"""
FISH = """\
# Completion of mcore-rl for fish: put it into ~/.config/fish/completions/mcore-rl.fish.
function __mcore_rl_after
    set -l words (commandline -opc)
    set -l last (math 1 + (count $argv))
    test "$words[2..$last]" = "$argv"
end
complete -c mcore-rl -n 'test (count (commandline -opc)) -eq 1' -f -a '{commands}'
{groups}
{cases}
"""


def show_fields(args: argparse.Namespace) -> int:
    """Print help for the section or field `args.key`; without a key, list all sections."""
    kinds = [args.program] if args.program else [*TRAININGS]
    if not args.key:
        sections = [doc for kind in kinds for doc in describe_sections(KINDS[kind]) if doc.key]
        first = {doc.key: doc.meaning for doc in reversed(sections)}
        columns = shutil.get_terminal_size().columns
        for key in dict.fromkeys(doc.key for doc in sections):
            meaning = textwrap.shorten(first[key], max(20, columns - KEY_WIDTH - 1), placeholder=" ...")
            sys.stdout.write(f"{key:<{KEY_WIDTH}} {meaning}\n")
        return 0
    found = _texts(kinds, args.key) or _texts(list(KINDS), args.key)
    if not found:
        docs = [doc for kind in kinds for doc in describe_sections(KINDS[kind])]
        keys = [key for doc in docs for key in (doc.key, *(field.key for field in doc.fields))]
        near = difflib.get_close_matches(args.key, keys, n=1)
        hint = f"Did you mean {near[0]}?" if near else "`mcore-rl fields` lists the sections."
        raise ConfigError(f"There is no section and no field {args.key}. {hint}")
    for text, readers in found.items():
        if len(found) > 1:
            sys.stdout.write(f"--- {', '.join(readers)}\n")
        sys.stdout.write(text + "\n")
    return 0


def fields_help(kind: str) -> str:
    """Return help for every field of the config `kind`, a name in KINDS, by section: key, default, type, meaning."""
    sections = map(section_help, describe_sections(KINDS[kind]))
    return "\n\n".join(["The fields of CONFIG, with their defaults:", *sections])


def section_help(section: SectionDoc) -> str:
    """Return help for a section: its meaning, then key, default, type and meaning of its fields."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    wrap = functools.partial(textwrap.wrap, width=width, break_on_hyphens=False)
    meaning = " ".join(section.meaning.split())
    lines = wrap(f"[{section.key}]  {meaning}" if section.key else meaning)
    for doc in section.fields:
        kinds = f"    with kind {doc.choice}" if doc.choice else ""
        lines.append(f"  {doc.key} = {doc.default}    ({doc.type}){kinds}")
        lines += wrap(doc.meaning, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _texts(kinds: Sequence[str], key: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind in kinds:
        docs = describe_sections(KINDS[kind])
        # A section and those inside it, or else a field's section with the field alone.
        sections = [doc for doc in docs if doc.key == key or doc.key.startswith(f"{key}.")] or [
            SectionDoc(key=doc.key, meaning=doc.meaning, fields=fields)
            for doc in docs
            if (fields := tuple(field for field in doc.fields if field.key == key))
        ]
        if sections:
            found.setdefault("\n\n".join(map(section_help, sections)), []).append(kind)
    return found


def print_completion(args: argparse.Namespace) -> int:
    """Print the functions for `args.shell`: bash, zsh or fish."""
    groups: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    members = {name: words for name, words in groups.items() if words}
    group, case, script = '        2,{}) words="{}" ;;', f'{16 * " "}"{{}}") words="{{}}" ;;', SCRIPT
    if args.shell == "fish":
        after, script = "complete -c mcore-rl -n '__mcore_rl_after {}", FISH
        group, case = f"{after}; and test (count (commandline -opc)) -eq 2' -f -a '{{}}'", f"{after}' -a '{{}}'"
    # zsh knows no compopt: it adds a space to all words or to none.
    text = script.replace("-o default", "-o default -o nospace") if args.shell == "zsh" else script
    text = (ZSH if args.shell == "zsh" else "") + text
    sys.stdout.write(
        text.format(
            commands=" ".join(groups),
            groups="\n".join(group.format(name, " ".join(words)) for name, words in members.items()),
            prefixes="|".join(members),
            cases="\n".join(case.format(name, " ".join(_words(name))) for name in COMMANDS),
        )
    )
    return 0


def _words(name: str) -> Iterator[str]:
    actions = parser_of(name)._actions
    for action in actions:
        yield from action.option_strings
        if action.dest == "cluster":
            yield from recipe_files(CLUSTERS)
    if any(action.metavar in ("CONFIG", "STUDY") for action in actions):
        yield from (recipe.name for recipe in recipes())
    if name == "fields":
        sections = (doc for program in TRAININGS for doc in describe_sections(KINDS[program]) if doc.key)
        yield from dict.fromkeys(doc.key for doc in sections)
    if kind := COMMANDS[name].config:
        yield from dict.fromkeys(f"{doc.key}=" for doc in describe(KINDS[kind]))
