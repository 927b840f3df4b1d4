"""`mcore-rl <command>`. The modules of a command are imported only when it runs, so that help is quick."""

import argparse
import difflib
import importlib
import io
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Sequence

from mcore_rl import __version__, errors
from mcore_rl.cli.commands import COMMAND_GROUPS, COMMANDS
from mcore_rl.config.recipes import recipes
from mcore_rl.storage.files import limit_reached, machine_error, open_standard_streams

WIDTH = 80
"""Width of the overview in columns."""
MIN_WIDTH = 60
"""Narrowest list of recipes in columns."""
ALL_FIELDS = "--help-all"
FIELD = re.compile(r"--(run_dir|[^=]*\.[^=]*)=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script; return its status (EXIT_STATUSES in errors.py) or that of the first rank that failed."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    open_standard_streams()
    # Like standard error, show letters that the terminal's encoding lacks by their code.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return run(arguments)
        finally:
            sys.stdout.flush()  # now, where a missing reader is caught, and not at the interpreter's exit
    except errors.McoreRlError as error:
        return _refused(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"{errors.after_echo()}interrupted\n")
        return errors.INTERRUPTED_STATUS
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _drop_output()
        return errors.PIPE_CLOSED_STATUS
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        explained = machine_error(error)
        if explained is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return _refused(explained)


def _refused(error: errors.McoreRlError) -> int:
    text = errors.error_text(error)
    sys.stderr.write(f"{text}{limit_reached(text)}\n")
    return errors.REFUSED_STATUS


def _drop_output() -> None:
    """Send the rest of standard output nowhere: the interpreter's exit would fail again, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` begin with, and return its exit status; McoreRlError for a user's mistake."""
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
    if command.config and ALL_FIELDS in rest:
        fields = importlib.import_module("mcore_rl.cli.fields").fields_help(command.config)
        sys.stdout.write(f"{parser_of(name).format_help()}\n{fields}\n")
        return 0
    # `--mesh.tp=2` is the field mesh.tp: options have no dot in their names.
    words = [word.removeprefix("--") if FIELD.match(word) else word for word in rest]
    args = parser_of(name).parse_intermixed_args(words)
    if command.program is not None:
        return int(importlib.import_module("mcore_rl.cli.start_ranks").start_ranks(command, args))
    return int(getattr(importlib.import_module(command.module), command.main)(args))


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split `arguments` into a command's name in COMMANDS, one or two words, and the remaining words."""
    members = _members(arguments[0])
    num_words = 2 if members else 1
    name = " ".join(arguments[:num_words])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(members or COMMANDS)}."
        raise errors.ConfigError(f"There is no command {name}. {remedy}")
    return name, list(arguments[num_words:])


def overview(names: Sequence[str] = ()) -> str:
    """Return the help for all commands by group, or for `names`, the commands of one group."""
    group = f" {names[0].split()[0]}" if names else ""
    width = max(map(len, COMMANDS))
    lines = [f"usage: mcore-rl{group} <command> ...", ""]
    if not names:
        lines += textwrap.wrap(
            "Pretraining and reinforcement learning of Mixture-of-Experts models on Megatron-Core.", WIDTH
        )
    for title, members in {"": names}.items() if names else COMMAND_GROUPS.items():
        lines += ["", f"{title}:"] if title else []
        lines += [f"  {name:<{width}}  {COMMANDS[name].brief}" for name in members]
    example = COMMANDS[names[0]].example if names else "mcore-rl rl tiny_moe/grpo rl.loss.kind=gspo -v"
    lines += ["", f"`mcore-rl{group} <command> --help` explains a command. An example:", f"  {example}"]
    return "\n".join(lines) + "\n"


def list_recipes(args: argparse.Namespace) -> int:
    """Print every recipe with its summary; `mcore-rl recipes` has no arguments."""
    found = recipes()
    indent = max(len(recipe.name) for recipe in found) + 2
    width = max(shutil.get_terminal_size().columns, MIN_WIDTH)
    for recipe in found:
        lines = textwrap.wrap(recipe.summary, width - indent, break_on_hyphens=False) or [""]
        sys.stdout.write(f"{recipe.name:<{indent}}" + f"\n{' ' * indent}".join(lines) + "\n")
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command; if it has a config, the help says how to see the config's fields."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"mcore-rl {name}",
        description=f"{textwrap.fill(command.summary, WIDTH)}\n\nexample:\n  {command.example}",
        epilog="`mcore-rl fields KEY` explains a section or a field of CONFIG, as optim.lr."
        if command.config
        else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.arguments(parser)
    if command.config:
        parser.add_argument(ALL_FIELDS, action="store_true", help="show this, and every field of CONFIG")
    return parser


def _reader_is_gone() -> bool:
    """Return whether standard output is a pipe and its reader, such as `head`, has ended."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _members(group: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


if __name__ == "__main__":
    sys.exit(main())
