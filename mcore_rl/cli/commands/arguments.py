"""Arguments shared by several commands."""

import argparse

from mcore_rl.config.trainings import TRAININGS
from mcore_rl.launch.arguments import positive

CONFIG_HELP = "the config: a .toml file, or the name of a recipe (`mcore-rl recipes`)"


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config file, fields to override, the number of local ranks, and how much the console shows."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)
    add_ranks(parser)
    for option, name, text in (
        ("-q", "quiet", "show warnings alone on the console"),
        ("-v", "verbose", "show the details of the machine too"),
    ):
        parser.add_argument(
            option,
            f"--{name}",
            dest="console",
            action="append_const",
            const=f"log.console={name}",
            default=[],
            help=f"{text}; log.console={name}",
        )


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing but --help."""


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
