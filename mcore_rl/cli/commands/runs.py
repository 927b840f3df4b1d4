"""Arguments of the commands about runs: a config, this machine, a study, a report."""

import argparse
from pathlib import Path

from mcore_rl.cli.commands.arguments import CONFIG_HELP, add_overrides, add_program, add_ranks


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a training program, and the program that the config is for."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)
    add_ranks(parser)
    add_program(parser)


def study_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a study and fields to override."""
    parser.add_argument("config", metavar="STUDY", help="the study, a file or the name of a recipe")
    add_overrides(parser)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the form of the output."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with every patch and its reason"
    )
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="DIR",
        help="be one node of a job (`mcore-rl launch --check`): write the findings to DIR, where the first node names "
        "what differs between them",
    )


def fields_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a section or a field, and the kind of config."""
    parser.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="a section or a field, as rl.loss or optim.lr"
    )
    add_program(parser)


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shell."""
    parser.add_argument("shell", choices=["bash"], help="the shell that completes")


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare runs, and the page to write or to serve."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the run_dir of a training")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )
    kind.add_argument(
        "--serve",
        action="store_true",
        help="show a page that follows the runs, in browsers on this machine, until Ctrl-C",
    )
    parser.add_argument("--port", type=int, help="with --serve: the port (default: any that is free)")
