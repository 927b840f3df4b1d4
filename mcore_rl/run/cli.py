"""`mcore-rl <command>`. Neither torch nor Megatron is imported before ranks are started, so that help is quick."""

import argparse
import difflib
import functools
import importlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.arguments import jobs_arguments, launch_arguments
from mcore_rl import __version__
from mcore_rl.backend.launcher import error_text, launch_local, under_launcher
from mcore_rl.checks.programs import PROGRAMS, Program
from mcore_rl.config.describe import describe_sections
from mcore_rl.config.load import dump_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.section import Section
from mcore_rl.config.sft import SFTConfig
from mcore_rl.config.study import StudyConfig
from mcore_rl.errors import ConfigError, McoreRlError
from mcore_rl.run.convert_arguments import convert_arguments, inspect_arguments
from mcore_rl.run.generate_arguments import generate_arguments
from mcore_rl.run.log_folders import next_log_dir
from mcore_rl.run.problems_arguments import problems_arguments
from mcore_rl.run.report_arguments import report_arguments


@dataclass(frozen=True, slots=True)
class Command:
    """What follows `mcore-rl`. `run` gets what `add_arguments` declares."""

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    config: type[Section] | None = None
    """Whose fields the help explains."""


def ranks_of(training: Program) -> Callable[[argparse.Namespace], int]:
    """Be one rank of `training` under a launcher; without one, start its ranks here and wait for them."""

    def run_ranks(args: argparse.Namespace) -> int:
        words = [args.config, *args.overrides]
        if under_launcher():
            if args.ranks:
                raise ConfigError(
                    f"--ranks {args.ranks}, but a launcher has started the ranks. Leave it out."
                )
            return int(importlib.import_module(training.module).main(words))
        config, ranks = training.checked_config(Path(args.config), args.overrides, args.ranks)
        return launch_local(training.module, words, ranks, next_log_dir(Path(config.run_dir)))

    return run_ranks


def program(module: str) -> Callable[[argparse.Namespace], int]:
    """Run `module` in this process; it is imported only now."""

    def run_here(args: argparse.Namespace) -> int:
        return int(importlib.import_module(module).main(args))

    return run_here


def show_config(args: argparse.Namespace) -> int:
    """Print what a run would use, after the same checks."""
    training = PROGRAMS[args.program]
    config, ranks = training.checked_config(Path(args.config), args.overrides, args.ranks)
    sys.stdout.write(f"# passes all checks on {ranks} ranks\n{dump_config(config)}")
    return 0


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """A config file, fields on top of it, and how many ranks."""
    parser.add_argument("config", metavar="CONFIG.toml", help="the config file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")
    parser.add_argument("--ranks", type=positive, help="local ranks; default: the fewest that the mesh needs")


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """The same, and whose config it is."""
    config_arguments(parser)
    parser.add_argument(
        "--program", choices=PROGRAMS, default="pretrain", help="whose config (default pretrain)"
    )


def study_arguments(parser: argparse.ArgumentParser) -> None:
    """A study, and fields on top of it."""
    parser.add_argument("config", metavar="STUDY.toml", help="the study file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")


