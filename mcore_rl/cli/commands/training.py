"""The commands that train, plan and look at runs, and those of a cluster."""

import argparse
from pathlib import Path

from mcore_rl.cli.commands import CONFIG_HELP, Command, add_overrides, add_program, add_ranks
from mcore_rl.config.recipes import cluster_file
from mcore_rl.config.trainings import TRAININGS
from mcore_rl.launch.arguments import attach_arguments, jobs_arguments, launch_arguments, number_from, positive


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


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing but --help."""


def _init_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--gpus", metavar="NxKIND", help="GPUs that it is for, as 8xH100; default: those of this machine, or its CPU"
    )
    add_program(parser)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
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
    place.add_argument("--gpus", metavar="NxKIND", help="instead of a cluster and a number of nodes: GPUs, as 8xH100")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=positive, metavar="N", help="number of nodes")
    size.add_argument(
        "--world", type=world_sizes, metavar="A..B", help="a line for each doubling of the number of GPUs from A to B"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--search",
        action="store_true",
        help="try every mesh, micro-batch and kind of recomputation, and list those that fit and are fast",
    )
    what.add_argument("--rank", type=number_from(0), metavar="R", help="what this one rank is, and has")
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
        "--server-nodes", type=positive, default=0, metavar="N", help="nodes of inference servers beside the trainer's"
    )
    parser.add_argument(
        "--imbalance",
        type=number_from(1, kind=float),
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
        "--output", type=Path, metavar="FILE", help="with --calibrate: also write the cluster's file with the rates"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan as JSON")
    add_program(parser)


def world_sizes(text: str) -> tuple[int, int]:
    """Parse a range of world sizes such as `8..1024`."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and last.isdecimal() and dots) or not 0 < int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of sizes. Write 8..1024.")
    return int(first), int(last)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)
    add_ranks(parser)
    add_program(parser)


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="STUDY", help="the study, a file or the name of a recipe")
    add_overrides(parser)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every patch and its reason")
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="DIR",
        help="be one node of a job (`mcore-rl launch --check`): write the findings to DIR, where the first node names "
        "what differs between them",
    )


def _fields_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="a section or a field, as rl.loss or optim.lr"
    )
    add_program(parser)


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash"], help="the shell that completes")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the run_dir of a training")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default report.html)")
    kind.add_argument(
        "--serve",
        action="store_true",
        help="show a page that follows the runs, in browsers on this machine, until Ctrl-C",
    )
    parser.add_argument("--port", type=int, help="with --serve: the port (default: any that is free)")


def _training(name: str, *, brief: str, summary: str, example: str) -> Command:
    return Command(
        brief=brief,
        summary=summary,
        example=example,
        arguments=config_arguments,
        module=TRAININGS[name],
        program=name,
        config=name,
    )


