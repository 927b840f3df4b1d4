"""`mcore-rl <command>`. Neither torch nor Megatron is imported before a command runs, so that help is quick."""

import argparse
import difflib
import functools
import importlib
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mcore_rl import __version__
from mcore_rl.backend.launcher import error_text, launch_local, under_launcher
from mcore_rl.checks.inputs import absent_inputs
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.run import refuse
from mcore_rl.config.describe import describe_sections
from mcore_rl.config.load import kind_of
from mcore_rl.config.section import Section
from mcore_rl.errors import (
    INTERRUPTED_STATUS,
    PIPE_CLOSED_STATUS,
    REFUSED_STATUS,
    ConfigError,
    McoreRlError,
)
from mcore_rl.plan.local import local_memory_violations
from mcore_rl.run.commands import COMMANDS, Command
from mcore_rl.run.log_folders import next_log_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Returns:
        The exit status, as EXIT_STATUSES in errors.py explains it; of ranks, that of the first to fail.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        try:
            return run(arguments)
        finally:
            sys.stdout.flush()  # here, where a reader that is gone is caught, and not at the interpreter's end
    except McoreRlError as error:
        sys.stderr.write(error_text(error) + "\n")
        return REFUSED_STATUS
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # What is left in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED_STATUS


def run(arguments: Sequence[str]) -> int:
    """Run the command that begins `arguments` and return its exit status; McoreRlError for what the user can mend."""
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"mcore-rl {__version__}\n")
        return 0
    members = _members(arguments[0])
    if members and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        sys.stdout.write(overview(members))
        return 0
    name, rest = split_name(arguments)
    command = COMMANDS[name]
    args = parser_of(name).parse_intermixed_args([_as_field(word) for word in rest])
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
    argv = [args.config, *args.overrides]
    if under_launcher():
        if args.ranks:
            raise ConfigError(f"--ranks {args.ranks}, but a launcher has started the ranks. Leave it out.")
        return int(importlib.import_module(command.module).main(argv))
    program = PROGRAMS[_program_of(command, Path(args.config), args.overrides)]
    config, ranks = program.checked_config(Path(args.config), args.overrides, args.ranks)
    trains = command.module == program.module
    refuse(
        [
            *absent_inputs(config),
            *local_memory_violations(config, ranks, program.seq_length(config), trains=trains),
        ]
    )
    return launch_local(command.module, argv, ranks, next_log_dir(Path(config.run_dir)), [command.module])


def _program_of(command: Command, config: Path, overrides: Sequence[str]) -> str:
    """Return the name in PROGRAMS whose ranks the command starts with this config."""
    assert command.program is not None
    if not command.other_programs:
        return command.program
    return kind_of(config, overrides, (command.program, *command.other_programs))


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


def _as_field(word: str) -> str:
    """Return `--mesh.tp=2` as `mesh.tp=2`; options have no dot in their names."""
    option, equals, _ = word.partition("=")
    return word.removeprefix("--") if equals and (option == "--run_dir" or "." in option) else word


def _reader_is_gone() -> bool:
    """Return whether standard output is a pipe whose reader, such as `head`, has ended."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported always
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _members(group: str) -> list[str]:
    """Return the names of the commands of a group, such as `data`; none where it is a command or nothing."""
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


if __name__ == "__main__":
    sys.exit(main())
