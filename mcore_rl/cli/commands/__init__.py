"""The commands of `mcore-rl` by subject: what they are for, what they take, and the function that runs them.

Neither configs nor torch are imported here, so that help and completion are quick; the module of a command is imported
when it runs.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.trainings import TRAININGS
from mcore_rl.launch.arguments import positive

CONFIG_HELP = "the config: a .toml file, or the name of a recipe (`mcore-rl recipes`)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `mcore-rl`."""

    brief: str
    """Purpose in a few words, for the list of all commands, which is 80 columns wide."""
    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    """Declares the arguments."""
    module: str
    """Module of `main`, or, with `program`, a module with a `main(argv)` that runs one rank of the command."""
    main: str = "main"
    """Function of the module that takes the parsed arguments and returns the exit status."""
    program: str | None = None
    """Name in PROGRAMS of the training program that the command starts ranks of; None if it runs in this process."""
    given: Callable[[argparse.Namespace], tuple[str, list[str]]] = lambda args: (
        args.config,
        [*args.overrides, *args.console],
    )
    """Return the config and the overrides for the arguments of a command with `program`."""
    other_programs: tuple[str, ...] = ()
    """Names of further training programs with configs that the command accepts; the config's fields decide."""
    config: str = ""
    """Name in KINDS (config/kinds.py) of the config that the help explains field by field; "" without a config."""


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Declare fields that override the config file's."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Declare the number of local ranks."""
    parser.add_argument("--ranks", type=positive, help="local ranks; default: the fewest that the mesh needs")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare the training program that the config is for."""
    parser.add_argument(
        "--program", choices=TRAININGS, help="whose config it is (default: the program that has its fields)"
    )
