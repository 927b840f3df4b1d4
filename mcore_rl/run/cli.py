"""`mcore-rl <command>`. Neither torch nor Megatron is imported before ranks are started, so that help is quick."""

import argparse
import difflib
import importlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.backend.launcher import error_text, launch_local, under_launcher
from mcore_rl.config.checks import check
from mcore_rl.config.describe import describe_sections
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.run import PretrainConfig, RunConfig
from mcore_rl.config.section import Section
from mcore_rl.config.sft import SFTConfig
from mcore_rl.config.sft_checks import check_sft
from mcore_rl.errors import ConfigError, McoreRlError
from mcore_rl.run.convert_arguments import convert_arguments, inspect_arguments
from mcore_rl.run.generate_arguments import generate_arguments


@dataclass(frozen=True, slots=True)
class Command:
    """What follows `mcore-rl`. `run` gets what `add_arguments` declares."""

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    config: type[Section] | None = None
    """Whose fields the help explains."""


@dataclass(frozen=True, slots=True)
class Program:
    """A training that runs on ranks."""

    module: str
    config: type[RunConfig]
    check: Callable[[Any, int], None]
    """Of such a config and a number of ranks."""

    def checked_config(self, args: argparse.Namespace) -> tuple[RunConfig, int]:
        """The config and the number of ranks it was checked for."""
        config = load_config(self.config, Path(args.config), args.overrides)
        ranks = args.ranks or config.mesh.smallest_world
        self.check(config, ranks)
        return config, ranks


PROGRAMS: dict[str, Program] = {
    "pretrain": Program("mcore_rl.run.pretrain", PretrainConfig, check),
    "sft": Program("mcore_rl.run.sft", SFTConfig, check_sft),
}


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
        config, ranks = training.checked_config(args)
        return launch_local(training.module, words, ranks, next_log_dir(Path(config.run_dir)))

    return run_ranks


def program(module: str) -> Callable[[argparse.Namespace], int]:
    """Run `module` in this process; it is imported only now."""

    def run_here(args: argparse.Namespace) -> int:
        return int(importlib.import_module(module).main(args))

    return run_here


def show_config(args: argparse.Namespace) -> int:
    """Print what a run would use, after the same checks."""
    config, ranks = PROGRAMS[args.program].checked_config(args)
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


def plot_arguments(parser: argparse.ArgumentParser) -> None:
    """A run."""
    parser.add_argument("run", type=Path, help="the run_dir of a training")


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
    "plot": Command(
        "Draw <run_dir>/metrics.png: loss, learning rate, gradient norm, load of the experts.",
        "mcore-rl plot runs/quickstart/pretrain",
        plot_arguments,
        program("mcore_rl.run.plot"),
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


def next_log_dir(run_dir: Path) -> Path:
    """A new folder `run_dir/logs/<n>`, so that no attempt overwrites the output of an earlier one."""
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        attempts = [int(folder.name) for folder in logs.iterdir() if folder.name.isdecimal()]
        folder = logs / str(max(attempts, default=-1) + 1)
        folder.mkdir()
    except OSError as error:
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {error.strerror}. Choose another.'
        ) from None
    return folder


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
    paragraphs = ["The fields of CONFIG.toml, with their defaults:"]
    for section in describe_sections(config):
        title = f"[{section.key}]  {section.meaning}" if section.key else section.meaning
        lines = textwrap.wrap(title, width)
        for doc in section.fields:
            lines.append(f"  {doc.key} = {doc.default}    ({doc.type})")
            lines += textwrap.wrap(doc.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    sys.exit(main())
