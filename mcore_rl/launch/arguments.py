"""The arguments of `mcore-rl launch`, `mcore-rl jobs` and `mcore-rl attach`."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from mcore_rl.config.recipes import cluster_file
from mcore_rl.config.trainings import TRAININGS

PIPELINE = "pipeline"


def number_from(least: int, most: float = math.inf, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return a parser of a finite number from `least` to `most`, which argparse refuses otherwise."""
    wanted = f"{least} or more" if most == math.inf else f"a number from {least} to {most:g}"

    def number(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text}, wanted {wanted}")
        return value

    return number


positive = number_from(1)
"""Parser of a count."""


def launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config, a cluster, and options of the job."""
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="config of the training, or of a pipeline: a .toml file, or the name of a recipe (`mcore-rl recipes`)",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")
    parser.add_argument(
        "--cluster",
        type=cluster_file,
        required=True,
        metavar="CLUSTER",
        help="where it runs: a .toml file, or an example of launch/clusters by its name; docs/slurm.md explains it",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes (a pipeline's stages have their own)")
    parser.add_argument(
        "--program",
        choices=[*TRAININGS, PIPELINE],
        help="what reads the config; default: the program that has its fields, or else what its file is called before "
        "the first _ or . (pretrain.toml, rl_long.toml; grpo and gspo are rl)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the script that would be submitted and Slurm's answer to it; write nothing",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run `mcore-rl doctor` on N nodes instead of the training, wait for it, and show what it finds and what "
        "differs between the nodes; status 1 when they are not alike or something is broken",
    )
    _slurm(parser.add_argument_group("the job"))
    _servers(parser.add_argument_group("a heterogeneous job: rollout servers beside the trainer, one task a node"))
    _allowances(parser.add_argument_group("what is refused unless it is allowed"))


def jobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs to list."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        default=[Path("runs")],
        metavar="RUN",
        help="a run_dir, or a folder of them (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")


def attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a job and the program on its nodes."""
    parser.add_argument("job", metavar="JOB", help="id of a running job, or the run_dir of its run")
    parser.add_argument("--node", default="", metavar="HOST", help="node (default: the job's first)")
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="command and its arguments (default: a shell); options of its own after --, as -- nvidia-smi --list-gpus",
    )


def _slurm(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--name", default="", help="the job's name (default: program and folder)")
    job.add_argument("--time", default="", help="limit of one attempt (default: slurm.time of the cluster)")
    job.add_argument(
        "--array",
        default="",
        metavar="INDICES",
        help="one run for each index, in <run_dir>/<index>, as 0-7; 0-7%%2: two at a time",
    )
    job.add_argument(
        "--array-field", default="train.seed", metavar="KEY", help="field that gets the index (default train.seed)"
    )
    job.add_argument(
        "--dependency", default="", metavar="afterok:ID", help="start when those jobs have ended as stated"
    )
    job.add_argument("--exclude", default="", metavar="NODES", help="nodes to avoid")
    job.add_argument("--nodelist", default="", metavar="NODES", help="nodes to use")
    job.add_argument("--mail-user", default="", metavar="ADDRESS", help="address for mail about the job")
    job.add_argument("--mail-type", default="", metavar="EVENTS", help="events that are mailed, as END,FAIL,REQUEUE")
    for name in ("reservation", "partition", "account", "qos"):
        job.add_argument(f"--{name}", default="", metavar="NAME", help=f"as sbatch's --{name}")


def _servers(servers: argparse._ArgumentGroup) -> None:
    servers.add_argument("--servers", type=positive, default=0, metavar="N", help="number of server nodes")
    servers.add_argument(
        "--server-command",
        default="",
        metavar="LINE",
        help="command that runs on each server node (default: the servers of rl.engine.kind, whose addresses "
        "rl.engine.urls gets)",
    )
    servers.add_argument(
        "--server-field",
        default="",
        metavar="KEY",
        help="field of the config that gets their host names, separated by commas; SERVER_HOSTS always has them",
    )


def _allowances(allowances: argparse._ArgumentGroup) -> None:
    allowances.add_argument("--force", action="store_true", help="allow a memory estimate above what a GPU has")
    allowances.add_argument(
        "--allow-tp-across-nodes", action="store_true", help="allow tensor-parallel groups across nodes"
    )
    allowances.add_argument(
        "--allow-dirty", action="store_true", help="allow code that is not committed; its difference is recorded"
    )