COMMANDS: dict[str, Command] = {
    "pretrain": Command(
        "Pretrain a model on .bin/.idx data, on this machine or as one rank under torchrun or srun.",
        "mcore-rl pretrain launch/recipes/tiny_moe/pretrain.toml mesh.tp=2 mesh.ep=2 optim.lr=1e-3",
        config_arguments,
        ranks_of(PROGRAMS["pretrain"]),
        PretrainConfig,
    ),
    "sft": Command(
        "Fine-tune a model on conversations, from the weights of checkpoint.load.",
        "mcore-rl sft launch/recipes/tiny_moe/sft.toml checkpoint.load=runs/quickstart/pretrain",
        config_arguments,
        ranks_of(PROGRAMS["sft"]),
        SFTConfig,
    ),
    "rl": Command(
        "Let a model learn from rewards: GRPO, GSPO, Kimi K2 and others, from the weights of checkpoint.load.",
        "mcore-rl rl launch/recipes/tiny_moe/grpo.toml rl.loss.kind=gspo mesh.tp=2 mesh.ep=2",
        config_arguments,
        ranks_of(PROGRAMS["rl"]),
        RlRunConfig,
    ),
    "eval": Command(
        "Answer the held-out prompts of an RL config (rl.eval) and tell the share of right ones, and pass@k.",
        "mcore-rl eval launch/recipes/tiny_moe/grpo.toml checkpoint.load=runs/tiny_moe_grpo rl.eval.samples=4 "
        "rl.eval.temperature=0.7",
        config_arguments,
        ranks_of(replace(PROGRAMS["rl"], module="mcore_rl.run.evaluate")),
        RlRunConfig,
    ),
    "study": Command(
        "Run arms of an RL config from one start, for some seeds, and compare them in one table.",
        "mcore-rl study launch/recipes/tiny_moe/replay_study.toml seeds=[1,2,3]",
        study_arguments,
        program("mcore_rl.run.study"),
        StudyConfig,
    ),
    "problems": Command(
        "Write problems of an RL config's built-in task with their answers, to fine-tune on: none is held out there.",
        "mcore-rl problems launch/recipes/tiny_moe/grpo.toml --count 20000 --output runs/quickstart/chat.jsonl",
        problems_arguments,
        program("mcore_rl.run.problems"),
    ),
    "config": Command(
        "Print the config that a file and overrides make, after all checks, and start nothing.",
        "mcore-rl config launch/recipes/qwen3_30b_a3b/pretrain.toml mesh.dp=0 --ranks 64",
        show_arguments,
        show_config,
        PretrainConfig,
    ),
    "generate": Command(
        "Continue a text with a checkpoint of a run, on one process, whatever its mesh was.",
        'mcore-rl generate --run runs/quickstart/pretrain --prompt "def read_" --tokens 40 --temperature 0.7',
        generate_arguments,
        program("mcore_rl.run.generate"),
    ),
    "convert": Command(
        "Convert checkpoints between Hugging Face's and Megatron's formats, and prove that nothing was lost.",
        "mcore-rl convert import models/Qwen3-30B-A3B checkpoints/qwen3 --workers 8 --max-ram 16G",
        convert_arguments,
        program("mcore_rl.run.convert"),
    ),
    "inspect": Command(
        "List what is in a checkpoint of either format, or how it differs from another.",
        "mcore-rl inspect runs/quickstart/pretrain --diff checkpoints/qwen3",
        inspect_arguments,
        program("mcore_rl.run.inspect_checkpoint"),
    ),
    "launch": Command(
        "Check a training, write its Slurm job, and submit it; with --dry-run show it.",
        "mcore-rl launch launch/recipes/tiny_moe/pretrain.toml --cluster launch/clusters/example_cpu.toml --nodes 4",
        launch_arguments,
        program("launch.submit"),
    ),
    "jobs": Command(
        "Tell of runs that were launched: state, attempts, step, speed, last checkpoint, why they ended.",
        "mcore-rl jobs runs/qwen3_30b_a3b",
        jobs_arguments,
        program("launch.jobs"),
    ),
    "report": Command(
        "Write one HTML page about runs, side by side: curves, experts, speed, samples, warnings, what was run.",
        "mcore-rl report runs/quickstart/grpo runs/quickstart/gspo --output report.html",
        report_arguments,
        program("mcore_rl.run.report"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; the exit status: 0, 2 for what the user can mend, otherwise that of the first failure."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if name == "--version":
        sys.stdout.write(f"mcore-rl {__version__}\n")
        return 0
    try:
        return run(name, arguments)
    except McoreRlError as error:
        sys.stderr.write(error_text(error) + "\n")
        return 2


def run(name: str, arguments: Sequence[str]) -> int:
    """The exit status of command `name`."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise ConfigError(f"There is no command {name}. {remedy}")
    command = COMMANDS[name]
    return command.run(parser_of(name, command).parse_intermixed_args(arguments))


def overview() -> str:
    """What `mcore-rl --help` says."""
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: mcore-rl <command> ...\n\n"
        f"Pretraining and reinforcement learning of Mixture-of-Experts models on Megatron-Core.\n\n{commands}\n\n"
        f"`mcore-rl <command> --help` says more. An example:\n  {COMMANDS['pretrain'].example}\n"
    )


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """The arguments of a command; where it has a config, the help ends in its fields."""
    parser = argparse.ArgumentParser(
        prog=f"mcore-rl {name}",
        description=f"{command.summary}\n\nexample:\n  {command.example}",
        epilog=fields_help(command.config) if command.config else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def positive(text: str) -> int:
    """The number that an argument asks for."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def fields_help(config: type[Section]) -> str:
    """Every field of the config by section: key, default, type, meaning."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    wrap = functools.partial(textwrap.wrap, width=width, break_on_hyphens=False)
    paragraphs = ["The fields of CONFIG.toml, with their defaults:"]
    for section in describe_sections(config):
        title = f"[{section.key}]  {section.meaning}" if section.key else section.meaning
        lines = wrap(title)
        for doc in section.fields:
            lines.append(f"  {doc.key} = {doc.default}    ({doc.type})")
            lines += wrap(doc.meaning, initial_indent=" " * 6, subsequent_indent=" " * 6)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    sys.exit(main())
