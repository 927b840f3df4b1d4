"""Start of a training's ranks from the command line, and the folders for their output."""

import argparse
import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mcore_rl.checks.inputs import absent_inputs, has_checkpoints
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.run import absent_packages, refuse, refuse_nothing_to_evaluate
from mcore_rl.cli.commands import Command
from mcore_rl.config.load import kind_of
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.memory import local_memory_violations
from mcore_rl.planning.training import training_of
from mcore_rl.storage.files import existing_part
from mcore_rl.workers.imports import ensure_imported
from mcore_rl.workers.launcher import launch_local, under_launcher


def start_ranks(command: Command, args: argparse.Namespace) -> int:
    """Run as a rank of `command` under a launcher; else start its ranks here and wait for them."""
    name, overrides = command.given(args)
    path, argv = Path(name), [name, *overrides]
    if under_launcher():
        if args.ranks:
            raise ConfigError(f"--ranks {args.ranks}, but a launcher has started the ranks. Leave it out.")
        return int(importlib.import_module(command.module).main(argv))
    program = PROGRAMS[_program_of(command, path, overrides)]
    config, ranks = program.checked_config(path, overrides, args.ranks)
    trains = command.module == program.module
    prepare(config, ranks, trains=trains)
    if not trains:
        refuse_nothing_to_evaluate(config)
    return launch_local(
        command.module,
        argv,
        ranks,
        next_log_dir(Path(config.run_dir)),
        [command.module],
        # Imported only after the ranks' own modules, which it needs too.
        lambda: importlib.import_module("mcore_rl.cli.before_ranks").refuse_first_records(config),
    )


def _program_of(command: Command, config: Path, overrides: Sequence[str]) -> str:
    assert command.program is not None
    if not command.other_programs:
        return command.program
    names = (command.program, *command.other_programs)
    if config.name == "config.toml" and (kind := kind_of(config)) not in names:
        raise ConfigError(
            f"{config.parent} is a run of {kind}, which has no prompts with a reward. Give an RL config with "
            f"checkpoint.load={config.parent}, or --model {config.parent} --data FILE --reward PART."
        )
    return kind_of(config, overrides, names)


def prepare(config: RunConfig, ranks: int, *, trains: bool) -> None:
    """Refuse what this machine or its files lack for a checked config, and import the model that it starts from."""
    run_dir = Path(config.run_dir)
    refuse(
        [
            *absent_inputs(config),
            *(absent_packages(config) if trains else ()),
            *local_memory_violations(training_of(config.decided(is_cuda=False), ranks), trains=trains),
        ]
    )
    # Before the import, which takes long.
    existing = existing_part(run_dir)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {existing} may not be written by this user. Choose another.'
        )
    if not has_checkpoints(run_dir):
        ensure_imported(config.checkpoint.load, config.model, run_dir)


def next_log_dir(run_dir: Path) -> Path:
    """Create and return a new folder `run_dir/logs/<n>`, so that no attempt overwrites an earlier attempt's output."""
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        while True:
            attempts = [int(folder.name) for folder in logs.iterdir() if folder.name.isdecimal()]
            folder = logs / str(max(attempts, default=-1) + 1)
            # Another start of the run may have created it meanwhile: the run's fence decides which of them trains.
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(f'run_dir="{run_dir}" cannot be written: {error.strerror}. Choose another.') from None
