"""`mcore-rl completion bash`: bash functions that complete commands, options, recipes and fields."""

import argparse
import sys
from collections.abc import Iterator

from mcore_rl.cli.cli import parser_of
from mcore_rl.cli.commands.table import COMMANDS
from mcore_rl.config.describe import describe, describe_sections
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.recipes import CLUSTERS, recipe_files, recipes
from mcore_rl.config.trainings import TRAININGS

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


def main(args: argparse.Namespace) -> int:
    """Print the functions; `args.shell` is always bash."""
    groups: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    members = {name: words for name, words in groups.items() if words}
    sys.stdout.write(
        SCRIPT.format(
            commands=" ".join(groups),
            groups="\n".join(
                f'        2,{name}) words="{" ".join(words)}" ;;' for name, words in members.items()
            ),
            prefixes="|".join(members),
            cases="\n".join(
                f'                "{name}") words="{" ".join(_words(name))}" ;;' for name in COMMANDS
            ),
        )
    )
    return 0


def _words(name: str) -> Iterator[str]:
    """Yield the words that can follow a command: options, names of recipes and clusters, and fields."""
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
