"""Arguments of the commands that plan training and write a config for it."""

import argparse
import math
from pathlib import Path

from mcore_rl.cli.commands.arguments import CONFIG_HELP, add_overrides, add_program
from mcore_rl.config.recipes import cluster_file
from mcore_rl.launch.arguments import positive


def init_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a model folder, GPUs, and a training program; or the config of another system."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="the model: as of model.path")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="write what can be said of a config of verl, TRL, NeMo-RL, OpenRLHF or slime, YAML or JSON, and list the "
        "rest",
    )
    parser.add_argument(
        "--gpus",
        metavar="NxKIND",
        help="GPUs that it is for, as 8xH100; default: those of this machine, or its CPU",
    )
    add_program(parser)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config, a cluster, a number of nodes, and what to print about them."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs="?",
        help=f"{CONFIG_HELP}; or, with --gpus, a model, as of model.path: does a training of it fit?",
    )
    add_overrides(parser)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--cluster",
        type=cluster_file,
        metavar="CLUSTER",
        help="where it would run: a .toml file, or an example of launch/clusters by its name (example_h100)",
    )
    place.add_argument(
        "--gpus", metavar="NxKIND", help="instead of a cluster and a number of nodes: GPUs, as 8xH100"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=positive, metavar="N", help="number of nodes")
    size.add_argument(
        "--world",
        type=world_sizes,
        metavar="A..B",
        help="a line for each doubling of the number of GPUs from A to B",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--search",
        action="store_true",
        help="try every mesh, micro-batch and kind of recomputation, and list those that fit and are fast",
    )
    what.add_argument("--rank", type=rank, metavar="R", help="what this one rank is, and has")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="also build Megatron's modules of the first, middle and last stage (of one rank with --rank) without "
        "GPUs and without their memory, record Megatron's own schedule, and show where the closed forms differ; takes "
        "seconds, and torch",
    )
    parser.add_argument(
        "--lora-rank",
        type=positive,
        metavar="R",
        help="plan the training of low-rank adapters of this rank in the place of all weights: lora.rank=R",
    )
    parser.add_argument(
        "--completion-tokens",
        type=positive,
        metavar="N",
        help="mean length of a completion, for the time of rollouts; default: half of the longest",
    )
    parser.add_argument(
        "--server-nodes",
        type=positive,
        default=0,
        metavar="N",
        help="nodes of inference servers beside the trainer's",
    )
    parser.add_argument(
        "--imbalance",
        type=multiple,
        metavar="X",
        help="tokens of the fullest rank's experts, as a multiple of the mean (1.3), for time and memory; default: "
        "that of a calibrated cluster, else even, with the cost of several",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="without CONFIG: fit the rates of the cluster to this finished run on it, and print them for its file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --calibrate: also write the cluster's file with the rates",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.svg",
        help="also draw the pipeline's schedule: who computes when",
    )
    add_program(parser)


def world_sizes(text: str) -> tuple[int, int]:
    """Parse a range of world sizes such as `8..1024`."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and last.isdecimal() and dots) or not 0 < int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of sizes. Write 8..1024.")
    return int(first), int(last)


def rank(text: str) -> int:
    """Parse a rank; argparse refuses negative numbers."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}, wanted 0 or more")
    return number


def multiple(text: str) -> float:
    """Parse the ratio of a maximum to a mean; argparse refuses numbers below 1."""
    number = float(text)
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}, wanted 1 or more")
    return number