TRAIN: dict[str, Command] = {
    "pretrain": _training(
        "pretrain",
        brief="pretrain a model on .bin/.idx data",
        summary="Pretrain a model on .bin/.idx data, on this machine or as one rank under torchrun or srun.",
        example="mcore-rl pretrain tiny_moe/pretrain mesh.tp=2 mesh.ep=2 optim.lr=1e-3",
    ),
    "sft": _training(
        "sft",
        brief="fine-tune a model on conversations",
        summary="Fine-tune a model on conversations, from the weights of checkpoint.load.",
        example="mcore-rl sft tiny_moe/sft checkpoint.load=runs/quickstart/pretrain",
    ),
    "rm": _training(
        "rm",
        brief="train a reward model on pairs of answers",
        summary="Train a reward model on pairs of answers, from the weights of checkpoint.load.",
        example="mcore-rl rm tiny_moe/rm data.train=pairs.jsonl rm.centering_coeff=0.01",
    ),
    "dpo": _training(
        "dpo",
        brief="DPO, IPO, SimPO, ORPO and others on pairs of answers",
        summary="Optimise a model on pairs of answers: DPO, IPO, SimPO, ORPO and others, from the weights of "
        "checkpoint.load.",
        example="mcore-rl dpo tiny_moe/dpo checkpoint.load=runs/tiny_moe_sft dpo.beta=0.3",
    ),
    "rl": _training(
        "rl",
        brief="GRPO, GSPO, PPO and others on rewards",
        summary="Train a model on rewards: GRPO, GSPO, Kimi K2 and others, from the weights of checkpoint.load.",
        example="mcore-rl rl tiny_moe/grpo rl.loss.kind=gspo mesh.tp=2 mesh.ep=2",
    ),
    "study": Command(
        brief="compare arms of an RL config over seeds",
        summary="Run arms of an RL config from one start, for some seeds, and compare them in one table.",
        example="mcore-rl study tiny_moe/replay_study seeds=[1,2,3]",
        arguments=_study_arguments,
        module="mcore_rl.cli.study",
        config="study",
    ),
    "init": Command(
        brief="write a short config for a model",
        summary="Write a short config for a training of a model, on the GPUs named or on this machine.",
        example="mcore-rl init models/Qwen3-30B-A3B --program rl --gpus 8xH100",
        arguments=_init_arguments,
        module="mcore_rl.cli.init",
    ),
    "recipes": Command(
        brief="list the recipes that are shipped",
        summary="List the recipes that are shipped, by the names under which every command takes them for CONFIG.",
        example="mcore-rl recipes",
        arguments=_no_arguments,
        module="mcore_rl.cli.cli",
        main="list_recipes",
    ),
    "config": Command(
        brief="print a config after all checks",
        summary="Print the config of a file and overrides after all checks.",
        example="mcore-rl config qwen3_30b_a3b/pretrain mesh.dp=auto --ranks 64",
        arguments=_show_arguments,
        module="mcore_rl.cli.show",
        main="show_config",
        config="pretrain",
    ),
    "plan": Command(
        brief="memory, time and meshes of a training, without a GPU",
        summary="Plan a training on a cluster without a GPU: memory of every rank, seconds of a step, meshes that fit.",
        example="mcore-rl plan qwen3_30b_a3b/pretrain --cluster example_h100 --nodes 2 --search",
        arguments=_plan_arguments,
        module="mcore_rl.cli.plan",
    ),
}

CLUSTER: dict[str, Command] = {
    "launch": Command(
        brief="write and submit the Slurm job of a training",
        summary="Check a training, write its Slurm job, and submit it; with --dry-run show it.",
        example="mcore-rl launch tiny_moe/pretrain --cluster example_cpu --nodes 4",
        arguments=launch_arguments,
        module="mcore_rl.launch.submit",
    ),
    "jobs": Command(
        brief="list launched runs, and why they ended",
        summary="List launched runs: state, attempts, step, speed, last checkpoint, why they ended.",
        example="mcore-rl jobs runs/qwen3_30b_a3b",
        arguments=jobs_arguments,
        module="mcore_rl.launch.jobs",
    ),
    "attach": Command(
        brief="open a shell on a node of a running job",
        summary="Open a shell on a node of a running job, in its container, or run a command there.",
        example="mcore-rl attach runs/qwen3_30b_a3b --node n3 -- nvidia-smi -l 5",
        arguments=attach_arguments,
        module="mcore_rl.launch.attach",
    ),
    "doctor": Command(
        brief="what this machine has for training, and lacks",
        summary="Show what this machine has for training: versions, GPUs, layers, kernels, patches of Megatron; what "
        "is missing and what that costs. Status 1 when something is broken.",
        example="mcore-rl doctor --json",
        arguments=_doctor_arguments,
        module="mcore_rl.cli.doctor",
    ),
}

LOOK: dict[str, Command] = {
    "report": Command(
        brief="one HTML page about runs",
        summary="Write one HTML page about runs, side by side: curves, experts, speed, samples, warnings, settings.",
        example="mcore-rl report runs/quickstart/grpo runs/quickstart/gspo --output report.html",
        arguments=_report_arguments,
        module="mcore_rl.cli.show",
        main="make_report",
    ),
    "fields": Command(
        brief="explain fields of configs, such as rl.loss",
        summary="Explain the fields of a config, or of a section of it, or one field: default, type, meaning.",
        example="mcore-rl fields rl.loss",
        arguments=_fields_arguments,
        module="mcore_rl.cli.fields",
        main="show_fields",
    ),
    "completion": Command(
        brief="completion of commands and fields for bash",
        summary="Print the bash functions that complete commands, options, recipes and fields.",
        example="mcore-rl completion bash",
        arguments=_completion_arguments,
        module="mcore_rl.cli.fields",
        main="print_completion",
    ),
}
