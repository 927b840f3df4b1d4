"""Folders for the output of the ranks of an attempt."""

import os
from contextlib import suppress
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.storage.files import existing_part


def refuse_unwritable(run_dir: Path) -> None:
    """Raise a ConfigError if a run could not write to its folder, before an import or anything else that takes long."""
    existing = existing_part(run_dir)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {existing} may not be written by this user. Choose another.'
        )


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
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {error.strerror}. Choose another.'
        ) from None
