"""`mcore-rl <command>`. Neither torch nor Megatron is imported before a command runs, so that help is quick."""

import argparse
import difflib
import functools
import importlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mcore_rl import __version__
from mcore_rl.backend.launcher import error_text, launch_local, under_launcher
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.describe import describe_sections
from mcore_rl.config.section import Section
from mcore_rl.errors import ConfigError, McoreRlError
from mcore_rl.run.commands import COMMANDS, Command
from mcore_rl.run.log_folders import next_log_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Returns:
        The exit status: 0, 2 for an error that the user can mend, otherwise that of the first rank to fail.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"mcore-rl {__version__}\n")
        return 0
    try:
        return run(arguments)
    except McoreRlError as error:
        sys.stderr.write(error_text(error) + "\n")
        return 2


def run(arguments: Sequence[str]) -> int:
    """Run the command that begins `arguments` and return its exit status; McoreRlError for what the user can mend."""
    members = _members(arguments[0])
    if members and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        sys.stdout.write(overview(members))
        return 0
    name, rest = split_name(arguments)
    command = COMMANDS[name]
    args = parser_of(name).parse_intermixed_args(rest)
    if command.program is not None:
        return start_ranks(command, args)
    return int(importlib.import_module(command.module).main(args))


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name in COMMANDS that begins `arguments`, which has one word or two, and what follows it."""
    members = _members(arguments[0])
    num_words = 2 if members else 1
    name = " ".join(arguments[:num_words])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(members or COMMANDS)}."
        raise ConfigError(f"There is no command {name}. {remedy}")
    return name, list(arguments[num_words:])


def start_ranks(command: Command, args: argparse.Namespace) -> int:
    """Be one rank of `command` under a launcher; without one, start its ranks here and wait for them."""
    assert command.program is not None
    argv = [args.config, *args.overrides]
    if under_launcher():
        if args.ranks:
            raise ConfigError(f"--ranks {args.ranks}, but a launcher has started the ranks. Leave it out.")
        return int(importlib.import_module(command.module).main(argv))
    config, ranks = PROGRAMS[command.program].checked_config(Path(args.config), args.overrides, args.ranks)
    return launch_local(command.module, argv, ranks, next_log_dir(Path(config.run_dir)))


def overview(names: Sequence[str] = ()) -> str:
    """Return the help of all commands, or of `names`, which are those of one group."""
    shown = {name: COMMANDS[name] for name in names or COMMANDS}
    group = f" {names[0].split()[0]}" if names else ""
    width = max(map(len, shown))
    commands = "\n".join(f"  {name:<{width}} {command.summary}" for name, command in shown.items())
    about = "Pretraining and reinforcement learning of Mixture-of-Experts models on Megatron-Core.\n\n"
    example = next(iter(shown.values())).example
    return (
        f"usage: mcore-rl{group} <command> ...\n\n{'' if group else about}{commands}\n\n"
        f"`mcore-rl{group} <command> --help` explains one. An example:\n  {example}\n"
    )


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command; where it has a config, the help ends in the config's fields."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"mcore-rl {name}",
        description=f"{command.summary}\n\nexample:\n  {command.example}",
        epilog=fields_help(command.config) if command.config else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def fields_help(config: type[Section]) -> str:
    """Return the help on every field of the config by section: key, default, type, meaning."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    wrap = functools.partial(textwrap.wrap, width=width, break_on_hyphens=False)
    paragraphs = ["The fields of CONFIG, with their defaults:"]
    for section in describe_sections(config):
        title = f"[{section.key}]  {section.meaning}" if section.key else section.meaning
        lines = wrap(title)
        for doc in section.fields:
            lines.append(f"  {doc.key} = {doc.default}    ({doc.type})")
            lines += wrap(doc.meaning, initial_indent=" " * 6, subsequent_indent=" " * 6)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _members(group: str) -> list[str]:
    """Return the names of the commands of a group, such as `data`; none where it is a command or nothing."""
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


if __name__ == "__main__":
    sys.exit(main())
